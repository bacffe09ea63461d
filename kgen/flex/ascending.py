"""Bounds and order of the integers in a tensor, if the source alone proves them.

A tensor loses its facts if the source changes it in place or passes it to unread code.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kgen.flex.values import Tensor

COUNT = 2**31 - 1
"""The largest number of elements in a dimension."""
_OF_NO_ACCOUNT = frozenset(
    {
        "dtype",
        "device",
        "layout",
        "pin_memory",
        "requires_grad",
        "memory_format",
        "non_blocking",
        "copy",
    }
)
"""Options that change no integer, except that a dtype may be too narrow."""
_OPTIONS = {
    "cumsum": frozenset({"axis"}),
    "clamp": frozenset({"min", "max"}),
    "searchsorted": frozenset({"right", "side", "out_int32", "sorter"}),
    "bucketize": frozenset({"right", "out_int32"}),
    "repeat_interleave": frozenset({"output_size"}),
    "sort": frozenset({"stable"}),
    "unique": frozenset({"dim", "return_inverse", "return_counts"}),
    "unique_consecutive": frozenset({"dim", "return_inverse", "return_counts"}),
}
"""Further options by function. The rules of the functions handle them."""
_RANGES = {
    "bool": (0, 1),
    "uint8": (0, 255),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
}
_RANGES |= {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


@dataclass(frozen=True)
class Facts:
    """Proved facts about the integers of a tensor.

    `ascends`: each row of the last axis ascends. `ordered`: the source sorted the elements, and
    they are not placeholders.
    """

    least: int
    most: int
    ascends: bool = False
    ordered: bool = False


def facts(value: Any) -> Facts | None:
    """Return the proved facts of a tensor or a number, or None."""
    if isinstance(value, bool | int):
        return Facts(int(value), int(value), True)
    if not isinstance(value, Tensor):
        return None
    if isinstance(value.facts, Facts) and not any(root.changed for root in value.roots):
        return value.facts
    return Facts(*_RANGES[value.dtype]) if value.dtype in _RANGES else None


def not_negative(tensor: Tensor) -> bool:
    """True if no element is negative."""
    found = facts(tensor)
    return found is not None and found.least >= 0


def ascends(tensor: Tensor) -> bool:
    """True if the source proves that each row ascends."""
    found = facts(tensor)
    return found is not None and found.ascends and found.ordered


def learn(name: str, args: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> None:
    """Record the facts that a torch function proves about its result."""
    made = result
    if (name == "sort" and isinstance(result, tuple)) or (
        name == "unique" and isinstance(result, tuple)
    ):
        made = result[0]
    elif (
        name == "unique_consecutive"
        and isinstance(result, tuple)
        and keywords.get("return_inverse") is True
    ):
        made = result[1]
    rule = _RULES.get(name)
    if (
        rule is None
        or not isinstance(made, Tensor)
        or made.dtype not in _RANGES
        or made.facts is not None
    ):
        return
    known = (
        _OF_NO_ACCOUNT | _OPTIONS.get(name, frozenset()) | inspect.signature(rule).parameters.keys()
    )
    if not keywords.keys() <= known:
        return
    if any(made is a for a in args) or made.place.source.name.startswith("--"):
        return  # in an EXPR, the numbers are placeholders for shapes
    try:
        found = rule(made, *args, **keywords)
    except (TypeError, ValueError):
        return  # no rule for these arguments
    if found is not None:
        made.facts = _held(found, made.dtype)


def _held(found: Facts, dtype: str) -> Facts | None:
    """Return the facts if the dtype can hold every number within the bounds."""
    low, high = _RANGES[dtype]
    return found if low <= found.least and found.most <= high else None


# --- what makes numbers ------------------------


def literal(leaves: Sequence[Any], rows: int) -> Facts | None:
    """Return the facts of literal numbers, listed in rows of equal length."""
    if not leaves or not all(type(n) in (int, bool) for n in leaves):
        return None
    length = len(leaves) // max(rows, 1)
    parts = [leaves[i : i + length] for i in range(0, len(leaves), max(length, 1))]
    ascends = all(a <= b for part in parts for a, b in itertools.pairwise(part))
    return Facts(min(leaves), max(leaves), ascends)


def _arange(made: Tensor, *args: Any, **keywords: Any) -> Facts | None:
    start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    if type(start) is not int or type(step) is not int or step < 1:
        return None
    if type(end) is int:
        return Facts(start, max(start, end - 1), True, True)
    return (
        Facts(start, start + step * COUNT, True, True)
        if (start, step) != (0, 1)
        else Facts(0, COUNT, True, True)
    )


def _filled(value: Any) -> Facts | None:
    return Facts(int(value), int(value), True) if isinstance(value, bool | int) else None


def _full(made: Tensor, size: Any, fill_value: Any, **keywords: Any) -> Facts | None:
    return _filled(fill_value)


def _randint(made: Tensor, *args: Any, **keywords: Any) -> Facts | None:
    low, high = (args[0], args[1]) if len(args) > 1 and type(args[1]) is int else (0, args[0])
    return Facts(low, max(low, high - 1)) if type(low) is int and type(high) is int else None


# --- what puts them in order ------------------------


def _last(made: Tensor, dim: Any) -> bool:
    """True if a dimension is the last one."""
    return dim == -1 or (made.shape is not None and dim == len(made.shape) - 1)


def _cumsum(made: Tensor, input: Any, dim: Any = None, **keywords: Any) -> Facts | None:
    found = facts(input)
    if found is None or found.least < 0 or not _last(made, keywords.get("axis", dim)):
        return None
    length = made.shape[-1] if made.shape else None
    most = min(
        found.most * (COUNT if length is None else length), COUNT if found.most <= 1 else 2**63
    )
    return Facts(0, most, True, True)


def _repeat_interleave(
    made: Tensor, input: Any, repeats: Any = None, dim: Any = None, **keywords: Any
) -> Facts | None:
    if repeats is None:
        # only counts: position 0 repeated by its count, then 1, ...
        return Facts(0, COUNT, True, True)
    found = facts(input)
    if found is None or not isinstance(input, Tensor):
        return None
    in_rows = input.shape is not None and (
        len(input.shape) == 1 if dim is None else dim in (-1, len(input.shape) - 1)
    )
    return Facts(found.least, found.most, found.ascends and in_rows, True)


def _searchsorted(made: Tensor, sorted_sequence: Any, input: Any, **keywords: Any) -> Facts | None:
    bounds, values = facts(sorted_sequence), facts(input)
    ordered = bounds is not None and values is not None and bounds.ascends and values.ascends
    plain = isinstance(sorted_sequence, Tensor) and len(sorted_sequence.shape or (0, 0)) == 1
    return Facts(0, COUNT, ordered and plain and "sorter" not in keywords, True)


def _bucketize(made: Tensor, input: Any, boundaries: Any, **keywords: Any) -> Facts | None:
    return _searchsorted(made, boundaries, input)


def _sort(
    made: Tensor, input: Any, dim: Any = -1, descending: Any = False, **keywords: Any
) -> Facts | None:
    found = facts(input)
    in_order = descending is False and _last(made, dim)
    return Facts(found.least, found.most, in_order, True) if found is not None else None


def _unique(made: Tensor, input: Any, sorted: Any = True, **keywords: Any) -> Facts | None:
    found = facts(input)
    one = keywords.get("dim") is None and sorted is True
    return Facts(found.least, found.most, one, True) if found is not None else None


def _unique_consecutive(made: Tensor, input: Any, *rest: Any, **keywords: Any) -> Facts | None:
    one = not rest and keywords.get("dim") is None and len(made.shape or ()) == 1
    return Facts(0, COUNT, one, True) if keywords.get("return_inverse") is True else None


def _cat(made: Tensor, tensors: Any, dim: Any = 0, **keywords: Any) -> Facts | None:
    found = [facts(part) for part in tensors]
    parts = [part for part in found if part is not None]
    if not parts or len(parts) < len(found):
        return None
    flat = made.shape is not None and len(made.shape) == 1 and dim in (0, -1)
    in_order = all(part.ascends for part in parts)
    in_order = in_order and all(a.most <= b.least for a, b in itertools.pairwise(parts))
    return Facts(min(p.least for p in parts), max(p.most for p in parts), in_order and flat, True)


def _stack(made: Tensor, tensors: Any, dim: Any = 0, **keywords: Any) -> Facts | None:
    found = [facts(part) for part in tensors]
    parts = [part for part in found if part is not None]
    if not parts or len(parts) < len(found):
        return None
    rows = all(part.ascends for part in parts) and dim == 0 and len(made.shape or ()) > 1
    ordered = all(part.ordered for part in parts)
    return Facts(min(p.least for p in parts), max(p.most for p in parts), rows, ordered)


# --- what keeps them in order ------------------------


def _kept(made: Tensor, input: Any, *rest: Any, **keywords: Any) -> Facts | None:
    return facts(input)


def _moved(made: Tensor, input: Any, *rest: Any, **keywords: Any) -> Facts | None:
    found = facts(input)
    return None if found is None else replace(found, ascends=False)


def _unsqueeze(made: Tensor, input: Any, dim: Any, **keywords: Any) -> Facts | None:
    found = facts(input)
    before_last = made.shape is not None and dim in range(len(made.shape) - 1)
    return (
        None
        if found is None
        else replace(found, ascends=found.ascends and (dim == 0 or before_last))
    )


def _repeat(made: Tensor, input: Any, *sizes: Any, **keywords: Any) -> Facts | None:
    found = facts(input)
    flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    once = bool(flat) and flat[-1] == 1
    return None if found is None else replace(found, ascends=found.ascends and once)


def _numbers(*values: Any) -> list[Facts] | None:
    """Return the facts of the operands. An operand may be a number."""
    found = [facts(value) for value in values]
    return [one for one in found if one is not None] if None not in found else None


def _added(made: Tensor, a: Any, b: Any, **keywords: Any) -> Facts | None:
    known = _numbers(a, b)
    if known is None or keywords:
        return None
    x, y = known
    in_order = x.ascends and y.ascends
    return Facts(x.least + y.least, x.most + y.most, in_order, x.ordered or y.ordered)


def _subtracted(made: Tensor, a: Any, b: Any, **keywords: Any) -> Facts | None:
    known = _numbers(a, b)
    if known is None or keywords:
        return None
    x, y = known
    return Facts(x.least - y.most, x.most - y.least, x.ascends and isinstance(b, int), x.ordered)


def _scaled(made: Tensor, a: Any, b: Any, **keywords: Any) -> Facts | None:
    if isinstance(a, int):
        a, b = b, a
    found = facts(a)
    if found is None or type(b) is not int or b < 0:
        return None
    return Facts(found.least * b, found.most * b, found.ascends, found.ordered)


def _divided(made: Tensor, a: Any, b: Any, **keywords: Any) -> Facts | None:
    found = facts(a)
    if found is None or type(b) is not int or b < 1 or not isinstance(a, Tensor):
        return None
    return Facts(found.least // b, found.most // b, found.ascends, found.ordered)


def _shifted(made: Tensor, a: Any, b: Any, **keywords: Any) -> Facts | None:
    return _divided(made, a, 2**b) if type(b) is int and 0 <= b < 31 else None


def _bounded(choose: Any) -> Any:
    def rule(made: Tensor, a: Any, b: Any, **keywords: Any) -> Facts | None:
        known = _numbers(a, b)
        if known is None:
            return None
        x, y = known
        bounds = choose(x.least, y.least), choose(x.most, y.most)
        return Facts(*bounds, x.ascends and y.ascends, x.ordered or y.ordered)

    return rule


def _clamp(
    made: Tensor, a: Any, low: Any = None, high: Any = None, **keywords: Any
) -> Facts | None:
    found = facts(a)
    low, high = keywords.get("min", low), keywords.get("max", high)
    if found is None or not all(n is None or type(n) is int for n in (low, high)):
        return None
    least, most = (n if low is None else max(n, low) for n in (found.least, found.most))
    least, most = (n if high is None else min(n, high) for n in (least, most))
    return Facts(least, most, found.ascends, found.ordered)


_RULES: Mapping[str, Any] = {
    "arange": _arange,
    "zeros": lambda made, *args, **keywords: _filled(0),
    "ones": lambda made, *args, **keywords: _filled(1),
    "full": _full,
    "randint": _randint,
    "cumsum": _cumsum,
    "repeat_interleave": _repeat_interleave,
    "searchsorted": _searchsorted,
    "bucketize": _bucketize,
    "sort": _sort,
    "unique": _unique,
    "unique_consecutive": _unique_consecutive,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "stack": _stack,
    **dict.fromkeys(("to", "int", "long", "clone", "detach", "expand", "sliced"), _kept),
    **dict.fromkeys(("view", "reshape", "flatten", "ravel", "chosen", "flip", "roll"), _moved),
    "unsqueeze": _unsqueeze,
    "repeat": _repeat,
    "add": _added,
    "sub": _subtracted,
    "mul": _scaled,
    "floordiv": _divided,
    "rshift": _shifted,
    "min": _bounded(min),
    "max": _bounded(max),
    "clamp": _clamp,
}
"""Rules by the name of a torch function or an operator."""
