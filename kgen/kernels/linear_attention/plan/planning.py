"""Turn a spec of linear_attention into a `LinearAttentionPlan`: expressions over values, and their
derivatives.

The chunked form of the recurrence is from Yang et al. 2024, "Gated Delta Networks", and Kimi Team
2025, "Kimi Linear". A chunk has C tokens. G(i) is the sum of the decays of its tokens 0 to i. It is
a number, or a vector over the columns of keys. b is the base of the decay. For `rule: delta`:

    A[i, j] = beta(i) * (k(i) * b**(G(i) - G(j))) . k(j), for j < i        [C, C]
    U = (I + A)^-1 @ (beta * v)                                            [C, V]
    W = (I + A)^-1 @ (beta * b**G * k)                                     [C, K]
    N = U - W @ S                                                          [C, V]

S [K, V] is the state before the chunk. For `rule: add`, N = beta * v. Then:

    o(i) = scale * ((b**G(i) * q(i)) @ S + sum over j <= i of P[i, j] * N(j))
    P[i, j] = (q(i) * b**(G(i) - G(j))) . k(j)
    S = b**G(C - 1) * S + (b**(G(C - 1) - G) * k)^T @ N

Exponents are subtracted before the power, and only where j <= i, so no power is above 1.

With an output norm or expression, this o is the tensor `o_raw`. A kernel then computes rows of o:

    x = o_raw * output_gate
    o = output(x / sqrt(mean(x**2) + output_eps))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.expr.algebra import Algebra
from kgen.expr.differentiate import derivative, is_zero
from kgen.expr.fold import folded
from kgen.expr.nodes import Node, Type, Var, variables
from kgen.kernels.linear_attention.spec import FIELDS, LinearAttentionSpec, values
from kgen.spec.load import Loaded

ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of an element, by dtype."""


@dataclass(frozen=True)
class Formula:
    """One expression of a spec."""

    tree: Node
    """The tree as the user wrote it, which reads buffers at `t`, `h` and `c`."""
    value: Node
    """The simplified tree. A buffer's name stands for its element."""
    slopes: Mapping[str, Node]
    """The derivatives by name: of buffers with gradients, and of `x`, `v` or `o`. None of them is
    zero.
    """

    @property
    def read(self) -> frozenset[str]:
        """Names of its values and indices."""
        return variables(self.value)


@dataclass(frozen=True)
class LinearAttentionPlan:
    """All decisions that a target needs to print the kernels of one spec."""

    spec: LinearAttentionSpec
    formulas: Mapping[str, Formula]
    """The expressions of the spec by field, in the order of `FIELDS`."""
    buffers: tuple[str, ...]
    """The buffers that expressions read, in the order of the arguments."""

    @property
    def natural(self) -> bool:
        """True if the base is e: kernels then multiply the decay by log2(e)."""
        return self.spec.gate_base == "e"

    @property
    def by_column(self) -> bool:
        """True if the decay varies along the columns of the keys."""
        columns = {n for n in self.buffers if self.spec.buffers[n].columns == "K"}
        return "decay" in self.formulas and bool(self.formulas["decay"].read & {"c", *columns})

    @property
    def by_token(self) -> bool:
        """True if the decay varies along the tokens."""
        tokens = {n for n in self.buffers if self.spec.buffers[n].tokens}
        return "decay" in self.formulas and bool(self.formulas["decay"].read & tokens)

    @property
    def delta(self) -> bool:
        """True for the delta rule."""
        return self.spec.rule == "delta"

    @property
    def finishes(self) -> bool:
        """True if a kernel for rows follows the kernel of the output: gate, norm, expression."""
        return self.spec.output_norm is not None or "output" in self.formulas

    @property
    def backward(self) -> bool:
        """True if the spec has a backward pass."""
        return "backward" in self.spec.passes

    @property
    def decode(self) -> bool:
        """True if the spec has a function that steps a state."""
        return "decode" in self.spec.passes

    @property
    def learned(self) -> tuple[str, ...]:
        """The buffers with gradients, in the order of the arguments."""
        return tuple(name for name in self.buffers if self.spec.buffers[name].grad)


def plan_linear_attention(loaded: Loaded) -> LinearAttentionPlan:
    """Build the plan of a loaded spec."""
    spec = loaded.spec
    wanted = [n for n, b in spec.buffers.items() if b.grad] if "backward" in spec.passes else []
    algebra = Algebra()
    formulas = {
        field: _formula(loaded.trees[field], [*wanted, *_INPUT.get(field, ())], algebra)
        for field in FIELDS
        if field in loaded.trees
    }
    return LinearAttentionPlan(spec, formulas, tuple(spec.buffers))


_INPUT = {"q_map": ("x",), "k_map": ("x",), "skip": ("v",), "output": ("o",)}
"""The inputs of an expression that have gradients, apart from buffers."""


def _formula(tree: Node, wanted: list[str], algebra: Algebra) -> Formula:
    value = values(folded(tree, {}))
    if algebra.takes(value):
        value = algebra.simplified(algebra.to_sympy(value), value)
    slopes = {
        name: derivative(value, Var(name, Type.FLOAT), algebra)
        for name in wanted
        if name in variables(value)
    }
    return Formula(tree, value, {n: slope for n, slope in slopes.items() if not is_zero(slope)})
