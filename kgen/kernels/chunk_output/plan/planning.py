"""Turn a spec of chunk_output into a `ChunkOutputPlan`: sizes, and the decay as expressions.

The forward pass computes, for each chunk of BT tokens and each value head:

    P = scale * (q @ k^T) * b**(c[:, None] - c[None, :]), zero above the diagonal      [BT, BT]
    o = scale * b**c[:, None] * (q @ state) + P @ v                                    [BT, V]

Here c is the exponent of the decay and b its base. This is the chunkwise form of Yang et al. 2024,
"Gated Linear Attention Transformers with Hardware-Efficient Training", with the states as inputs.

Each (chunk, head) is independent of the others. Exponents are subtracted before the power, and only
where j <= i. So no power of a decay is above 1, whatever the gates are.

Backward, with dP = do @ v^T, and S = scale * dP * b**(c[:, None] - c[None, :]), zero above the
diagonal:

    dq = S @ k + scale * b**c * (do @ state^T)        dk = S^T @ q
    dv = P^T @ do                                     dstate = scale * (b**c * q)^T @ do
    dc = log(b) * (rowsum(dP * P) - colsum(dP * P) + rowsum(q * scale * b**c * (do @ state^T)))
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.algebra import Algebra
from kgen.expr.differentiate import derivative
from kgen.expr.fold import folded
from kgen.expr.nodes import Node, Read, Type, Var, reads, substitute
from kgen.kernels.chunk_output.spec import GATES, ChunkOutputSpec
from kgen.spec.load import Loaded

ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
GATE_VARS = {name: Var(name, Type.FLOAT) for name in GATES}


@dataclass(frozen=True)
class ChunkOutputPlan:
    """All decisions that a target needs to print the kernels of one spec."""

    spec: ChunkOutputSpec
    decay: Node | None
    """The expression as the user wrote it."""
    exponent: Node | None
    """c(i) over `i`, `h`, `H`, `HV` and the values of the gates, `g` at i and `g_gamma` at h. None
    without decay.
    """
    slope: Node | None
    """dc / dg over the same names. None if the decay does not read g, or the spec has no backward
    pass.
    """
    gates: tuple[str, ...]
    """The gates that the decay reads, of `g` and `g_gamma`."""

    @property
    def natural(self) -> bool:
        """True if the base is e: kernels then multiply differences of exponents by log2(e)."""
        return self.spec.gate_base == "e"

    @property
    def backward(self) -> bool:
        """True if the spec has a backward pass."""
        return "backward" in self.spec.passes

    @property
    def plain_gate(self) -> bool:
        """True if the exponent is the gate itself, `decay: g[i]`."""
        return self.exponent == GATE_VARS["g"]


def plan_chunk_output(loaded: Loaded) -> ChunkOutputPlan:
    """Build the plan of a loaded spec."""
    spec, decay = loaded.spec, loaded.trees.get("decay")
    if decay is None:
        return ChunkOutputPlan(spec, None, None, None, ())
    algebra = Algebra()
    read = {r.buffer for r in reads(decay)}
    gates = tuple(name for name in GATES if name in read)
    written = substitute(folded(decay, {}), gate_values())
    exponent = written
    if algebra.takes(written):
        exponent = algebra.simplified(algebra.to_sympy(written), written)
    slope = None
    if "backward" in spec.passes and "g" in read:
        slope = derivative(exponent, GATE_VARS["g"], algebra)
    return ChunkOutputPlan(spec, decay, exponent, slope, gates)


def gate_values() -> dict[Node, Node]:
    """Return the reads that `decay` may contain, with the names of their values."""
    return {
        Read(name, (Var(index, Type.INT),), Type.FLOAT): GATE_VARS[name]
        for name, index in GATES.items()
    }


def bytes_per_token(
    plan: ChunkOutputPlan, heads: int, heads_v: int, backward: bool = False
) -> float:
    """Return the bytes that a pass must move per token: each input read once, each output written
    once.

    All chunks count as full. For H=16, HV=32, K=V=128, BT=64 in bf16 with a gate, forward moves
    41,088 bytes.
    """
    spec = plan.spec
    k, v, size = spec.head_dim.qk, spec.head_dim.v, ELEMENT_SIZE[spec.dtype]
    state = heads_v * k * v * ELEMENT_SIZE[spec.state] / spec.chunk_size
    gate = heads_v * ELEMENT_SIZE[spec.gate_dtype] if "g" in plan.gates else 0
    inputs = size * (2 * heads * k + heads_v * v) + state + gate
    # Forward reads the inputs and writes o. Backward reads the inputs and do, and writes the
    # gradient of each input.
    return inputs * (1 + backward) + size * heads_v * v
