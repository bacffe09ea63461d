"""Trees of torch operations, with torch's type rules. Unsupported operations are refused."""

from __future__ import annotations

import math

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Type, Var
from kgen.expr.parse import FLOAT32_MAX, INT32
from kgen.expr.type_rules import TypeRuleError
from kgen.flex.source import Place
from kgen.flex.values import Least
from kgen.spec.common import differentiable

INT, LONG, FLOAT, BOOL = Type.INT, Type.LONG, Type.FLOAT, Type.BOOL
HALVES = {"bf16", "fp16"}


class Operations:
    """Builder of trees of operations.

    Equal trees are one object. The method `_name` builds torch's `name`.
    """

    place: Place
    """The place of the current operation in the source."""

    def __init__(self) -> None:
        self.known: dict[Node, Node] = {}
        self.notes: dict[str, None] = {}
        """Assumptions, as text for the user."""

    def one(self, node: Node) -> Node:
        return self.known.setdefault(node, node)

    def number(self, value: float) -> Node:
        if isinstance(value, bool):
            return self.one(Const(value, BOOL))
        if isinstance(value, int):
            if value not in INT32:
                self.place.refuse(
                    "literal-range", "the number does not fit in 32 bits", "integers are int32"
                )
            return self.one(Const(value, INT))
        if isinstance(value, Least):
            return Const(value, FLOAT)  # not shared: an equal plain number has another meaning
        if math.isnan(value):
            self.place.refuse("bad-number", "this is not a number", "use numbers and infinity")
        if math.isinf(value):
            inf = self.one(Var("inf", FLOAT))
            return inf if value > 0 else self.call("neg", inf)
        if abs(value) > FLOAT32_MAX:
            self.place.refuse(
                "literal-range", "the number does not fit in 32 bits", "reals are float32"
            )
        return self.one(Const(value, FLOAT))

    def call(self, fn: str, *args: Node) -> Node:
        if fn == "neg" and isinstance(args[0], Const):
            return self.number(-args[0].value)
        try:
            type_ = TABLE[fn].typed(tuple(arg.type for arg in args))
        except TypeRuleError as error:
            self.place.refuse("wrong-type", f"`{fn}` {error}", error.hint or "check the types")
        return self.one(Call(fn, args, type_))

    def missing(self, what: str, hint: str) -> None:
        self.place.refuse("not-in-language", f"{what} is not in the language of specs", hint)

    def numeric(self, node: Node) -> Node:
        """Convert a truth value to 1 or 0, as torch does."""
        if node.type is BOOL:
            if isinstance(node, Const):
                return self.number(int(node.value))
            return self.call("where", node, self.number(1), self.number(0))
        return node

    def real(self, node: Node) -> Node:
        node = self.numeric(node)
        return node if node.type is FLOAT else self.call("float", node)

    def truth(self, node: Node) -> Node:
        if isinstance(node, Const):
            return self.number(bool(node.value))
        return node if node.type is BOOL else self.call("ne", node, self.number(0))

    def cast(self, node: Node, dtype: str) -> Node:
        if dtype == "bool":
            return self.truth(node)
        if dtype in ("fp32", "fp64", *HALVES):
            if dtype != "fp32":
                self.notes[f"values rounded to {dtype} in the source are fp32 in kernels"] = None
            return self.real(node)
        if node.type is FLOAT:
            return (
                self.number(int(node.value)) if isinstance(node, Const) else self.call("int", node)
            )
        if dtype not in ("int32", "int64"):
            self.missing(f"an integer of {dtype}", "use `torch.int32`")
        return self.numeric(node)

    # Operators ------------------------

    def compared(self, fn: str, a: Node, b: Node) -> Node:
        if a.type is BOOL and b.type is BOOL and fn in ("eq", "ne"):
            for value, other in ((a, b), (b, a)):
                if isinstance(value, Const):
                    return other if value.value == (fn == "eq") else self.call("not", other)
            yes, no = (b, self.call("not", b)) if fn == "eq" else (self.call("not", b), b)
            return self.call("where", a, yes, no)
        return self.call(fn, self.numeric(a), self.numeric(b))

    def _detach(self, a: Node) -> Node:
        return self.call("detach", a) if differentiable(a) else a

    def _pos(self, a: Node) -> Node:
        return a

    def _add(self, a: Node, b: Node) -> Node:
        if a.type is BOOL and b.type is BOOL:
            return self._logical_or(a, b)
        return self.call("add", self.numeric(a), self.numeric(b))

    def _mul(self, a: Node, b: Node) -> Node:
        if a.type is BOOL and b.type is BOOL:
            return self._logical_and(a, b)
        return self.call("mul", self.numeric(a), self.numeric(b))

    def _floordiv(self, a: Node, b: Node) -> Node:
        a, b = self.numeric(a), self.numeric(b)
        if FLOAT in (a.type, b.type):
            return self.call("floor", self.call("div", a, b))
        return self.call("floordiv", a, b)

    def _truncdiv(self, a: Node, b: Node) -> Node:
        a, b = self.numeric(a), self.numeric(b)
        if FLOAT in (a.type, b.type):
            return self._trunc(self.call("div", a, b))
        down = self.call("floordiv", self.call("abs", a), self.call("abs", b))
        same = self.call("ge", self.call("mul", self._sign(a), self._sign(b)), self.number(0))
        return self.call("where", same, down, self.call("neg", down))

    def _pow(self, a: Node, b: Node) -> Node:
        a = self.numeric(a)
        if (
            isinstance(b, Const)
            and not isinstance(b.value, bool)
            and b.value == int(b.value)
            and 0 <= b.value <= 8
        ):
            if b.value == 0:
                return self.cast(self.number(1), "fp32" if FLOAT in (a.type, b.type) else "int32")
            base = self.real(a) if b.type is FLOAT else a
            result = base
            for _ in range(int(b.value) - 1):
                result = self.call("mul", result, base)
            return result
        match b:
            case Const(value=0.5):
                return self.call("sqrt", a)
            case Const(value=-0.5):
                return self.call("rsqrt", a)
            case Const(value=-1):
                return self.call("div", self.number(1), a)
            case Const(value=-2):
                return self.call("div", self.number(1), self.call("mul", a, a))
        if isinstance(a, Const) and a.value > 0:
            power = self.numeric(b)
            return self.call(
                "exp2", power if a.value == 2 else self.scaled(power, math.log2(a.value))
            )
        return self.call("pow", a, self.numeric(b))

    def scaled(self, node: Node, factor: float) -> Node:
        return self.call("mul", node, self.number(factor))

    def bits(self, fn: str, *args: Node) -> Node:
        return self.call(fn, *map(self.numeric, args))

    def _bitand(self, a: Node, b: Node) -> Node:
        return (
            self._logical_and(a, b)
            if a.type is BOOL and b.type is BOOL
            else self.bits("bitand", a, b)
        )

    def _bitor(self, a: Node, b: Node) -> Node:
        return (
            self._logical_or(a, b)
            if a.type is BOOL and b.type is BOOL
            else self.bits("bitor", a, b)
        )

    def _bitxor(self, a: Node, b: Node) -> Node:
        return (
            self.compared("ne", a, b)
            if a.type is BOOL and b.type is BOOL
            else self.bits("bitxor", a, b)
        )

    def _invert(self, a: Node) -> Node:
        return self._logical_not(a) if a.type is BOOL else self.bits("invert", a)

    # Logic ------------------------

    def _logical_and(self, a: Node, b: Node) -> Node:
        a, b = self.truth(a), self.truth(b)
        for value, other in ((a, b), (b, a)):
            if isinstance(value, Const):
                return other if value.value else value
        return self.call("and", a, b)

    def _logical_or(self, a: Node, b: Node) -> Node:
        a, b = self.truth(a), self.truth(b)
        for value, other in ((a, b), (b, a)):
            if isinstance(value, Const):
                return value if value.value else other
        return self.call("or", a, b)

    def _logical_xor(self, a: Node, b: Node) -> Node:
        return self.compared("ne", self.truth(a), self.truth(b))

    def _logical_not(self, a: Node) -> Node:
        a = self.truth(a)
        return self.number(not a.value) if isinstance(a, Const) else self.call("not", a)

    def _where(self, condition: Node, a: Node, b: Node) -> Node:
        condition = self.truth(condition)
        a, b = (self.number(-math.inf) if _is_least(value) else value for value in (a, b))
        if isinstance(condition, Const):
            return a if condition.value else b
        if (a.type is BOOL) != (b.type is BOOL):
            a, b = self.numeric(a), self.numeric(b)
        return self.call("where", condition, a, b)

    def _masked_fill(self, a: Node, mask: Node, value: Node) -> Node:
        return self._where(mask, value, a)

    # Functions that the language has in other words ------------------------

    def _floor(self, a: Node) -> Node:
        return a if a.type.integral else self.call("floor", self.numeric(a))

    def _ceil(self, a: Node) -> Node:
        return a if a.type.integral else self.call("ceil", self.numeric(a))

    def _trunc(self, a: Node) -> Node:
        if a.type.integral:
            return a
        return self.call(
            "where", self.call("lt", a, self.number(0.0)), self._ceil(a), self.call("floor", a)
        )

    def _round(self, a: Node) -> Node:
        return a if a.type.integral else self.call("round", a)

    def _sign(self, a: Node) -> Node:
        a = self.numeric(a)
        if a.type is FLOAT:
            return self.call("sign", a)
        one, zero = self.number(1), self.number(0)
        below = self.call("where", self.call("lt", a, zero), self.call("neg", one), zero)
        return self.call("where", self.call("gt", a, zero), one, below)

    def _relu(self, a: Node) -> Node:
        return self.call("max", self.numeric(a), self.number(0))

    def _relu6(self, a: Node) -> Node:
        return self.call("clamp", a, self.number(0), self.number(6))

    def _square(self, a: Node) -> Node:
        return self._mul(a, a)

    def _reciprocal(self, a: Node) -> Node:
        return self.call("div", self.number(1), self.numeric(a))

    def _tan(self, a: Node) -> Node:
        return self.call("div", self.call("sin", a), self.call("cos", a))

    def _cosh(self, a: Node) -> Node:
        return self.scaled(
            self.call("add", self.call("exp", a), self.call("exp", self.call("neg", a))), 0.5
        )

    def _log10(self, a: Node) -> Node:
        return self.scaled(self.call("log2", self.numeric(a)), math.log10(2))

    def _logsigmoid(self, a: Node) -> Node:
        a = self.real(a)
        tail = self.call("exp", self.call("neg", self.call("abs", a)))
        return self.call("sub", self.call("min", a, self.number(0)), self.call("log1p", tail))

    def _softsign(self, a: Node) -> Node:
        return self.call("div", a, self.call("add", self.number(1), self.call("abs", a)))

    def _elu(self, a: Node, alpha: Node) -> Node:
        low = self.call("mul", alpha, self.call("expm1", self.call("min", a, self.number(0))))
        return self.call("where", self.call("gt", a, self.number(0)), a, low)

    def _leaky_relu(self, a: Node, slope: Node) -> Node:
        return self.call("where", self.call("gt", a, self.number(0)), a, self.call("mul", a, slope))

    def _gelu_tanh(self, a: Node) -> Node:
        cube = self.call("mul", self.call("mul", a, a), a)
        inner = self.scaled(
            self.call("add", a, self.scaled(cube, 0.044715)), math.sqrt(2 / math.pi)
        )
        return self.call(
            "mul", self.scaled(a, 0.5), self.call("add", self.number(1), self.call("tanh", inner))
        )

    def _lerp(self, a: Node, b: Node, weight: Node) -> Node:
        return self.call("add", a, self.call("mul", weight, self.call("sub", b, a)))

    def _addcmul(self, a: Node, b: Node, c: Node) -> Node:
        return self._add(a, self._mul(b, c))


def _is_least(node: Node) -> bool:
    return isinstance(node, Const) and isinstance(node.value, Least)
