"""Turn the spec of a norm into a `NormPlan`: the loads, values, sums and stores of each kernel, as
expressions.

Forward, for each row:

    h      = input_mod(x, residual, ...)          stored if the residual is returned
    mean   = sum(h) / WIDTH                       only layer norm; 0 for RMS norm
    rstd   = 1 / sqrt(sum((h - mean)^2) / WIDTH + eps)
    x_hat  = (h - mean) * rstd
    y      = x_hat * (weight + offset) + bias
    out    = output_mod(y, ...)

Backward, from dout (and dh_out, the gradient of the h that was returned):

    dy     = dout * d output_mod / dy
    dx_hat = dy * (weight + offset)
    c1     = sum(dx_hat * x_hat) / WIDTH
    c2     = sum(dx_hat) / WIDTH                  only layer norm
    dh     = (dx_hat - x_hat * c1 - c2) * rstd + dh_out

Each gradient is one expression over these values. The sources are Ba, Kiros and Hinton 2016 (layer
norm) and Zhang and Sennrich 2019 (RMS norm), differentiated. All values are fp32. A target prints
the trees in the order of the `Value`s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kgen.expr.algebra import Algebra, call
from kgen.expr.differentiate import derivative, is_one, is_zero
from kgen.expr.fold import folded
from kgen.expr.nodes import Const, Node, Type, Var, variables
from kgen.kernels.norm.spec import NormSpec
from kgen.spec.common import numbers
from kgen.spec.load import Loaded

ZERO, ONE = Const(0, Type.INT), Const(1, Type.INT)


def _real(name: str) -> Var:
    return Var(name, Type.FLOAT)


X, RESIDUAL, WEIGHT, BIAS = (_real(n) for n in ("x", "residual", "weight", "bias"))
H, MEAN, RSTD, X_HAT, Y = (_real(n) for n in ("h", "mean", "rstd", "x_hat", "y"))
DOUT, DY, DX_HAT, C1, C2, DH, DH_OUT = (
    _real(n) for n in ("dout", "dy", "dx_hat", "c1", "c2", "dh", "dh_out")
)


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads. The variable of its name is its element at (row, column)."""

    name: str
    dtype: str
    type: Type
    along: str
    """`element` [rows, width], `row` [rows] or `column` [width]. With heads: [H, width], and row r
    has head r % H.
    """
    grad: bool = False


@dataclass(frozen=True)
class Value:
    """`name = tree` at each element, in fp32.

    If `rounded` is a dtype, the value is rounded to it and used as fp32.
    """

    name: str
    tree: Node
    rounded: str | None = None


@dataclass(frozen=True)
class Gradient:
    """The gradient of operand `of`: `tree` at each element, summed over the axes that the operand
    lacks.
    """

    of: str
    tree: Node
    along: str
    dtype: str
    same_as: str | None = None
    """An operand with the same gradient in the same dtype. It is stored once."""

    @property
    def name(self) -> str:
        """The name in kernels."""
        return f"d{self.of}"


@dataclass(frozen=True)
class Forward:
    """The forward kernel."""

    loads: tuple[Operand, ...]
    """The loads in the order of use. The first `late` loads are operands of h."""
    late: int
    h: Value
    normed: tuple[Value, ...]
    """x_hat (and x_hat_rounded), y, from h, mean and rstd."""
    out: Value
    """The output. `rounded` is its dtype. If the spec quantizes, it is divided by the scale before
    it is rounded.
    """


