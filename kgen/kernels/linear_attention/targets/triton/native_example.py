"""The C++ example of linear attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from kgen.expr.differentiate import is_zero
from kgen.expr.fold import folded
from kgen.expr.nodes import Const, Node, Type, Var, substitute, variables
from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.spec import values
from kgen.kernels.linear_attention.targets.triton.native_tensors import (
    ENDS,
    Argument,
    Arguments,
)
from kgen.spec.load import Loaded
from kgen.targets.code import text
from kgen.targets.native import File, prefix_of
from kgen.targets.native_reference import Sized, in_cpp, sized, spelled, two_of

BATCH = 2
ERRORS = {"bf16": 4e-2, "fp16": 8e-3, "fp32": 8e-3}
"""Tolerances by dtype, relative to the largest magnitude. A norm of small outputs magnifies their
rounding.
"""
RANGES = ((-1.0, 1.0), (-1.0, 0.0), (0.0, 1.0))
"""The ranges of random numbers in buffers of decay and beta, of which the first that fits is
used.
"""
BETA = (0.0, 1.0)
"""The range of beta, for which the delta rule stays bounded."""
FIELDS = ("decay", "beta", "skip", "output_gate", "output", "q_map", "k_map")


@dataclass(frozen=True)
class Drawn:
    """A tensor with random numbers."""

    member: str
    draw: str
    """The largest magnitude, or a function that returns a number."""


@dataclass(frozen=True)
class Value:
    """An element of a buffer at a token, head and column."""

    name: str
    """The member of `Values`."""
    member: str
    at: str
    """The position in the tensor."""


@dataclass(frozen=True)
class Slope:
    """The gradient of a buffer through an expression."""

    value: Value
    sum: str
    """The vector of the reference that adds it up."""


@dataclass(frozen=True)
class Expression:
    """An expression of the spec, and the buffers that get gradients through it."""

    field: str
    body: str
    slopes: tuple[Slope, ...]


@dataclass(frozen=True)
class Whole:
    """The gradient of a buffer, as the sum of all elements of some tensors."""

    sum: str
    member: str
    """The member of the buffer."""
    terms: tuple[str, ...]
    """The members of the tensors of a call."""


@dataclass(frozen=True, kw_only=True)
class LayerExample(File):
    """`example.cpp`, which calls all passes and compares the results with a reference in double."""

    template: ClassVar[str] = "linear_attention/c/example.cpp.j2"

    K: int
    V: int
    BT: int
    B: int
    T: int
    N: int
    NT: int
    slots: int
    H: int
    HV: int
    default_scale: str
    ends: tuple[int, ...]
    """The offsets of the sequences in a row, 0 first."""
    packed: bool
    tensors: tuple[Sized, ...]
    drawn: tuple[Drawn, ...]
    buffers: tuple[str, ...]
    """The members of `Values` for buffers."""
    of_keys: tuple[Value, ...]
    """The buffers of expressions that use columns of keys."""
    of_values: tuple[Value, ...]
    log_of_base: str
    delta: bool
    eps: str | None
    """The number under the root of the norm of q and k."""
    output_eps: str | None
    decay: Expression | None
    beta: Expression | None
    skip: Expression | None
    output_gate: Expression | None
    output: Expression | None
    q_map: Expression | None
    k_map: Expression | None
    backward: bool
    decode: bool
    saves: bool
    wholes: tuple[Whole, ...]
    allowed: str
    """The tolerance."""

    @property
    def of_gates(self) -> bool:
        """True if the spec has a decay or a factor of the update."""
        return self.decay is not None or self.beta is not None

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """The expressions of the spec."""
        found = (self.decay, self.beta, self.skip, self.output_gate, self.output)
        return tuple(one for one in (*found, self.q_map, self.k_map) if one is not None)


def layer_example(
    loaded: Loaded,
    plan: LinearAttentionPlan,
    arguments: Arguments,
    open_sizes: Mapping[str, Sequence[int]],
) -> LayerExample:
    """Return the example of a plan.

    Raise `KgenError` if a function of an expression has no C++ spelling.
    """
    spec = plan.spec
    K, BT, lengths = spec.head_dim.qk, spec.chunk_size, _lengths(plan)
    T, B = sum(lengths), 1 if spec.varlen else BATCH
    N = len(lengths) if spec.varlen else BATCH
    heads = spec.heads.qk or open_sizes["heads"][0]
    group = spec.heads.ratio or two_of(open_sizes["gqa"])
    chunks = T // BT + N if spec.varlen else -(-T // BT)
    inputs = {one.name: one for one in arguments.inputs}
    scale = K**-0.5 if spec.scale is None else float(spec.scale)
    with spelled(loaded):
        expressions = {field: _expression(plan, inputs, field) for field in FIELDS}
    tensors = _tensors(plan, arguments)
    return LayerExample(
        name=prefix_of(loaded),
        license=spec.license.in_comment(),
        K=K,
        V=spec.head_dim.v,
        BT=BT,
        B=B,
        T=T,
        N=N,
        NT=chunks,
        slots=chunks if spec.varlen else B * chunks,
        H=heads,
        HV=heads * group,
        default_scale=repr(scale),
        ends=tuple(sum(lengths[:i]) for i in range(len(lengths) + 1)),
        packed=spec.varlen,
        tensors=tuple(sized(t, "", {ENDS: text("int64_t(ends.size())")}) for t in tensors),
        drawn=tuple(_drawn(plan, arguments, heads, heads * group)),
        buffers=tuple(f"b_{name}" for name in plan.buffers),
        of_keys=tuple(_value(plan, inputs, n) for n in plan.buffers if _columns(plan, n) != "V"),
        of_values=tuple(_value(plan, inputs, n) for n in plan.buffers if _columns(plan, n) != "K"),
        log_of_base="1.0" if plan.natural else "std::log(2.0)",
        delta=plan.delta,
        eps=None if spec.norm_eps is None else repr(spec.norm_eps),
        output_eps=None if spec.output_norm_eps is None else repr(spec.output_norm_eps),
        backward=plan.backward,
        decode=plan.decode,
        saves=plan.backward and spec.saves_states,
        wholes=tuple(_wholes(plan, arguments)) if plan.backward else (),
        allowed=repr(max(ERRORS[d] for d in (spec.dtype, spec.state_dtype))),
        **expressions,
    )


def _lengths(plan: LinearAttentionPlan) -> tuple[int, ...]:
    """Return lengths of packed sequences. One sequence is empty, and others end inside a chunk."""
    BT = int(plan.spec.chunk_size)
    return (BT + 6, 0, 5) if plan.spec.varlen else (BT + 5,)


def _columns(plan: LinearAttentionPlan, name: str) -> str | None:
    return plan.spec.buffers[name].columns


def _value(plan: LinearAttentionPlan, inputs: Mapping[str, Argument], name: str) -> Value:
    shape = plan.spec.buffers[name].shape
    at = {
        ("HV",): "h",
        ("T", "HV"): "(b * T + t) * HV + h",
        ("HV", "K"): "h * K + c",
        ("T", "HV", "K"): "((b * T + t) * HV + h) * K + c",
        ("V",): "c",
        ("HV", "V"): "h * V + c",
        ("T", "HV", "V"): "((b * T + t) * HV + h) * V + c",
    }[tuple(shape)]
    return Value(f"b_{name}", inputs[name].member, at)


def _expression(
    plan: LinearAttentionPlan, inputs: Mapping[str, Argument], field: str
) -> Expression | None:
    formula = plan.formulas.get(field)
    if formula is None:
        return None
    names = {name: f"at.{name}" for name in ("h", "c", "v", "o", "x")} | {"H": "H", "HV": "HV"}
    names |= {name: f"at.b_{name}" for name in plan.buffers}
    learned = [n for n in plan.learned if n in formula.slopes and not is_zero(formula.slopes[n])]
    slopes = tuple(Slope(_value(plan, inputs, n), f"sum_{n}") for n in learned)
    return Expression(field, in_cpp(values(formula.tree), names), slopes)


def _tensors(plan: LinearAttentionPlan, arguments: Arguments) -> list[Argument]:
    """Return the tensors of all calls, without those that forward saves."""
    found = [*arguments.inputs]
    found += [arguments.cu_seqlens] if arguments.cu_seqlens else []
    found += [arguments.o, arguments.initial_state, arguments.final_state, arguments.chunk_states]
    if plan.backward:
        found += [arguments.do, arguments.dfinal_state, *arguments.gradients]
        found += [arguments.dinitial_state, *(one.argument for one in arguments.learned)]
    return [*found, arguments.state] if plan.decode else found


def _wholes(plan: LinearAttentionPlan, arguments: Arguments) -> Iterator[Whole]:
    inputs = {one.name: one for one in arguments.inputs}
    terms = {name: list[str]() for name in plan.learned}
    for one in arguments.learned:
        terms[one.buffer].append(one.argument.member)
    for name in plan.learned:
        if terms[name]:
            yield Whole(f"sum_{name}", inputs[name].member, tuple(terms[name]))


# --- random numbers ------------------------


def _drawn(
    plan: LinearAttentionPlan, arguments: Arguments, heads: int, heads_v: int
) -> Iterator[Drawn]:
    """Yield random inputs with which the state stays bounded."""
    members = {one.name: one.member for one in arguments.inputs}
    unit = plan.delta and plan.spec.qk_norm is None
    sizes = {"H": heads, "HV": heads_v}
    ranges = _ranges(plan, sizes)
    for name, own in members.items():
        low, high = ranges.get(name, (-1.0, 1.0))
        draw = "1.0" if (low, high) == (-1.0, 1.0) else _between(high)
        if unit and name == "k":  # the delta rule diverges for keys longer than 1
            draw = f"std::sqrt(1.0 / {plan.spec.head_dim.qk})"
        yield Drawn(own, draw)
    others = [arguments.initial_state]
    others += [arguments.do, arguments.dfinal_state] if plan.backward else []
    for one in others:
        yield Drawn(one.member, "1.0")


def _between(high: float) -> str:
    """Return a function of numbers between -1 and 0, or between 0 and 1."""
    sign = "-" if high <= 0 else ""
    return f"[](int64_t) {{ return {sign}std::fabs(example::random_number()); }}"


def _ranges(
    plan: LinearAttentionPlan, sizes: Mapping[str, int]
) -> Mapping[str, tuple[float, float]]:
    """Return the range of each buffer of decay and beta, so that the state stays bounded.

    The decay is at most 0, and for the delta rule beta is between 0 and 1. If no combination of
    ranges fits, all numbers are between -1 and 1.
    """
    trees = {f: values(plan.formulas[f].tree) for f in ("decay", "beta") if f in plan.formulas}
    names = [n for n in plan.buffers if any(n in variables(tree) for tree in trees.values())]
    for ranges in itertools.product(RANGES, repeat=len(names)):
        chosen = dict(zip(names, ranges, strict=True))
        if _bounded(plan, trees, chosen, sizes):
            return chosen
    return {}


def _bounded(
    plan: LinearAttentionPlan,
    trees: Mapping[str, Node],
    ranges: Mapping[str, tuple[float, float]],
    sizes: Mapping[str, int],
) -> bool:
    random = Random(0)
    for _ in range(64):
        at = {"h": random.randrange(sizes["HV"]), "c": random.randrange(plan.spec.head_dim.qk)}
        point: dict[Node, Node] = {
            Var(n, Type.INT): Const(x, Type.INT) for n, x in {**sizes, **at}.items()
        }
        for name, (low, high) in ranges.items():
            point[Var(name, Type.FLOAT)] = Const(random.uniform(low, high), Type.FLOAT)
        found = {f: folded(substitute(tree, point), {}) for f, tree in trees.items()}
        numbers = {f: float(one.value) for f, one in found.items() if isinstance(one, Const)}
        if numbers.get("decay", 0.0) > 0:
            return False
        if plan.delta and not BETA[0] <= numbers.get("beta", 1.0) <= BETA[1]:
            return False
    return True
