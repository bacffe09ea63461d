"""The one function table: a row per function and operator.

A row says how the function is typed, what its derivative is, how the float64 reference evaluates it, and how
each target spells it. Adding a function to kgen is adding a row here: parser, passes, reference and printers
read the table and nothing else. `tests/test_functions.py` checks every row against finite differences and
against each target.

Two conventions keep the rows short:

- A derivative is written once for any algebra: `lambda f, x: (1 - f("tanh", x) ** 2,)` receives a
  function `f` that applies other rows, and operands that understand `+ - * / **`; it returns one partial per
  argument (`None` where an argument is not differentiable: an index, a condition).
- A spelling is a format string over printed operands, with a precedence: the printers add the brackets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kgen.expr.nodes import Type

INT, FLOAT, BOOL = Type.INT, Type.FLOAT, Type.BOOL

# Binding strength of a printed form, Python's order; a form is bracketed where its context binds tighter.
TERNARY, OR, AND, NOT, COMPARE, BITOR, BITAND, SHIFT, ADD, MUL, UNARY, POWER, ATOM = range(13)


class TypeRuleError(Exception):
    """The arguments do not have the types that the function takes."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Spelling:
    """How a target writes a call: a format over its operands, and how tightly the written form binds.

    `operand` is the binding strength that operands must have so as not to be bracketed. `helper` names a
    function that the emitted file has to define.
    """

    form: str
    binds: int = ATOM
    operand: int = TERNARY
    helper: str | None = None


@dataclass(frozen=True)
class Function:
    """A row of the table."""

    name: str
    arity: tuple[int, int | None]
    typed: Callable[[tuple[Type, ...]], Type]
    reference: Callable[..., Any]
    """Called as `reference(torch, *tensors)`."""
    derivative: Callable[..., tuple[Any | None, ...]] | None
    """`None` for functions that are flat wherever they are smooth (comparisons, `floor`) or take integers."""
    spelled: dict[str, Spelling]
    """By target: `python` is the spec's own syntax, `torch` eager PyTorch, `triton` and `cuda` the kernels."""
    callable: bool = True
    """Whether a spec may call it by name; operators are not."""
    fast: dict[str, Spelling] = field(default_factory=dict)
    """Cheaper approximations that a spec opts into with `fast_math: true`."""

    @property
    def result(self) -> Type | None:
        """FLOAT for a function whose result is real whatever its operands are; `None` where it follows them."""
        return FLOAT if self.typed is _real else None

    @property
    def copies(self) -> int:
        """How many times a kernel has the text of its operand: `abs(x)` is `max(x, -x)`."""
        return max(self.spelled[target].form.count("{0}") for target in ("triton", "cuda"))


LN2 = math.log(2)

# --- type rules ------------------------


def _numbers(types: tuple[Type, ...]) -> None:
    if BOOL in types:
        raise TypeRuleError(
            "expects numbers, got a truth value", "use where(condition, 1, 0) to count a truth value"
        )


def _arithmetic(types: tuple[Type, ...]) -> Type:
    _numbers(types)
    return FLOAT if FLOAT in types else INT


def _real(types: tuple[Type, ...]) -> Type:
    _numbers(types)
    return FLOAT


def _integral(types: tuple[Type, ...]) -> Type:
    if any(t is not INT for t in types):
        raise TypeRuleError(
            "is integer arithmetic: both sides must be integers",
            "on floats use floor(x / y), and x - y * floor(x / y) for the rest",
        )
    return INT


def _comparison(types: tuple[Type, ...]) -> Type:
    _numbers(types)
    return BOOL


def _logical(types: tuple[Type, ...]) -> Type:
    if any(t is not BOOL for t in types):
        raise TypeRuleError("combines truth values", "compare first, for example `x != 0`")
    return BOOL


