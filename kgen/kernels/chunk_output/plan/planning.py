"""A spec of chunk_output becomes a `ChunkOutputPlan`: its sizes, and its decay as expressions that a target spells.

For each chunk of BT tokens and each value head, with c the exponent of the decay and b its base:

    P = scale * (q @ k^T) * b**(c[:, None] - c[None, :]), zero above the diagonal      [BT, BT]
    o = scale * b**c[:, None] * (q @ state) + P @ v                                    [BT, V]

A chunk has everything that its output needs, so every (chunk, head) is independent of the others. The exponents are
subtracted before the power is taken, and only where j <= i: for a decay no power is above 1 then, whatever the gates.

Backward, with dP = do @ v^T, and S = scale * dP * b**(c[:, None] - c[None, :]), zero above the diagonal:

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
    """Everything a target needs to spell the kernels of one spec."""

    spec: ChunkOutputSpec
    decay: Node | None
    """As the user wrote it."""
    exponent: Node | None
    """c(i) over `i`, `h`, `H`, `HV` and the gates' values `g` (at i) and `g_gamma` (at h); None without decay."""
    slope: Node | None
    """d c / d g over the same names; None where g is not read, or no gradient is asked for."""
    gates: tuple[str, ...]
    """The gates that are read, of `g` and `g_gamma`."""

    @property
    def natural(self) -> bool:
        """Whether exponents are of e: kernels multiply their differences by log2(e)."""
        return self.spec.gate_base == "e"

    @property
    def backward(self) -> bool:
        """Whether the spec asks for gradients."""
        return "backward" in self.spec.passes

    @property
    def plain_gate(self) -> bool:
        """Whether the exponent is the gate itself, `decay: g[i]`."""
        return self.exponent == GATE_VARS["g"]


def plan_chunk_output(loaded: Loaded) -> ChunkOutputPlan:
    """The plan of a loaded chunk_output spec."""
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
    """The reads that `decay` may make, and the names of their values."""
    return {Read(name, (Var(index, Type.INT),), Type.FLOAT): GATE_VARS[name] for name, index in GATES.items()}


def bytes_per_token(plan: ChunkOutputPlan, heads: int, heads_v: int, backward: bool = False) -> float:
    """Bytes that a pass has to move for each token: every input read once, every output written once.

    A chunk counts as full. H=16, HV=32, K=V=128, BT=64 in bf16 with a gate: 41,088 forward.
    """
    spec = plan.spec
    k, v, size = spec.head_dim.qk, spec.head_dim.v, ELEMENT_SIZE[spec.dtype]
    state = heads_v * k * v * ELEMENT_SIZE[spec.state] / spec.chunk_size
    gate = heads_v * ELEMENT_SIZE[spec.gate_dtype] if "g" in plan.gates else 0
    inputs = size * (2 * heads * k + heads_v * v) + state + gate
    # Backward reads them and do, and writes the gradient of each; forward reads them and writes o.
    return inputs * (1 + backward) + size * heads_v * v
