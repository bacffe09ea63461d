"""Lengths that the source does not define. A function must not return one as its own result."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kgen.flex.values import Extent

_MEASURES = frozenset({"len", "size", "numel"})


def settled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reader of calls so that it does not return a length argument as its result.

    A reader returns an unknown argument to say that its result is unknown. A length is unknown
    before the mods but has a value inside them. That value is not the result of the call.
    """

    @wraps(function)
    def read(ev: Any, callee: Any, *rest: Any) -> Any:
        found = function(ev, callee, *rest)
        name = callee.rpartition(".")[2] if isinstance(callee, str) else callee.name
        return found.lost() if isinstance(found, Extent) and name not in _MEASURES else found

    return read