def _choice(types: tuple[Type, ...]) -> Type:
    condition, *values = types
    if condition is not BOOL:
        raise TypeRuleError("takes a truth value as its condition", "compare first, for example `x != 0`")
    if (BOOL in values) and any(t is not BOOL for t in values):
        raise TypeRuleError(
            "has one branch that is a truth value and one that is a number", "make both of them numbers"
        )
    return BOOL if BOOL in values else _arithmetic(tuple(values))


# --- reference evaluation: plain torch, integers in int64 and reals in float64 ------------------------


def _reduce(name: str) -> Callable[..., Any]:
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


def _where(torch: Any, condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, *_promoted(torch, a, b))


def _floor_mod(torch: Any, a: Any, b: Any) -> Any:
    return torch.remainder(a, b)


def _floor_div(torch: Any, a: Any, b: Any) -> Any:
    return torch.div(a, b, rounding_mode="floor")


# --- rows ------------------------


def _infix(symbol: str, binds: int, operand: int | None = None) -> Spelling:
    return Spelling(f"{{0}} {symbol} {{1}}", binds, binds if operand is None else operand)


def _operator(
    name: str,
    typed: Callable[[tuple[Type, ...]], Type],
    reference: Callable[..., Any],
    derivative: Callable[..., tuple[Any | None, ...]] | None,
    python: Spelling,
    torch: Spelling | None = None,
    triton: Spelling | None = None,
    cuda: Spelling | None = None,
) -> Function:
    arity = 1 if "{1}" not in python.form else 2
    spelled = {"python": python, "torch": torch or python, "triton": triton or python, "cuda": cuda or python}
    return Function(name, (arity, arity), typed, reference, derivative, spelled, callable=False)


def _function(
    name: str,
    reference: Callable[..., Any],
    derivative: Callable[..., tuple[Any | None, ...]] | None,
    *,
    typed: Callable[[tuple[Type, ...]], Type] = _real,
    arity: tuple[int, int | None] = (1, 1),
    torch: str | Spelling | None = None,
    triton: str | Spelling | None = None,
    cuda: str | Spelling | None = None,
    fast: str | Spelling | None = None,
) -> Function:
    operands = ", ".join(f"{{{i}}}" for i in range(arity[0]))
    forms = {
        "python": Spelling(f"{name}({operands})"),
        "torch": torch if torch is not None else f"torch.{name}({operands})",
        "triton": triton if triton is not None else f"tl.{name}({operands})",
        "cuda": cuda if cuda is not None else f"{name}f({operands})",
    }
    spelled = {k: v if isinstance(v, Spelling) else Spelling(v) for k, v in forms.items()}
    cheap = {}
    if fast is not None:
        cheap = dict.fromkeys(("triton", "cuda"), fast if isinstance(fast, Spelling) else Spelling(fast))
    return Function(name, arity, typed, reference, derivative, spelled, fast=cheap)


def _helper(name: str, form: str) -> Spelling:
    return Spelling(form, helper=name)


