"""Properties of a linear_attention spec for verification and benchmarks, as plain frozen data.

A `Problem` is pickled for worker processes. It does not depend on the model of the spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.expr.nodes import Node, reads, variables

EXPRESSIONS = ("decay", "beta", "q_map", "k_map", "skip", "output_gate", "output")
"""The fields of a `Problem` with trees."""


@dataclass(frozen=True)
class Buffer:
    """A tensor that the expressions read."""

    name: str
    shape: tuple[str, ...]
    dtype: str
    grad: bool

    @property
    def tokens(self) -> bool:
        """True if it has an element for each token; its tensor then begins with the batch."""
        return self.shape[0] == "T"


@dataclass(frozen=True)
class Problem:
    """A linear_attention spec, with the trees of its expressions as written."""

    name: str
    dtype: str
    state_dtype: str
    head_qk: int
    head_v: int
    chunk_size: int
    heads: int | None = None
    heads_v: int | None = None
    group: int | None = None
    """HV / H, if the spec fixes it; `heads` and `heads_v` likewise."""
    buffers: tuple[Buffer, ...] = ()
    decay: Node | None = None
    gate_base: str | int = "e"
    delta: bool = False
    beta: Node | None = None
    q_map: Node | None = None
    k_map: Node | None = None
    norm_eps: float | None = None
    """The number under the root of the L2 norm of q and k; None without a norm."""
    scale: float | None = None
    skip: Node | None = None
    output_gate: Node | None = None
    output_eps: float | None = None
    """The number under the root of the norm of the output; None without a norm."""
    output: Node | None = None
    varlen: bool = False
    passes: tuple[str, ...] = ("forward", "backward")
    kernel: ClassVar[str] = "linear_attention"
    part: ClassVar[str | None] = None

    def read_by(self, *fields: str) -> tuple[Buffer, ...]:
        """Return the buffers that the expressions of these fields read."""
        trees = [tree for field in fields if (tree := getattr(self, field)) is not None]
        names = {read.buffer for tree in trees for read in reads(tree)}
        return tuple(buffer for buffer in self.buffers if buffer.name in names)

    @property
    def by_column(self) -> bool:
        """True if the decay varies along the columns of the keys."""
        return self.decay is not None and "c" in variables(self.decay)

    @property
    def finishes(self) -> bool:
        """True if a norm or an expression follows the output of the recurrence."""
        return self.output_eps is not None or self.output is not None

    @property
    def unit_keys(self) -> bool:
        """True if inputs need keys of length one: the delta rule diverges for longer keys."""
        return self.delta and self.norm_eps is None


def problem_of(loaded: Any) -> Problem:
    """Return the `Problem` of a `kgen.spec.load.Loaded`."""
    spec, trees = loaded.spec, loaded.trees
    return Problem(
        name=spec.name,
        dtype=spec.dtype,
        state_dtype=spec.state_dtype,
        head_qk=int(spec.head_dim.qk),
        head_v=int(spec.head_dim.v),
        chunk_size=int(spec.chunk_size),
        heads=spec.heads.qk,
        heads_v=spec.heads.v,
        group=spec.heads.ratio,
        buffers=tuple(
            Buffer(name, tuple(b.shape), b.dtype, b.grad) for name, b in spec.buffers.items()
        ),
        gate_base=spec.gate_base,
        delta=spec.rule == "delta",
        norm_eps=spec.norm_eps,
        scale=spec.scale,
        output_eps=spec.output_norm_eps,
        varlen=bool(spec.varlen),
        passes=tuple(spec.passes),
        **{field: trees.get(field) for field in EXPRESSIONS},
    )
