"""Pointwise operations on values of a pair and on whole tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kgen.flex import tensors
from kgen.flex.reader import Reader
from kgen.flex.source import Place
from kgen.flex.tables import DEFAULTS, ELEMENTWISE
from kgen.flex.values import (
    Extent,
    Part,
    Tensor,
    Term,
    Unknown,
    is_number,
    kind,
    measured,
)

Keywords = dict[str, Any]

NO_REDUCTION = "a mod computes one pair: compute the sum beforehand, and index the tensor of sums"


def applied(ev: Reader, fn: str, args: tuple[Any, ...], place: Place) -> Any:
    """Apply a pointwise operation.

    Return a term inside a mod, or a tensor for whole tensors before the mods.
    """
    if ev.of_a_pair or any(isinstance(a, Term) for a in args):
        args = tuple(tensors.scalar(a, place) for a in args)
    if any(isinstance(a, Tensor) for a in args):
        if not ev.of_a_pair and not any(isinstance(a, Term) for a in args):
            return tensors.computed(fn, args, place)
        whole = next(a for a in args if isinstance(a, Tensor))
        message = f"{tensors.called(whole)} is a whole tensor here"
        place.refuse("whole-tensor", message, "index it, so that one element is left")
    if fn == "mul" and any(isinstance(a, float) and math.isinf(a) for a in args):
        hint = 'write `torch.where(allowed, score, -float("inf"))`'
        place.refuse(
            "not-in-language", "a product with infinity is NaN if the other factor is zero", hint
        )
    return made(ev, fn, [operand(ev, a, place) for a in args], place)


def of_lengths(
    ev: Reader, fn: str, args: tuple[Any, ...], place: Place
) -> tuple[tuple[Any, ...], Extent | None]:
    """Return the operands with lengths as terms, and None.

    Before the mods, return the operands unchanged and the length that the operator computes, if
    there is one.
    """
    first = next((a for a in args if isinstance(a, Extent)), None)
    if first is None or ev.of_a_pair:
        return tuple(map(measured, args)), None
    if not all(is_number(a) or isinstance(a, Extent) for a in args):
        return args, None
    return args, replace(first, term=applied(ev, fn, tuple(map(measured, args)), place))


def made(ev: Reader, fn: str, args: Sequence[Any], place: Place) -> Term:
    """Return the result of an operation, detached inside `torch.no_grad()`."""
    term = Term(fn, args, place)
    return Term("detach", (term,), place) if ev.detaches else term


def operand(ev: Reader, value: Any, place: Place) -> Term | int | float | bool:
    """Return a value as an operand of an operation on a pair. Refuse unsuitable values."""
    if isinstance(value, Part):
        return tensors.element(value)
    value = tensors.scalar(value, place)
    if isinstance(value, Tensor):
        message = f"{tensors.called(value)} is a whole tensor here"
        place.refuse("whole-tensor", message, "index it, so that one element is left")
    if isinstance(value, Unknown):
        ev.untold(value)
    if isinstance(value, Term) or is_number(value):
        return value  # type: ignore[no-any-return]
    place.refuse("bad-call", f"{kind(value)} is used as a number", "use numbers and tensors")


def called(ev: Reader, name: str, args: list[Any], keywords: Keywords, place: Place) -> Any:
    fn, parameters = ELEMENTWISE[name]
    for ignored in ("out", "inplace", "device"):
        keywords.pop(ignored, None)
    if name in ("max", "min") and len(args) == 1:
        place.refuse("reduction", f"`{name}` is a reduction", NO_REDUCTION)
    given = dict(zip(parameters, args, strict=False))
    mode = keywords.pop("rounding_mode", None)
    scale = keywords.pop("alpha", 1) if fn in ("add", "sub") else 1
    scale = keywords.pop("value", 1) if fn == "addcmul" else scale
    tanh = keywords.pop("approximate", "none") == "tanh"
    if len(args) > len(parameters) or set(keywords) - {*parameters}:
        place.refuse(
            "bad-call", f"wrong arguments for `{name}`", f"write `{name}({', '.join(parameters)})`"
        )
    given |= keywords
    if fn == "clamp":
        return _clamped(ev, given, place)
    defaults = DEFAULTS.get(fn, {})
    given = {p: value for p, value in given.items() if value is not None or p not in defaults}
    missing = [p for p in parameters if p not in given and p not in defaults]
    if missing:
        place.refuse(
            "bad-call", f"`{name}` needs `{missing[0]}`", f"write `{name}({', '.join(parameters)})`"
        )
    values = tuple(given.get(p, defaults.get(p)) for p in parameters)
    if any(isinstance(v, Unknown) for v in values) and not ev.of_a_pair:
        return next(v for v in values if isinstance(v, Unknown))
    if fn == "gelu" and tanh:
        fn = "gelu_tanh"
    if fn == "div" and mode is not None:
        fn = "floordiv" if mode == "floor" else "truncdiv"
    if scale != 1:
        values = (*values[:-1], applied(ev, "mul", (values[-1], scale), place))
    return applied(ev, fn, values, place)


def _clamped(ev: Reader, given: Keywords, place: Place) -> Any:
    value = given.get("input")
    low, high = given.get("min"), given.get("max")
    if low is None and high is None:
        place.refuse("bad-call", "`clamp` needs a bound", "write `clamp(x, min, max)`")
    if low is not None and high is not None:
        return applied(ev, "clamp", (value, low, high), place)
    return applied(
        ev, "min" if low is None else "max", (value, high if low is None else low), place
    )