_ROWS = [
    # Arithmetic. The symbolic passes know + - * / and integer powers natively; their derivatives are here so
    # that the table is whole.
    _operator("add", _arithmetic, lambda t, a, b: a + b, lambda f, a, b: (1, 1), _infix("+", ADD)),
    _operator(
        "sub", _arithmetic, lambda t, a, b: a - b, lambda f, a, b: (1, -1), Spelling("{0} - {1}", ADD, ADD)
    ),
    _operator("mul", _arithmetic, lambda t, a, b: a * b, lambda f, a, b: (b, a), _infix("*", MUL)),
    _operator("div", _real, lambda t, a, b: a / b, lambda f, a, b: (1 / b, -a / b**2), _infix("/", MUL)),
    _operator("neg", _arithmetic, lambda t, a: -a, lambda f, a: (-1,), Spelling("-{0}", UNARY, UNARY)),
    _operator(
        "floordiv",
        _integral,
        _floor_div,
        None,
        _infix("//", MUL),
        Spelling("torch.div({0}, {1}, rounding_mode='floor')"),
        _helper("floor_div", "_floor_div({0}, {1})"),
        _helper("floor_div", "_floor_div({0}, {1})"),
    ),
    _operator(
        "mod",
        _integral,
        _floor_mod,
        None,
        _infix("%", MUL),
        Spelling("torch.remainder({0}, {1})"),
        _helper("floor_mod", "_floor_mod({0}, {1})"),
        _helper("floor_mod", "_floor_mod({0}, {1})"),
    ),
    # Comparisons and logic.
    _operator("lt", _comparison, lambda t, a, b: a < b, None, _infix("<", COMPARE, BITOR)),
    _operator("le", _comparison, lambda t, a, b: a <= b, None, _infix("<=", COMPARE, BITOR)),
    _operator("gt", _comparison, lambda t, a, b: a > b, None, _infix(">", COMPARE, BITOR)),
    _operator("ge", _comparison, lambda t, a, b: a >= b, None, _infix(">=", COMPARE, BITOR)),
    _operator("eq", _comparison, lambda t, a, b: a == b, None, _infix("==", COMPARE, BITOR)),
    _operator("ne", _comparison, lambda t, a, b: a != b, None, _infix("!=", COMPARE, BITOR)),
    _operator(
        "and",
        _logical,
        lambda t, a, b: a & b,
        None,
        _infix("and", AND),
        _infix("&", BITAND),
        _infix("&", BITAND),
        _infix("&&", AND),
    ),
    _operator(
        "or",
        _logical,
        lambda t, a, b: a | b,
        None,
        _infix("or", OR),
        _infix("|", BITOR),
        _infix("|", BITOR),
        _infix("||", OR),
    ),
    _operator(
        "not",
        _logical,
        lambda t, a: ~a,
        None,
        Spelling("not {0}", NOT, NOT),
        Spelling("~{0}", UNARY, UNARY),
        Spelling("~{0}", UNARY, UNARY),
        Spelling("!{0}", UNARY, UNARY),
    ),
    # Choice. `where` is differentiated branch by branch, never as condition * value: 0 * inf would be NaN.
    _function(
        "where",
        _where,
        lambda f, c, a, b: (None, f("where", c, 1, 0), f("where", c, 0, 1)),
        typed=_choice,
        arity=(3, 3),
        cuda=Spelling("{0} ? {1} : {2}", TERNARY, OR),
    ),
    _function(
        "min",
        _reduce("minimum"),
        lambda f, a, b: (f("where", f("le", a, b), 1, 0), f("where", f("le", a, b), 0, 1)),
        typed=_arithmetic,
        arity=(2, None),
        torch="torch.minimum({0}, {1})",
        triton="tl.minimum({0}, {1})",
        cuda="min({0}, {1})",
    ),
    _function(
        "max",
        _reduce("maximum"),
        lambda f, a, b: (f("where", f("ge", a, b), 1, 0), f("where", f("ge", a, b), 0, 1)),
        typed=_arithmetic,
        arity=(2, None),
        torch="torch.maximum({0}, {1})",
        triton="tl.maximum({0}, {1})",
        cuda="max({0}, {1})",
    ),
    # Not the integer `abs` instruction: ptxas 13.0 can miscompile it on Hopper.
    _function(
        "abs",
        lambda t, x: t.abs(x),
        lambda f, x: (f("where", f("gt", x, 0), 1, f("where", f("lt", x, 0), -1, 0)),),
        typed=_arithmetic,
        triton="tl.maximum({0}, -({0}))",
        cuda="max({0}, -({0}))",
    ),
    # Exponentials and logarithms.
    _function("exp", lambda t, x: t.exp(x), lambda f, x: (f("exp", x),)),
    _function("exp2", lambda t, x: t.exp2(x), lambda f, x: (f("exp2", x) * LN2,)),
    _function("log", lambda t, x: t.log(x), lambda f, x: (1 / x,)),
    _function("log2", lambda t, x: t.log2(x), lambda f, x: (1 / (x * LN2),)),
    _function("sqrt", lambda t, x: t.sqrt(x), lambda f, x: (f("rsqrt", x) / 2,)),
    _function("rsqrt", lambda t, x: t.rsqrt(x), lambda f, x: (-(f("rsqrt", x) ** 3) / 2,)),
    _function(
        "tanh",
        lambda t, x: t.tanh(x),
        lambda f, x: (1 - f("tanh", x) ** 2,),
        triton=_helper("tanh", "_tanh({0})"),
        fast=_helper("tanh_approx", "_tanh_approx({0})"),
    ),
    _function(
        "sigmoid",
        lambda t, x: t.sigmoid(x),
        lambda f, x: (f("sigmoid", x) * (1 - f("sigmoid", x)),),
        cuda=_helper("sigmoid", "_sigmoid({0})"),
    ),
    _function(
        "silu",
        lambda t, x: t.nn.functional.silu(x),
        lambda f, x: (f("sigmoid", x) * (x * (1 - f("sigmoid", x)) + 1),),
        torch=Spelling("{0} * torch.sigmoid({0})", MUL, MUL),
        triton=_helper("silu", "_silu({0})"),
        cuda=_helper("silu", "_silu({0})"),
    ),
    _function("sin", lambda t, x: t.sin(x), lambda f, x: (f("cos", x),)),
    _function("cos", lambda t, x: t.cos(x), lambda f, x: (-f("sin", x),)),
    _function("floor", lambda t, x: t.floor(x), None),
    _function(
        "clamp",
        lambda t, x, lo, hi: _reduce("minimum")(t, _reduce("maximum")(t, x, lo), hi),
        lambda f, x, lo, hi: (
            f("where", f("lt", x, lo), 0, f("where", f("gt", x, hi), 0, 1)),
            # Where `lo` is above `hi`, the value is `hi`.
            f("where", f("and", f("lt", x, lo), f("le", lo, hi)), 1, 0),
            f("where", f("gt", f("max", x, lo), hi), 1, 0),
        ),
        typed=_arithmetic,
        arity=(3, 3),
        triton="tl.minimum(tl.maximum({0}, {1}), {2})",
        cuda="min(max({0}, {1}), {2})",
    ),
    _function(
        "float",
        lambda t, x: x.to(t.float64),
        lambda f, x: (1,),
        torch="({0}).to(torch.float32)",
        triton="({0}).to(tl.float32)",
        cuda="float({0})",
    ),
]

