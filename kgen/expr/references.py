"""References of functions that need more than one call of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def reduced(name: str) -> Callable[..., Any]:
    """Return a reference that applies a function of two tensors from left to right."""

    def reference(torch: Any, *args: Any) -> Any:
        result = args[0]
        for arg in args[1:]:
            result = getattr(torch, name)(*torch.broadcast_tensors(*_promoted(torch, result, arg)))
        return result

    return reference


def _promoted(torch: Any, *args: Any) -> list[Any]:
    dtype = args[0].dtype
    for arg in args[1:]:
        dtype = torch.promote_types(dtype, arg.dtype)
    return [arg.to(dtype) for arg in args]


def where(torch: Any, condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, *_promoted(torch, a, b))


def floor_mod(torch: Any, a: Any, b: Any) -> Any:
    return torch.remainder(a, b)


def floor_div(torch: Any, a: Any, b: Any) -> Any:
    return torch.div(a, b, rounding_mode="floor")
