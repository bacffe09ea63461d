"""The function table: one row per function and operator.

A row has the type rule of a function, its derivative and its float64 reference. It also has the
value for Python numbers, the points where it is finite, and the spelling in each target. The
parser, passes, reference and printers read only this table, so a new function is a new row.
`tests/expr/test_functions.py` checks each row against finite differences and each target.
`tests/test_recipes.py` checks that a new row suffices.

Two conventions keep the rows short:

- A derivative is written once for any algebra: `lambda f, x: (1 - f("tanh", x) ** 2,)` receives a
  function `f` that applies other rows, and operands that support `+ - * / **`. It returns one
  partial derivative per argument, `None` for an argument that is not differentiable (an index, a
  condition).
- A spelling is a format string over printed operands, with a precedence; printers add the brackets.
  If it calls a function that the emitted file must define, the row has the text of that function.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator
from typing import Any

from kgen.expr import type_rules as types
from kgen.expr.activations import ACTIVATIONS
from kgen.expr.helpers import (
    ATAN,
    EXPM1,
    FLOORDIV_CUDA,
    FLOORDIV_TRITON,
    GELU,
    LOG1P,
    MOD_CUDA,
    MOD_TRITON,
    POW,
    ROUND,
    SIGN,
    TANH,
    TANH_APPROX,
    TANH_PRECISE,
)
from kgen.expr.references import floor_div, floor_mod, reduced, where
from kgen.expr.rows import Finite, Function, function, operation, shifted
from kgen.expr.spelling import (
    ADD,
    AND,
    BITAND,
    BITOR,
    COMPARE,
    MUL,
    NOT,
    OR,
    TERNARY,
    UNARY,
    Spelling,
    helped,
    infix,
)

LN2 = math.log(2)
SQRT_HALF = math.sqrt(0.5)
TWO_BY_SQRT_PI = 2 / math.sqrt(math.pi)


# --- rows ------------------------


def _chosen(f: Any, before: str, a: Any, b: Any) -> Any:
    """Return the derivative of min or max in `a`. Equal operands share it, as in PyTorch."""
    return f("where", f(before, a, b), 1, f("where", f("eq", a, b), 0.5, 0))


_ROWS = [
    # Arithmetic. Symbolic passes differentiate + - * / and integer powers natively; the table
    # repeats these derivatives to be complete.
    operation(
        "add", types.arithmetic, lambda t, a, b: a + b, lambda f, a, b: (1, 1), infix("+", ADD)
    ),
    operation(
        "sub",
        types.arithmetic,
        lambda t, a, b: a - b,
        lambda f, a, b: (1, -1),
        Spelling("{0} - {1}", ADD, ADD),
    ),
    operation(
        "mul", types.arithmetic, lambda t, a, b: a * b, lambda f, a, b: (b, a), infix("*", MUL)
    ),
    operation(
        "div",
        types.real,
        lambda t, a, b: a / b,
        lambda f, a, b: (1 / b, -a / b**2),
        infix("/", MUL),
        value=operator.truediv,
        finite=Finite.AWAY_FROM_POLES,
    ),
    operation(
        "neg", types.arithmetic, lambda t, a: -a, lambda f, a: (-1,), Spelling("-{0}", UNARY, UNARY)
    ),
    # Comparisons and logic.
    operation("lt", types.comparison, lambda t, a, b: a < b, None, infix("<", COMPARE, BITOR)),
    operation("le", types.comparison, lambda t, a, b: a <= b, None, infix("<=", COMPARE, BITOR)),
    operation("gt", types.comparison, lambda t, a, b: a > b, None, infix(">", COMPARE, BITOR)),
    operation("ge", types.comparison, lambda t, a, b: a >= b, None, infix(">=", COMPARE, BITOR)),
    operation("eq", types.comparison, lambda t, a, b: a == b, None, infix("==", COMPARE, BITOR)),
    operation("ne", types.comparison, lambda t, a, b: a != b, None, infix("!=", COMPARE, BITOR)),
    operation(
        "and",
        types.logical,
        lambda t, a, b: a & b,
        None,
        infix("and", AND),
        value=lambda a, b: a and b,
        torch=infix("&", BITAND),
        triton=infix("&", BITAND),
        cuda=infix("&&", AND),
        cute=infix("&", BITAND),
    ),
    operation(
        "or",
        types.logical,
        lambda t, a, b: a | b,
        None,
        infix("or", OR),
        value=lambda a, b: a or b,
        torch=infix("|", BITOR),
        triton=infix("|", BITOR),
        cuda=infix("||", OR),
        cute=infix("|", BITOR),
    ),
    operation(
        "not",
        types.logical,
        lambda t, a: ~a,
        None,
        Spelling("not {0}", NOT, NOT),
        value=operator.not_,
        torch=Spelling("~{0}", UNARY, UNARY),
        triton=Spelling("~{0}", UNARY, UNARY),
        cuda=Spelling("!{0}", UNARY, UNARY),
        cute=Spelling("~{0}", UNARY, UNARY),
    ),
    # Choice. `where` is differentiated per branch, not as condition * value: 0 * inf would be NaN.
    function(
        "where",
        where,
        lambda f, c, a, b: (None, f("where", c, 1, 0), f("where", c, 0, 1)),
        typed=types.choice,
        arity=(3, 3),
        value=lambda c, a, b: a if c else b,
        cuda=Spelling("{0} ? {1} : {2}", TERNARY, OR),
        cute="cutlass.select_({0}, {1}, {2})",
    ),
    function(
        "min",
        reduced("minimum"),
        lambda f, a, b: (_chosen(f, "lt", a, b), _chosen(f, "lt", b, a)),
        typed=types.arithmetic,
        arity=(2, None),
        value=min,
        torch="torch.minimum({0}, {1})",
        triton="{tl}.minimum({0}, {1})",
        cuda="min({0}, {1})",
        cute="cutlass.min({0}, {1})",
    ),
    function(
        "max",
        reduced("maximum"),
        lambda f, a, b: (_chosen(f, "gt", a, b), _chosen(f, "gt", b, a)),
        typed=types.arithmetic,
        arity=(2, None),
        value=max,
        torch="torch.maximum({0}, {1})",
        triton="{tl}.maximum({0}, {1})",
        cuda="max({0}, {1})",
        cute="cutlass.max({0}, {1})",
    ),
    # Not the integer `abs` instruction: ptxas 13.0 can miscompile it for sm_90.
    function(
        "abs",
        lambda t, x: t.abs(x),
        lambda f, x: (f("where", f("gt", x, 0), 1, f("where", f("lt", x, 0), -1, 0)),),
        typed=types.arithmetic,
        value=abs,
        triton="{tl}.maximum({0}, -({0}))",
        cuda="max({0}, -({0}))",
        cute="cutlass.max({0}, -({0}))",
    ),
    # Exponentials and logarithms.
    function(
        "exp", lambda t, x: t.exp(x), lambda f, x: (f("exp", x),), finite=Finite.UP_TO_OVERFLOW
    ),
    function(
        "exp2",
        lambda t, x: t.exp2(x),
        lambda f, x: (f("exp2", x) * LN2,),
        value=lambda x: 2.0**x,
        finite=Finite.UP_TO_OVERFLOW,
    ),
    function("log", lambda t, x: t.log(x), lambda f, x: (1 / x,), finite=Finite.AWAY_FROM_POLES),
    function(
        "log2", lambda t, x: t.log2(x), lambda f, x: (1 / (x * LN2),), finite=Finite.AWAY_FROM_POLES
    ),
    function(
        "sqrt",
        lambda t, x: t.sqrt(x),
        lambda f, x: (f("rsqrt", x) / 2,),
        finite=Finite.WHERE_DEFINED,
    ),
    function(
        "rsqrt",
        lambda t, x: t.rsqrt(x),
        lambda f, x: (-(f("rsqrt", x) ** 3) / 2,),
        value=lambda x: 1 / math.sqrt(x),
        finite=Finite.AWAY_FROM_POLES,
    ),
    function(
        "tanh",
        lambda t, x: t.tanh(x),
        lambda f, x: (1 - f("tanh", x) ** 2,),
        triton=TANH["triton"],
        gluon=TANH["gluon"],
    ).with_accuracies(fast=TANH_APPROX, precise=TANH_PRECISE),
    *ACTIVATIONS,
    function("sin", lambda t, x: t.sin(x), lambda f, x: (f("cos", x),)),
    function("cos", lambda t, x: t.cos(x), lambda f, x: (-f("sin", x),)),
    function(
        "atan",
        lambda t, x: t.atan(x),
        lambda f, x: (1 / (x**2 + 1),),
        triton=ATAN["triton"],
        gluon=ATAN["gluon"],
    ),
    function("floor", lambda t, x: t.floor(x), None),
    function("ceil", lambda t, x: t.ceil(x), None),
    # Ties round to even.
    function(
        "round",
        lambda t, x: t.round(x),
        None,
        value=lambda x: float(round(x)),
        triton=ROUND["triton"],
        gluon=ROUND["gluon"],
        cuda="rintf({0})",
        cute="cute.math.roundeven({0})",
    ),
    function(
        "sign",
        lambda t, x: t.sign(x),
        None,
        value=lambda x: math.copysign(1.0, x) if x else 0.0,
        triton=SIGN["triton"],
        gluon=SIGN["gluon"],
        cuda=helped(
            "_sign({0})",
            "DEVICE float _sign(float x) { return float((x > 0.0f) - (x < 0.0f)); }",
        ),
        cute="cutlass.select_(({0}) > 0.0, 1.0, cutlass.select_(({0}) < 0.0, -1.0, 0.0))",
    ),
    # The derivative in the exponent is defined for a positive base only.
    function(
        "pow",
        lambda t, x, y: t.pow(x, y),
        lambda f, x, y: (
            y * f("pow", x, y - 1),
            f(
                "where",
                f("gt", x, 0),
                f("pow", x, y) * f("log", f("where", f("gt", x, 0), x, 1)),
                0,
            ),
        ),
        arity=(2, 2),
        triton=POW["triton"],
        gluon=POW["gluon"],
        finite=Finite.AWAY_FROM_POLES,
    ),
    function(
        "erf",
        lambda t, x: t.erf(x),
        lambda f, x: (f("exp", -(x**2)) * TWO_BY_SQRT_PI,),
    ),
    function(
        "gelu",
        lambda t, x: t.nn.functional.gelu(x),
        lambda f, x: (
            (f("erf", x * SQRT_HALF) + 1) / 2
            + x * f("exp", -(x**2) / 2) * (TWO_BY_SQRT_PI * SQRT_HALF / 2),
        ),
        value=lambda x: 0.5 * x * (1 + math.erf(x * SQRT_HALF)),
        torch=Spelling("0.5 * {0} * (1 + torch.erf({0} * 0.7071067811865476))", MUL, MUL),
        triton=GELU["triton"],
        gluon=GELU["gluon"],
        cuda=helped(
            "_gelu({0})",
            """
            DEVICE float _gelu(float x) {
                return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
            }
            """,
        ),
        cute=Spelling("0.5 * ({0}) * (1.0 + cute.math.erf(({0}) * 0.7071067811865476))", MUL),
    ),
    function(
        "log1p",
        lambda t, x: t.log1p(x),
        lambda f, x: (1 / (x + 1),),
        triton=LOG1P["triton"],
        gluon=LOG1P["gluon"],
        finite=Finite.AWAY_FROM_POLES,
    ),
    function(
        "expm1",
        lambda t, x: t.expm1(x),
        lambda f, x: (f("exp", x),),
        triton=EXPM1["triton"],
        gluon=EXPM1["gluon"],
        finite=Finite.UP_TO_OVERFLOW,
    ),
    function(
        "clamp",
        lambda t, x, lo, hi: reduced("minimum")(t, reduced("maximum")(t, x, lo), hi),
        lambda f, x, lo, hi: (
            f("where", f("lt", x, lo), 0, f("where", f("gt", x, hi), 0, 1)),
            # If `lo > hi`, the value is `hi`.
            f("where", f("and", f("lt", x, lo), f("le", lo, hi)), 1, 0),
            f("where", f("gt", f("max", x, lo), hi), 1, 0),
        ),
        typed=types.arithmetic,
        arity=(3, 3),
        value=lambda x, lo, hi: min(max(x, lo), hi),
        triton="{tl}.minimum({tl}.maximum({0}, {1}), {2})",
        cuda="min(max({0}, {1}), {2})",
        cute="cutlass.min(cutlass.max({0}, {1}), {2})",
    ),
    function(
        "float",
        lambda t, x: x.to(t.float64),
        lambda f, x: (1,),
        value=float,
        torch="({0}).to(torch.float32)",
        triton="{tl}.cast({0}, {tl}.float32)",
        cuda="float({0})",
        cute="Float32({0})",
    ),
    # Stops gradients. Plans remove it after differentiation; only its operand remains.
    function(
        "detach",
        lambda t, x: x.detach(),
        None,
        typed=types.arithmetic,
        value=lambda x: x,
        torch="({0}).detach()",
        triton="({0})",
        cuda="({0})",
        cute="({0})",
    ),
    # Rounds towards zero, as in Python, and makes an index of a real number.
    function(
        "int",
        lambda t, x: t.trunc(x).to(t.int64),
        None,
        typed=types.whole,
        value=math.trunc,
        torch="({0}).to(torch.int32)",
        triton="{tl}.cast({0}, {tl}.int32)",
        cuda="int({0})",
        cute="cutlass.Int32({0})",
    ),
    # Bits of integers, two's complement. Comparisons are bracketed in every language, because
    # Python and C++ disagree.
    operation(
        *("bitand", types.bits, lambda t, a, b: a & b, None),
        Spelling("{0} & {1}", COMPARE, ADD),
        value=operator.and_,
    ),
    operation(
        *("bitor", types.bits, lambda t, a, b: a | b, None),
        Spelling("{0} | {1}", COMPARE, ADD),
        value=operator.or_,
    ),
    operation(
        *("bitxor", types.bits, lambda t, a, b: a ^ b, None),
        Spelling("{0} ^ {1}", COMPARE, ADD),
        value=operator.xor,
    ),
    operation(
        *("lshift", types.bits, lambda t, a, b: a << b, None),
        Spelling("{0} << {1}", COMPARE, ADD),
        value=shifted(operator.lshift),
    ),
    operation(
        *("rshift", types.bits, lambda t, a, b: a >> b, None),
        Spelling("{0} >> {1}", COMPARE, ADD),
        value=shifted(operator.rshift),
    ),
    operation("invert", types.bits, lambda t, a: ~a, None, Spelling("~{0}", COMPARE, UNARY)),
    # Division of integers.
    operation(
        "mod",
        types.integral,
        floor_mod,
        None,
        infix("%", MUL),
        torch=Spelling("torch.remainder({0}, {1})"),
        triton=MOD_TRITON,
        cuda=MOD_CUDA,
        cute=Spelling("{0} - {0} // {1} * {1}", ADD, UNARY),
    ),
    operation(
        "floordiv",
        types.integral,
        floor_div,
        None,
        infix("//", MUL),
        torch=Spelling("torch.div({0}, {1}, rounding_mode='floor')"),
        triton=FLOORDIV_TRITON,
        cuda=FLOORDIV_CUDA,
    ),
]

TABLE: dict[str, Function] = {row.name: row for row in _ROWS}

WRAPPING = frozenset({"add", "sub", "mul", "neg", "lshift"})
"""Integer operations whose values may exceed their width. They are two's complement."""


def in_order(helpers: Collection[str]) -> list[str]:
    """Return the texts of helpers in the order of an emitted file: as in the table, then helpers of
    no row.
    """
    return [text for text in dict.fromkeys((*_helpers(), *sorted(helpers))) if text in helpers]


def _helpers() -> Iterator[str]:
    for row in _ROWS:
        for spelling in (*row.spelled.values(), *row.fast.values(), *row.precise.values()):
            if spelling.helper is not None:
                yield spelling.helper
