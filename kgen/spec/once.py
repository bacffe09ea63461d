"""Results that are made once of a spec, however many stages ask for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar

from kgen.spec.load import Loaded

T = TypeVar("T")


def once_each(make: Callable[..., T]) -> Callable[..., T]:
    """Make something of a `Loaded`, with more arguments, once for as long as that object lives.

    The result must not hold the object. Specs are known by identity: one that is loaded anew is made anew.
    """
    made: dict[Hashable, Any] = {}

    @wraps(make)
    def found(loaded: Loaded, *more: Hashable, **named: Hashable) -> T:
        key = (id(loaded), *more, *named.items())
        if key not in made:
            made[key] = make(loaded, *more, **named)
            weakref.finalize(loaded, made.pop, key)
        return made[key]  # type: ignore[no-any-return]

    return found
