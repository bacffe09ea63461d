"""Torch functions composed of functions of the language, with torch's parameters and defaults.

The first argument `f` applies functions of the language. Operands support `+ - * /` and
comparisons. Truth values also support `&`, `|` and `~`. A branch of `where` that is not chosen may
be infinite or NaN.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kgen.expr.nodes import Const, Node, Type
from kgen.expr.parse import FLOAT32_MAX
from kgen.flex.operands import Functions, Operand
from kgen.flex.operations import Operations

LN2 = math.log(2)


@dataclass(frozen=True)
class Composed:
    """A composed function with torch's parameters and defaults.

    `kind` is the type of the result: real, a truth value, or the type of the arguments.
    """

    make: Callable[..., Any]
    kind: str
    parameters: tuple[str, ...]
    defaults: dict[str, float]

    def __call__(self, operations: Operations, args: Sequence[Node]) -> Node:
        f = Functions(operations)
        left = self.parameters[len(args) :]
        nodes = [*args, *(operations.number(self.defaults[name]) for name in left)]
        convert = _real if self.kind == "real" else Operations.numeric
        return f.node(self.make(f, *(Operand(f, convert(operations, node)) for node in nodes)))


def _real(operations: Operations, node: Node) -> Node:
    """Convert a value to a real number, as torch does for integers and truth values."""
    if isinstance(node, Const) and node.type is not Type.FLOAT:
        return operations.number(float(node.value))
    return operations.real(node)


FUNCTIONS: dict[str, Composed] = {}


def of_torch(kind: str = "real") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under its name."""

    def enter(make: Callable[..., Any]) -> Callable[..., Any]:
        _, *given = inspect.signature(make).parameters.values()
        defaults = {p.name: p.default for p in given if p.default is not p.empty}
        FUNCTIONS[make.__name__] = Composed(make, kind, tuple(p.name for p in given), defaults)
        return make

    return enter


# --- trigonometry ------------------------


@of_torch()
def atan2(f: Functions, input: Any, other: Any) -> Any:
    both = f("abs", input).is_(math.inf) & f("abs", other).is_(math.inf)
    ratio = f.where(both, f("sign", input) * f("sign", other), input / other)
    angle = f.where(input.is_(0) & other.is_(0), 0.0, f("atan", ratio))
    turn = f.where(signbit(f, input), -math.pi, math.pi)
    return f.where(signbit(f, other), angle + turn, angle)


@of_torch()
def asin(f: Functions, input: Any) -> Any:
    return f("atan", input / f("sqrt", (1 - input) * (1 + input)))


@of_torch()
def acos(f: Functions, input: Any) -> Any:
    return 2 * f("atan", f("sqrt", (1 - input) / (1 + input)))


@of_torch()
def asinh(f: Functions, input: Any) -> Any:
    size = f("abs", input)
    square = size * size
    small = f("log1p", size + square / (1 + f("sqrt", 1 + square)))
    value = f.where(size > 1e9, f("log", size) + LN2, small)
    return f.where(input < 0, -value, value)


@of_torch()
def acosh(f: Functions, input: Any) -> Any:
    above = input - 1
    small = f("log1p", above + f("sqrt", above) * f("sqrt", above + 2))
    return f.where(input > 1e9, f("log", input) + LN2, small)


@of_torch()
def atanh(f: Functions, input: Any) -> Any:
    return 0.5 * (f("log1p", input) - f("log1p", -input))


@of_torch()
def sinh(f: Functions, input: Any) -> Any:
    return 0.5 * (f("expm1", input) - f("expm1", -input))


@of_torch()
def deg2rad(f: Functions, input: Any) -> Any:
    return input * (math.pi / 180)


@of_torch()
def rad2deg(f: Functions, input: Any) -> Any:
    return input * (180 / math.pi)


@of_torch()
def sinc(f: Functions, input: Any) -> Any:
    angle = input * math.pi
    return f.where(input.is_(0), 1.0, f("sin", angle) / angle)


@of_torch()
def hypot(f: Functions, input: Any, other: Any) -> Any:
    a, b = f("abs", input), f("abs", other)
    # The square of the larger operand could overflow.
    more, less = f.where(a > b, a, b), f.where(a > b, b, a)
    infinite = a.is_(math.inf) | b.is_(math.inf)
    ratio = less / more
    value = f.where(more.is_(0), less, more * f("sqrt", 1 + ratio * ratio))
    return f.where(infinite, math.inf, value)


@of_torch()
def angle(f: Functions, input: Any) -> Any:
    return f.where(input < 0, math.pi, f.where(isnan(f, input), input, 0.0))


# --- exponentials and logarithms ------------------------


@of_torch()
def logaddexp(f: Functions, input: Any, other: Any) -> Any:
    more = f.where(input > other, input, other)
    value = more + f("log1p", f("exp", -f("abs", input - other)))
    return f.where(input.is_(other), 0.5 * (input + other) + LN2, value)


@of_torch()
def logaddexp2(f: Functions, input: Any, other: Any) -> Any:
    more = f.where(input > other, input, other)
    value = more + f("log1p", f("exp2", -f("abs", input - other))) * (1 / LN2)
    return f.where(input.is_(other), 0.5 * (input + other) + 1.0, value)


