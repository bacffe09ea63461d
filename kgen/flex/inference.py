"""Inference of unknown dtypes of tensors from the use of their elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kgen.expr.nodes import Type
from kgen.flex import composed
from kgen.flex.values import Tensor, Term
from kgen.spec.common import ELEMENTS

INT, FLOAT, BOOL = Type.INT, Type.FLOAT, Type.BOOL
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
LOGICAL = frozenset({"logical_and", "logical_or", "logical_xor", "logical_not"})
BITS = frozenset({"bitand", "bitor", "bitxor", "invert"})
REAL = composed.REAL | frozenset(
    {
        *("div", "exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sqrt", "rsqrt", "tanh"),
        *("sigmoid", "silu", "sin", "cos", "tan", "atan", "erf", "gelu", "gelu_tanh"),
        *("logsigmoid", "elu", "leaky_relu", "reciprocal", "softsign", "cosh", "relu6"),
        *("floor", "ceil", "round", "trunc", "sign"),
    }
)
"""Functions with real arguments and results, and functions that keep integers."""
ROUNDING = frozenset({"floor", "ceil", "round", "trunc", "sign"})


def walk(roots: list[Term]) -> Iterator[Term]:
    """Yield every term once, operands first."""
    seen: set[int] = set()
    waiting: list[tuple[Term, bool]] = [(root, False) for root in reversed(roots)]
    while waiting:
        term, ready = waiting.pop()
        if ready:
            yield term
        elif id(term) not in seen:
            seen.add(id(term))
            waiting.append((term, True))
            waiting += [(arg, False) for arg in reversed(term.args) if isinstance(arg, Term)]


def infer(roots: Mapping[Term, Type]) -> dict[Tensor, str]:
    """Infer the dtype of each tensor without one. `roots` has the required type of each root."""
    found: dict[Tensor, str] = {}
    wanted: dict[int, Type | None] = {id(term): type_ for term, type_ in roots.items()}
    for term in reversed(list(walk(list(roots)))):
        want = wanted.get(id(term))
        if term.fn == "read":
            tensor = term.args[0]
            if tensor.dtype is None and want is not None and tensor not in found:
                found[tensor] = {FLOAT: "fp32", INT: "int32", BOOL: "bool"}[want]
        for arg, type_ in zip(term.args, _demands(term, want), strict=True):
            if isinstance(arg, Term) and wanted.get(id(arg)) is None:
                wanted[id(arg)] = type_
    for term in walk(list(roots)):
        if term.fn in ("read", "length") and term.args[0].dtype is None:
            found.setdefault(term.args[0], "int32")
    return found


def _demands(term: Term, want: Type | None) -> list[Type | None]:
    """Return the required type of each argument, or None."""
    fn, count = term.fn, len(term.args)
    if fn == "read":
        return [None] + [INT] * (count - 1)
    if fn in LOGICAL:
        return [BOOL] * count
    if fn in BITS:
        if any(_surely(arg) is BOOL for arg in term.args):
            return [BOOL] * count
        return [want if want in (BOOL, INT) else INT] * count
    if fn in ("where", "masked_fill"):
        value = FLOAT if want is FLOAT else want
        return [BOOL, value, value] if fn == "where" else [value, BOOL, value]
    if fn in COMPARISONS:
        types = [_surely(arg) for arg in term.args]
        kind = FLOAT if FLOAT in types else BOOL if BOOL in types else INT
        return [kind] * count
    if fn in ("floordiv", "mod", "remainder", "lshift", "rshift"):
        return [FLOAT if FLOAT in [_surely(arg) for arg in term.args] else INT] * count
    if fn in ("cast", "like", "length"):
        return [None] * count
    if fn in REAL - ROUNDING or fn in composed.TRUTH:
        return [FLOAT] * count
    return [want if want is not BOOL else INT] * count


def _surely(arg: Any) -> Type | None:
    """Return the type of an argument if it is obvious, otherwise None."""
    if not isinstance(arg, Term):
        return BOOL if isinstance(arg, bool) else FLOAT if isinstance(arg, float) else INT
    if arg.fn == "var":
        return FLOAT if arg.args[0] == "score" else INT
    if arg.fn == "read":
        return ELEMENTS.get(arg.args[0].dtype) if arg.args[0].dtype else None
    if arg.fn in COMPARISONS | LOGICAL | composed.TRUTH:
        return BOOL
    if arg.fn in REAL:
        return FLOAT
    if arg.fn in BITS and any(_surely(a) is BOOL for a in arg.args):
        return BOOL
    if arg.fn == "cast":
        return {"bool": BOOL}.get(
            arg.args[1], FLOAT if arg.args[1] in ("fp32", "bf16", "fp16", "fp64") else INT
        )
    if arg.fn == "const":
        return _surely(arg.args[0])
    return None