@dataclass(frozen=True)
class Backward:
    """The backward kernel.

    It loads the statistics, or computes them from h if the spec recomputes them.
    """

    loads: tuple[Operand, ...]
    """The operands that backward loads, except dout, dh_out, mean and rstd. `h` is the sum that
    forward returned.
    """
    before: tuple[Value, ...]
    """h (unless it is loaded), x_hat, y (if derivatives of output_mod need it), dy and dx_hat."""
    means: tuple[Value, ...]
    """c1 and c2: each is the mean of its tree over the row."""
    dh: Value
    gradients: tuple[Gradient, ...]
    """The gradients in the order of the launcher's arguments."""

    @property
    def elements(self) -> tuple[Gradient, ...]:
        """The gradients that are stored for every element."""
        return tuple(g for g in self.gradients if g.along == "element" and g.same_as is None)

    @property
    def columns(self) -> tuple[Gradient, ...]:
        """The gradients that are summed over rows, as fp32 partial sums that a second kernel
        adds.
        """
        return tuple(g for g in self.gradients if g.along == "column")

    @property
    def rows(self) -> tuple[Gradient, ...]:
        """The gradients that are summed over each row."""
        return tuple(g for g in self.gradients if g.along == "row")


@dataclass(frozen=True)
class NormPlan:
    """All decisions that a target needs to print the kernels of one spec."""

    spec: NormSpec
    operands: tuple[Operand, ...]
    """The tensor arguments of the launcher: x, residual, weight, bias, then the buffers."""
    forward: Forward
    backward: Backward | None

    @property
    def layer(self) -> bool:
        """True if the mean is subtracted."""
        return self.spec.norm == "layer"

    @property
    def stores_h(self) -> bool:
        """True if h is an output."""
        return self.spec.residual == "in_out"

    @property
    def upstream(self) -> tuple[Operand, ...]:
        """The gradients that autograd passes to backward: dout, and dh_out if h is returned. dh_out
        may be None.
        """
        names = {"dout": "output"} | ({"dh_out": "residual"} if self.stores_h else {})
        return tuple(
            Operand(n, self.spec.dtypes[of], Type.FLOAT, "element") for n, of in names.items()
        )

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics of a row, each [rows] in fp32."""
        return ("mean", "rstd") if self.layer else ("rstd",)

    @property
    def saves(self) -> tuple[str, ...]:
        """The statistics that forward stores for backward."""
        saved = self.backward is not None and self.spec.statistics == "save"
        return self.statistics if saved else ()

    def operand(self, name: str) -> Operand:
        """Return the argument `name`."""
        return next(o for o in self.operands if o.name == name)


def plan_norm(loaded: Loaded) -> NormPlan:
    """Build the plan of a loaded spec."""
    return _Planner(loaded).plan()


class _Planner:
    def __init__(self, loaded: Loaded) -> None:
        spec = self.spec = loaded.spec
        self.algebra = Algebra()
        default, known = call("add", X, RESIDUAL) if spec.residual else X, numbers(spec.params)
        self.input_mod = folded(loaded.trees.get("input_mod", default), known)
        self.output_mod = folded(loaded.trees.get("output_mod", Y), known)
        self.operands = tuple(self._operands())
        self.centred: Node = call("sub", H, MEAN) if spec.norm == "layer" else H

    def plan(self) -> NormPlan:
        backward = self._backward() if "backward" in self.spec.passes else None
        return NormPlan(self.spec, self.operands, self._forward(), backward)

    def _operands(self) -> Iterator[Operand]:
        spec, real = self.spec, Type.FLOAT
        yield Operand("x", spec.dtypes["input"], real, "element", grad=True)
        if spec.residual:
            yield Operand("residual", spec.dtypes["residual"], real, "element", grad=True)
        for name, there in (("weight", spec.weight), ("bias", spec.bias)):
            if there:
                yield Operand(name, spec.dtypes["weight"], real, "column", grad=True)
        for name, b in spec.buffers.items():
            yield Operand(name, b.dtype, b.element, b.along, b.grad)

    def _used(self, nodes: Iterable[Node]) -> tuple[Operand, ...]:
        """Return the arguments that some trees read."""
        names = {name for node in nodes for name in variables(node)}
        return tuple(o for o in self.operands if o.name in names)

    def _h(self) -> Value:
        # The norm uses the rounded sum that is returned, because backward reads the returned sum.
        returned = self.spec.residual == "in_out"
        return Value("h", self.input_mod, self.spec.dtypes["residual"] if returned else None)

    def _factor(self) -> Node | None:
        """Return the factor of x_hat, or None."""
        if not self.spec.weight:
            return None
        return call("add", WEIGHT, ONE) if self.spec.weight_offset else WEIGHT

    def _normed(self) -> tuple[Value, ...]:
        spec, factor = self.spec, self._factor()
        values = [Value("x_hat", call("mul", self.centred, RSTD))]
        y: Node = self._x_hat()
        if spec.round_x_hat:
            values.append(Value("x_hat_rounded", X_HAT, spec.dtypes["input"]))
        if factor is not None:
            y = call("mul", y, factor)
        return (*values, Value("y", call("add", y, BIAS) if spec.bias else y))

    def _x_hat(self) -> Node:
        """Return x_hat as the weight multiplies it: rounded, or not."""
        return _real("x_hat_rounded") if self.spec.round_x_hat else X_HAT

    def _forward(self) -> Forward:
        early = self._used([self.input_mod])
        normed = self._normed()
        late = self._used([*(v.tree for v in normed), self.output_mod])
        loads = (*early, *(o for o in late if o not in early))
        out = Value("out", self.output_mod, self.spec.dtypes["output"])
        return Forward(loads, len(early), self._h(), normed, out)

    def _backward(self) -> Backward:
        spec, factor = self.spec, self._factor()
        before = self._derivative(self.output_mod, Y, DOUT)
        dx_hat = DY if factor is None else call("mul", DY, factor)
        means = [Value("c1", call("mul", DX_HAT, X_HAT))]
        dh: Node = call("sub", DX_HAT, call("mul", X_HAT, C1))
        if spec.norm == "layer":
            means.append(Value("c2", DX_HAT))
            dh = call("sub", dh, C2)
        dh = call("mul", dh, RSTD)
        if spec.residual == "in_out":
            dh = call("add", dh, DH_OUT)
        gradients = tuple(self._gradients())

        normed = {v.name: v for v in self._normed()}
        later = [before, dx_hat, *(g.tree for g in gradients)]
        if not any("y" in variables(t) for t in later):
            del normed["y"]
        if not any(
            "x_hat_rounded" in variables(t) for t in [*later, *(v.tree for v in normed.values())]
        ):
            normed.pop("x_hat_rounded", None)
        values = [*normed.values(), Value("dy", before), Value("dx_hat", dx_hat)]
        loads = self._used([*(v.tree for v in values), *(g.tree for g in gradients)])
        if spec.residual == "in_out":
            h = Operand("h", spec.dtypes["residual"], Type.FLOAT, "element")
            loads = (h, *loads)
        else:
            values = [self._h(), *values]
            read = self._used([self.input_mod])
            loads = (*read, *(o for o in loads if o not in read))
        return Backward(loads, tuple(values), tuple(means), Value("dh", dh), gradients)

    def _derivative(self, node: Node, wrt: Var, upstream: Node) -> Node:
        """Return upstream * d(node) / d(wrt)."""
        partial = derivative(node, wrt, self.algebra)
        if is_zero(partial) or is_one(partial):
            return upstream if is_one(partial) else ZERO
        return call("mul", upstream, partial)

    def _gradients(self) -> Iterator[Gradient]:
        found: dict[tuple[Node, str], str] = {}
        for o in self.operands:
            if not o.grad:
                continue
            tree = self._gradient(o)
            same_as = None
            if o.along == "element":
                same_as = found.get((tree, o.dtype))
                found.setdefault((tree, o.dtype), o.name)
            yield Gradient(o.name, tree, o.along, o.dtype, same_as)

    def _gradient(self, operand: Operand) -> Node:
        if operand.name == "weight":
            return call("mul", DY, self._x_hat())
        if operand.name == "bias":
            return DY
        wrt = _real(operand.name)
        parts = [
            self._derivative(self.input_mod, wrt, DH),
            self._derivative(self.output_mod, wrt, DOUT),
        ]
        parts = [p for p in parts if not is_zero(p)]
        return ZERO if not parts else parts[0] if len(parts) == 1 else call("add", *parts)