@of_torch()
def logit(f: Functions, input: Any, eps: Any = -1.0) -> Any:
    if eps.number is None or eps.number >= 0:
        input = f("clamp", input, eps, 1 - eps)
    return f("log", input / (1 - input))


@of_torch()
def xlogy(f: Functions, input: Any, other: Any) -> Any:
    return f.where(input.is_(0) & ~isnan(f, other), 0.0, input * f("log", other))


@of_torch()
def xlog1py(f: Functions, input: Any, other: Any) -> Any:
    return f.where(input.is_(0) & ~isnan(f, other), 0.0, input * f("log1p", other))


@of_torch()
def entr(f: Functions, input: Any) -> Any:
    rest = f.where(input < 0, -math.inf, input)
    return f.where(input > 0, -input * f("log", input), rest)


@of_torch()
def float_power(f: Functions, input: Any, exponent: Any) -> Any:
    return Operand(f, f.operations._pow(input.node, exponent.node))


@of_torch()
def ldexp(f: Functions, input: Any, other: Any) -> Any:
    return input * f("exp2", other)


# --- the tails of the error function ------------------------

_TAIL = (
    *(1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807),
    *(-1.13520398, 1.48851587, -0.82215223, 0.17087277),
)
"""Chebyshev coefficients of the tail: its relative error stays below 1.2e-7 (Press et al.,
Numerical Recipes, 6.2).
"""


def _tail(f: Functions, z: Any) -> tuple[Any, Any]:
    """Return `t` and `p` with erfc(z) = t * exp(p - z * z), for z >= 0."""
    t = 1 / (1 + 0.5 * z)
    p: Any = _TAIL[-1]
    for i, coefficient in enumerate(_TAIL[-2::-1]):
        # No sum is below -9, so this `max` changes nothing. It only stops the simplifier from
        # expanding the product.
        p = coefficient + t * (p if i % 3 else f("max", p, -9.0))
    return t, f("max", t * p, -9.0) - 1.26551223


@of_torch()
def erfc(f: Functions, input: Any) -> Any:
    z = f("abs", input)
    t, p = _tail(f, z)
    tail = t * f("exp", p - z * z)
    return f.where(input < 0, 2 - tail, tail)


@of_torch()
def erfcx(f: Functions, input: Any) -> Any:
    t, p = _tail(f, f("abs", input))
    tail = t * f("exp", p)
    return f.where(input < 0, 2 * f("exp", input * input) - tail, tail)


@of_torch()
def ndtr(f: Functions, input: Any) -> Any:
    return 0.5 * erfc(f, -input * math.sqrt(0.5))


@of_torch()
def log_ndtr(f: Functions, input: Any) -> Any:
    z = f("abs", input) * math.sqrt(0.5)
    t, p = _tail(f, z)
    below = f("log", 0.5 * t) + p - z * z
    return f.where(input < 0, below, f("log1p", -0.5 * t * f("exp", p - z * z)))


# --- activations ------------------------


