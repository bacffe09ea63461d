"""Properties of an attention spec for verification and benchmarks, as plain frozen data.

A `Problem` is pickled for worker processes. It does not depend on the model of the spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.expr.nodes import Call, Node, distinct, measured, variables
from kgen.kernels.attention.plan.extents import ties_lengths
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.spec import ANY
from kgen.spec.common import REALS
from kgen.targets.arguments import DIVISIONS


@dataclass(frozen=True)
class Buffer:
    """A declared tensor.

    `shape` has numbers and the names `B HQ HKV SQ SK any`; `dtype` may be `any`.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    grad: bool = False
    sorted: bool = False
    within: int | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The allowed dtypes of its tensor."""
        return REALS if self.dtype == ANY else (self.dtype,)

    @property
    def per_token(self) -> bool:
        """True if it has an entry for each position."""
        return any(n in ("SQ", "SK") for n in self.shape)


@dataclass(frozen=True)
class Param:
    """A scalar: a compile-time constant with a `value`, or a run-time argument."""

    name: str
    type: str
    value: int | float | None = None
    runtime: bool = False


@dataclass(frozen=True)
class Problem:
    """An attention spec, with its expression trees as written."""

    name: str
    dtype: str
    head_qk: int
    head_v: int
    gqa: int | str = 1
    precision: str | None = None
    q_multiple: int = 1
    kv_multiple: int = 1
    buffers: tuple[Buffer, ...] = ()
    params: tuple[Param, ...] = ()
    passes: tuple[str, ...] = ("forward", "backward")
    fast_math: bool = False
    varlen: bool = False
    sinks: bool = False
    """True if one of the `buffers` is `sinks` [HQ], which no expression reads."""
    row_max: bool = False
    """True if calls can return the largest score of each row."""
    score_mod: Node | None = None
    mask_mod: Node | None = None
    aligned_to_end: bool = False
    """True if query i is at position SK - SQ + i, or kv_lens[b] - SQ + i."""
    per_batch: bool = False
    """True if the function has an argument `kv_lens`, int32 [B]."""
    block_mask: bool = False
    """True if the function loops over lists of blocks, which another function builds."""
    page_size: int | None = None
    """Positions per page, if the function has pages and a `block_table`."""
    kv_dtype: str | None = None
    """Dtype of a quantized cache, for the pass `serve`."""
    in_batches: bool = False
    """True if results of the pass `serve` must not depend on the batch."""
    kernel: ClassVar[str] = "attention"
    part: ClassVar[str | None] = None

    @property
    def runtime_params(self) -> tuple[Param, ...]:
        """The keyword parameters of the emitted function."""
        return tuple(p for p in self.params if p.runtime)

    @property
    def trees(self) -> tuple[Node, ...]:
        """The trees of `score_mod` and `mask_mod`, if any."""
        return tuple(t for t in (self.score_mod, self.mask_mod) if t is not None)

    @property
    def tied_lengths(self) -> bool:
        """True if the emitted launcher requires SQ == SK."""
        return ties_lengths(
            self.trees, {b.name: b.shape for b in self.buffers}, self.aligned_to_end
        )

    @property
    def may_have_no_elements(self) -> bool:
        """True if a call may have buffers without elements: axes `any` exist, and no length is a
        divisor.
        """
        nodes = (node for tree in self.trees for node in distinct(tree))
        divisors = [
            node.args[1] for node in nodes if isinstance(node, Call) and node.fn in DIVISIONS
        ]
        divides = any(measured(name) for divisor in divisors for name in variables(divisor))
        return any(ANY in b.shape for b in self.buffers) and not divides

    @property
    def reads_sk(self) -> bool:
        """True if the spec reads the number of keys."""
        return any("SK" in b.shape for b in self.buffers) or any(
            "SK" in variables(t) for t in self.trees
        )

    @property
    def exact_scores(self) -> bool:
        """True if backward recomputes P exactly, and a score is only a product of q and k."""
        return self.dtype == "fp32" and self.score_mod is None

    @property
    def decodes(self) -> bool:
        """True if the spec has decoding kernels for few queries."""
        return "decode" in self.passes or self.page_size is not None

    @property
    def least_capability(self) -> int:
        """The lowest compute capability that the kernels need: 89 for FP8 E4M3, 0 for any."""
        return 89 if self.kv_dtype == "fp8_e4m3" else 0

    @property
    def key_conjuncts(self) -> tuple[Node, ...]:
        """The conjuncts of the mask that depend on the key, but not on the query."""
        if self.mask_mod is None:
            return ()
        names = [(part, variables(part)) for part in _conjuncts(self.mask_mod)]
        return tuple(part for part, used in names if "kv_idx" in used and "q_idx" not in used)


def _conjuncts(node: Node) -> Iterator[Node]:
    if isinstance(node, Call) and node.fn == "and":
        for arg in node.args:
            yield from _conjuncts(arg)
    else:
        yield node


def _multiple(length: Any) -> int:
    return int(getattr(length, "multiple_of", None) or 1)


def _has_block_mask(loaded: Any) -> bool:
    wanted = getattr(loaded.spec, "block_mask", "never")
    return wanted != "never" and plan_attention(loaded).block_mask is not None


def problem_of(loaded: Any) -> Problem:
    """Return the `Problem` of a `kgen.spec.load.Loaded`."""
    spec = loaded.spec
    return Problem(
        name=spec.name,
        dtype=spec.dtype,
        head_qk=int(spec.head_dim.qk),
        head_v=int(spec.head_dim.v),
        gqa=spec.gqa,
        precision=getattr(spec, "precision", None),
        q_multiple=_multiple(spec.lengths.q),
        kv_multiple=_multiple(spec.lengths.kv),
        buffers=tuple(
            Buffer(name, tuple(b.shape), b.dtype, bool(b.grad), bool(b.sorted), b.within)
            for name, b in spec.buffers.items()
        )
        + (Buffer("sinks", ("HQ",), "fp32", grad="backward" in spec.passes),) * spec.sinks,
        params=tuple(
            Param(name, p.type, None if p.runtime else p.value, bool(p.runtime))
            for name, p in spec.params.items()
        ),
        passes=tuple(spec.passes),
        fast_math=bool(getattr(spec, "fast_math", False)),
        varlen=spec.varlen,
        sinks=spec.sinks,
        row_max=bool(getattr(spec, "row_max", False)),
        score_mod=loaded.trees.get("score_mod"),
        mask_mod=loaded.trees.get("mask_mod"),
        aligned_to_end=spec.aligned_to_end,
        per_batch=spec.per_batch,
        block_mask=_has_block_mask(loaded),
        page_size=None if spec.paged_kv is None else spec.paged_kv.page_size,
        kv_dtype=spec.kv_dtype,
        in_batches=spec.deterministic == "batch",
    )