TABLE: dict[str, Function] = {row.name: row for row in _ROWS}

# CuTe DSL takes Python's operators and has most functions in `cute.math`; these are the others.
_CUTE = {
    "floordiv": _infix("//", MUL),
    "mod": Spelling("{0} - {0} // {1} * {1}", ADD, UNARY),
    "and": _infix("&", BITAND),
    "or": _infix("|", BITOR),
    "not": Spelling("~{0}", UNARY, UNARY),
    "where": Spelling("cutlass.select_({0}, {1}, {2})"),
    "min": Spelling("cutlass.min({0}, {1})"),
    "max": Spelling("cutlass.max({0}, {1})"),
    "abs": Spelling("cutlass.max({0}, -({0}))"),
    "sigmoid": Spelling("1.0 / (1.0 + cute.math.exp(-({0})))", MUL),
    "silu": Spelling("({0}) / (1.0 + cute.math.exp(-({0})))", MUL),
    "clamp": Spelling("cutlass.min(cutlass.max({0}, {1}), {2})"),
    "float": Spelling("Float32({0})"),
}
for _row in _ROWS:
    _python = _row.spelled["python"]
    _own = Spelling(f"cute.math.{_python.form}") if _row.callable else _python
    _row.spelled["cute"] = _CUTE.get(_row.name, _own)