@of_torch("same")
def hardtanh(f: Functions, input: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    return f("clamp", input, min_val, max_val)


@of_torch()
def hardsigmoid(f: Functions, input: Any) -> Any:
    return f("clamp", input + 3, 0.0, 6.0) * (1 / 6)


@of_torch()
def hardswish(f: Functions, input: Any) -> Any:
    return input * f("clamp", input + 3, 0.0, 6.0) * (1 / 6)


@of_torch()
def hardshrink(f: Functions, input: Any, lambd: Any = 0.5) -> Any:
    return f.where((input >= -lambd) & (input <= lambd), 0.0, input)


@of_torch()
def softshrink(f: Functions, input: Any, lambd: Any = 0.5) -> Any:
    rest = f.where(isnan(f, input), input, 0.0)
    return f.where(input > lambd, input - lambd, f.where(input < -lambd, input + lambd, rest))


@of_torch()
def tanhshrink(f: Functions, input: Any) -> Any:
    return input - f("tanh", input)


@of_torch("same")
def threshold(f: Functions, input: Any, threshold: Any, value: Any) -> Any:
    return f.where(input <= threshold, value, input)


@of_torch()
def softplus(f: Functions, input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    x = input if beta.number == 1 else input * beta
    low = f("log1p", f("exp", f("min", x, threshold)))
    return f.where(x > threshold, input, low if beta.number == 1 else low / beta)


@of_torch()
def mish(f: Functions, input: Any) -> Any:
    return input * f("tanh", softplus(f, input, Operand(f, f.node(1.0)), Operand(f, f.node(20.0))))


@of_torch()
def celu(f: Functions, input: Any, alpha: Any = 1.0) -> Any:
    return f.where(input > 0, input, alpha * f("expm1", f("min", input, 0.0) / alpha))


@of_torch()
def selu(f: Functions, input: Any) -> Any:
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return scale * f.where(input > 0, input, alpha * f("expm1", f("min", input, 0.0)))


@of_torch()
def rrelu(
    f: Functions, input: Any, lower: Any = 1 / 8, upper: Any = 1 / 3, training: Any = False
) -> Any:
    if training.number != 0:
        f.operations.place.refuse("randomness", "`rrelu` is random in training", "use `leaky_relu`")
    return f.where(input >= 0, input, input * (0.5 * (lower + upper)))


# --- arithmetic ------------------------


@of_torch()
def addcdiv(f: Functions, input: Any, tensor1: Any, tensor2: Any, value: Any = 1.0) -> Any:
    quotient = tensor1 / tensor2
    return input + (quotient if value.number == 1 else value * quotient)


@of_torch("same")
def rsub(f: Functions, input: Any, other: Any, alpha: Any = 1) -> Any:
    return other - (input if alpha.number == 1 else alpha * input)


@of_torch("same")
def clamp_min(f: Functions, input: Any, min: Any) -> Any:
    return f("max", input, min)


@of_torch("same")
def clamp_max(f: Functions, input: Any, max: Any) -> Any:
    return f("min", input, max)


@of_torch("same")
def fmax(f: Functions, input: Any, other: Any) -> Any:
    if input.integral and other.integral:
        return f("max", input, other)
    return f.where(isnan(f, input), other, f.where(isnan(f, other), input, f("max", input, other)))


@of_torch("same")
def fmin(f: Functions, input: Any, other: Any) -> Any:
    if input.integral and other.integral:
        return f("min", input, other)
    return f.where(isnan(f, input), other, f.where(isnan(f, other), input, f("min", input, other)))


@of_torch("same")
def fmod(f: Functions, input: Any, other: Any) -> Any:
    low = f.operations
    whole = Operand(f, low._truncdiv(input.node, other.node))
    rest = input - other * whole
    if other.integral or other.number is not None:
        return rest
    return f.where(f("abs", other).is_(math.inf) & isfinite(f, input), input, rest)


@of_torch("same")
def remainder(f: Functions, input: Any, other: Any) -> Any:
    if input.integral and other.integral:
        return f("mod", input, other)
    rest = input - other * f("floor", input / other)
    if other.integral or other.number is not None:
        return rest
    same = input.is_(0) | (input < 0).is_(other < 0)
    far = f("abs", other).is_(math.inf) & isfinite(f, input)
    return f.where(far, f.where(same, input, other), rest)


@of_torch()
def frac(f: Functions, input: Any) -> Any:
    return input - Operand(f, f.operations._trunc(input.node))


@of_torch("same")
def round(f: Functions, input: Any, decimals: Any = 0) -> Any:
    digits = decimals.number
    if digits is None:
        f.operations.place.refuse(
            "bad-call", "`decimals` is not a number of the source", "write a number"
        )
    if input.integral or digits == 0:
        return Operand(f, f.operations._round(input.node))
    power = 10.0 ** abs(digits)
    return f("round", input * power) / power if digits > 0 else f("round", input / power) * power


@of_torch("same")
def positive(f: Functions, input: Any) -> Any:
    return input


@of_torch("same")
def conj(f: Functions, input: Any) -> Any:
    return input


FUNCTIONS["conj_physical"] = FUNCTIONS["resolve_conj"] = FUNCTIONS["real"] = FUNCTIONS["conj"]


@of_torch("same")
def nan_to_num(
    f: Functions, input: Any, nan: Any = 0.0, posinf: Any = FLOAT32_MAX, neginf: Any = -FLOAT32_MAX
) -> Any:
    if input.integral:
        return input
    finite = f.where(input.is_(-math.inf), neginf, f.where(isnan(f, input), nan, input))
    return f.where(input.is_(math.inf), posinf, finite)


@of_torch()
def copysign(f: Functions, input: Any, other: Any) -> Any:
    size = f("abs", input)
    return f.where(signbit(f, other), -size, size)


@of_torch("same")
def heaviside(f: Functions, input: Any, values: Any) -> Any:
    return f.where(input.is_(0), values, f.where(input > 0, 1, 0))


# --- questions ------------------------


@of_torch("bool")
def isnan(f: Functions, input: Any) -> Any:
    return False if input.integral else f("ne", input, input)


@of_torch("bool")
def isinf(f: Functions, input: Any) -> Any:
    return False if input.integral else f("abs", input).is_(math.inf)


@of_torch("bool")
def isfinite(f: Functions, input: Any) -> Any:
    return True if input.integral else f("abs", input) < math.inf


@of_torch("bool")
def isposinf(f: Functions, input: Any) -> Any:
    return False if input.integral else input.is_(math.inf)


@of_torch("bool")
def isneginf(f: Functions, input: Any) -> Any:
    return False if input.integral else input.is_(-math.inf)


@of_torch("bool")
def isreal(f: Functions, input: Any) -> Any:
    return True


@of_torch("bool")
def signbit(f: Functions, input: Any) -> Any:
    # The inverse of -0.0 is negative.
    return input < 0 if input.integral else (input < 0) | (input.is_(0) & (1 / input < 0))


REAL = frozenset(name for name, function in FUNCTIONS.items() if function.kind == "real")
TRUTH = frozenset(name for name, function in FUNCTIONS.items() if function.kind == "bool")
