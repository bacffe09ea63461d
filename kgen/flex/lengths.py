"""Lengths that the source does not say: no function may pass one on as its result."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kgen.flex.values import Extent

_MEASURES = frozenset({"len", "size", "numel"})


def settled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reader of calls, whose result is no length but that of a function for lengths.

    A reader returns an unknown argument for an unknown result. A length that is unknown ahead of the mods has a value
    in them, which is not that of the result.
    """

    @wraps(function)
    def read(ev: Any, callee: Any, *rest: Any) -> Any:
        found = function(ev, callee, *rest)
        name = callee.rpartition(".")[2] if isinstance(callee, str) else callee.name
        return found.lost() if isinstance(found, Extent) and name not in _MEASURES else found

    return read
