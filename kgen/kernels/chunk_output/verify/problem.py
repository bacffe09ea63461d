"""Properties of a chunk_output spec for verification and benchmarks, as plain frozen data.

A `Problem` is pickled for worker processes. It does not depend on the model of the spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.expr.nodes import Node, reads


@dataclass(frozen=True)
class Problem:
    """A chunk_output spec, with the tree of the decay as written."""

    name: str
    dtype: str
    state_dtype: str
    head_qk: int
    head_v: int
    chunk_size: int
    gate_dtype: str = "fp32"
    heads: int | None = None
    heads_v: int | None = None
    group: int | None = None
    """HV / H, if the spec fixes it; `heads` and `heads_v` likewise."""
    decay: Node | None = None
    gate_base: str | int = "e"
    state_layout: str = "kv"
    v_layout: str = "token"
    varlen: bool = False
    passes: tuple[str, ...] = ("forward", "backward")
    kernel: ClassVar[str] = "chunk_output"
    part: ClassVar[str | None] = None

    @property
    def gates(self) -> tuple[str, ...]:
        """The gates among the arguments of the emitted function, of `g` and `g_gamma`, in order."""
        read = {r.buffer for r in reads(self.decay)} if self.decay is not None else set()
        return tuple(name for name in ("g", "g_gamma") if name in read)

    @property
    def padded(self) -> bool:
        """True if v is stored in whole chunks."""
        return self.v_layout == "chunk_padded"


def problem_of(loaded: Any) -> Problem:
    """Return the `Problem` of a `kgen.spec.load.Loaded`."""
    spec = loaded.spec
    return Problem(
        name=spec.name,
        dtype=spec.dtype,
        state_dtype=spec.state,
        head_qk=int(spec.head_dim.qk),
        head_v=int(spec.head_dim.v),
        chunk_size=int(spec.chunk_size),
        gate_dtype=spec.gate_dtype,
        heads=spec.heads.qk,
        heads_v=spec.heads.v,
        group=spec.heads.ratio,
        decay=loaded.trees.get("decay"),
        gate_base=spec.gate_base,
        state_layout=spec.state_layout,
        v_layout=spec.v_layout,
        varlen=bool(spec.varlen),
        passes=tuple(spec.passes),
    )
