"""Cache results per spec, so that several stages share them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar

from kgen.spec.load import Loaded

T = TypeVar("T")


def once_each(make: Callable[..., T]) -> Callable[..., T]:
    """Cache `make(loaded, ...)` per argument list, for the lifetime of the `Loaded` object.

    The result must not refer to the object. Specs are compared by identity: a spec that is loaded
    twice has two results.
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
