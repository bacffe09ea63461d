"""Print expressions in C++, in double and 64-bit integers, for the reference in the C++ example of
a package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kgen.expr.nodes import Call, Const, Node, Read, Type, Var
from kgen.spec.load import Loaded
from kgen.targets.code import Code, rewritten
from kgen.targets.native import Tensor, in_struct, refuse

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "and": "&&",
    "or": "||",
    "bitand": "&",
    "bitor": "|",
    "bitxor": "^",
    "lshift": "<<",
    "rshift": ">>",
}
FORMS = {
    "div": "(double({0}) / double({1}))",
    "neg": "(- {0})",
    "not": "(!{0})",
    "invert": "(~{0})",
    "where": "({0} ? {1} : {2})",
    "rsqrt": "(1.0 / std::sqrt({0}))",
    "silu": "({0} * example::f_sigmoid({0}))",
    "sigmoid": "example::f_sigmoid({0})",
    "sign": "example::f_sign({0})",
    "round": "std::nearbyint({0})",
    "gelu": "(0.5 * {0} * (1.0 + std::erf({0} * 0.70710678118654752)))",
    "clamp": "std::min<{type}>(std::max<{type}>({0}, {1}), {2})",
    "float": "double({0})",
    "detach": "({0})",
    "int": "int64_t({0})",
    "mod": "example::f_mod({0}, {1})",
    "floordiv": "example::f_floordiv({0}, {1})",
    "abs": "std::abs({0})",
}
PLAIN = [
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "tanh",
    "sin",
    "cos",
    "atan",
    "floor",
    "ceil",
    "pow",
    "erf",
    "log1p",
    "expm1",
]
"""Functions with the same name in C++."""
FUNCTIONS = frozenset({*INFIX, *FORMS, *PLAIN, "min", "max"})
TYPES = {Type.INT: "int64_t", Type.LONG: "int64_t", Type.FLOAT: "double", Type.BOOL: "bool"}


def in_cpp(node: Node, names: Mapping[str, str]) -> str:
    """Print a tree in C++.

    `names` maps variables and buffers. Raise `KeyError` for an unknown function.
    """
    match node:
        case Const(value, kind):
            return _number(value, kind)
        case Var(name, _):
            return "INFINITY" if name == "inf" else names[name]
        case Read(buffer, indices, kind):
            at = ", ".join(f"int64_t({in_cpp(i, names)})" for i in indices)
            return f"{TYPES[kind]}({names[buffer]}({{{at}}}))"
        case Call(fn, args, kind):
            given = [in_cpp(a, names) for a in args]
            if fn in INFIX:
                return f"({given[0]} {INFIX[fn]} {given[1]})"
            if fn in ("min", "max"):
                first, *rest = given
                for other in rest:
                    first = f"std::{fn}<{TYPES[kind]}>({first}, {other})"
                return first
            if fn in PLAIN:
                return f"std::{fn}({', '.join(f'double({g})' for g in given)})"
            return FORMS[fn].format(*given, type=TYPES[kind])


@contextmanager
def spelled(loaded: Loaded) -> Iterator[None]:
    """Raise `KgenError` if the body prints an expression with a function that has no C++
    spelling.
    """
    try:
        yield
    except KeyError as error:
        refuse(
            loaded,
            f"its example has no `{error.args[0]}` in C++",
            "add it to `native_reference.py`",
        )


@dataclass(frozen=True)
class Sized:
    """A tensor of the example."""

    member: str
    dtype: str
    sizes: tuple[str, ...]
    """The sizes, as C expressions over the numbers of the example."""


@dataclass(frozen=True)
class Given:
    """A scalar argument of a call."""

    member: str
    value: float


def sized(of: Tensor, prefix: str, others: Mapping[Code, Code] = {}) -> Sized:
    """Return a tensor of the example, whose numbers are members of the struct that `prefix`
    reaches. `others` are sizes that the example computes in another way.
    """
    sizes = (in_struct(rewritten(size, others.get), prefix) for size in of.extents)
    return Sized(of.member, dtype_of(of.element), tuple(sizes))


def dtype_of(element: str) -> str:
    """Return the name of a dtype of specs in the example."""
    return "FP8" if element == "fp8_e4m3" else element.upper()


def two_of(sizes: Sequence[int]) -> int:
    """Return the size that the example uses, of those with machine code: 2, or else the first."""
    return 2 if 2 in sizes else sizes[0]


def _number(value: float, kind: Type) -> str:
    if kind is Type.BOOL:
        return "true" if value else "false"
    if kind.integral:
        return f"INT64_C({int(value)})" if value >= 0 else f"(-INT64_C({-int(value)}))"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    return repr(float(value)) if value >= 0 else f"({float(value)!r})"
