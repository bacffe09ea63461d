"""Launch shapes of norms in CUDA: how threads share rows, by the width that a shape reaches.

Timed on an H200 in bf16 (docs/performance/norm_cuda.md). Narrow rows want many small blocks, each with its row under
way; wide rows want many elements a thread, then several blocks for a row (a cluster, where the chip has them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.plan.norm import NormPlan


@dataclass(frozen=True)
class Shape:
    """`threads` in each of `cluster` blocks share a row, a block holds `rows` rows, a thread `elements` elements.

    `stages` rows are in shared memory or under way; at least `blocks` blocks fit on a multiprocessor. Blocks that stay
    go on to `turns` rows before they end, where that is not 0: the chip evens out what they take, and their columns
    are loaded that many times less often. `shifted` is for rows that begin between two accesses.
    """

    threads: int
    rows: int
    elements: int
    cluster: int = 1
    stages: int = 1
    blocks: int = 1
    turns: int = 0
    shifted: bool = False

    @property
    def least(self) -> int:
        """Elements of the narrowest row: shifted ones that would leave most of a shape empty are better read singly."""
        return self.width * 2 // 5 if self.shifted else 1

    @property
    def width(self) -> int:
        """Elements of the widest row that it takes."""
        return self.threads * self.elements * self.cluster

    def fits_registers(self, held: float) -> bool:
        """Whether a multiprocessor's 65536 registers hold a block whose threads keep `held` for each element."""
        return self.threads * self.rows * (self.elements * held + 48) <= 65536

    @property
    def stay(self) -> bool:
        """Whether blocks go on to further rows: those with several under way, and clusters. Others end with theirs."""
        return self.stages > 1 or self.cluster > 1

    @property
    def stay_word(self) -> str:
        """`stay` in C."""
        return str(self.stay).lower()


def _backward(
    threads: int, rows: int, elements: int, cluster: int = 1, stages: int = 2, blocks: int = 1
) -> Shape:
    return Shape(threads, rows, elements, cluster, stages, blocks)


FORWARD: dict[str, tuple[Shape, ...]] = {
    "rms": (
        Shape(8, 16, 8),
        Shape(8, 16, 16),
        Shape(16, 8, 16, blocks=12),
        Shape(16, 4, 32),
        Shape(32, 4, 24),
        Shape(64, 2, 16, blocks=16),
        Shape(96, 2, 16),
        Shape(128, 1, 16, blocks=12),
        Shape(96, 1, 32, blocks=10),
        Shape(256, 1, 16, blocks=6),
        Shape(128, 1, 40),
        Shape(224, 1, 32, blocks=4),
        Shape(512, 1, 16, blocks=4),
        Shape(512, 1, 24, blocks=3),
        Shape(1024, 1, 16, blocks=2),
        Shape(384, 1, 64),
        Shape(512, 1, 64, blocks=2),
        Shape(1024, 1, 64),
        Shape(352, 1, 24, cluster=8, stages=3, blocks=4),
        Shape(288, 1, 32, cluster=8, stages=2, blocks=4),
        Shape(512, 1, 64, cluster=4, blocks=3),
        Shape(512, 1, 64, cluster=8, blocks=3),
    ),
    "layer": (
        Shape(8, 16, 8),
        Shape(8, 16, 16),
        Shape(8, 8, 32, blocks=16),
        Shape(16, 4, 32),
        Shape(32, 4, 24),
        Shape(32, 2, 32),
        Shape(64, 2, 24),
        Shape(64, 1, 32),
        Shape(128, 1, 24, blocks=8),
        Shape(128, 1, 32, blocks=8),
        Shape(128, 1, 40, blocks=8),
        Shape(128, 1, 56, blocks=8),
        Shape(256, 1, 32, blocks=4),
        Shape(256, 1, 48, blocks=4),
        Shape(256, 1, 56, blocks=4),
        Shape(512, 1, 32, stages=2, blocks=2, turns=2),
        Shape(1024, 1, 32, stages=2, turns=4),
        Shape(1024, 1, 32, cluster=2, stages=2),
        Shape(288, 1, 64, cluster=4, stages=2, blocks=3),
        Shape(512, 1, 32, cluster=8, stages=3, blocks=2),
        Shape(512, 1, 64, cluster=8, blocks=2),
    ),
}
"""By the norm, narrowest first: the first that is wide enough and fits in shared memory is taken."""

BACKWARD: dict[str, tuple[Shape, ...]] = {
    "rms": (
        _backward(8, 16, 8),
        _backward(8, 16, 16),
        _backward(32, 4, 8),
        _backward(64, 2, 8),
        _backward(32, 4, 24),
        _backward(32, 8, 32, stages=3),
        _backward(192, 1, 8),
        _backward(256, 1, 8, blocks=2),
        _backward(384, 1, 8),
        _backward(512, 1, 8, blocks=2),
        _backward(640, 1, 8, stages=3),
        _backward(512, 1, 16, stages=3),
        _backward(512, 1, 24),
        _backward(608, 1, 24),
        _backward(512, 1, 32),
        _backward(128, 1, 32, cluster=8, blocks=4),
        _backward(256, 1, 32, cluster=8, blocks=2),
        _backward(352, 1, 24, cluster=8, blocks=2),
        _backward(544, 1, 32, cluster=4),
        _backward(512, 1, 32, cluster=8, stages=3),
        _backward(512, 1, 32, cluster=16),
    ),
    "layer": (
        _backward(8, 16, 8),
        _backward(8, 16, 16),
        _backward(16, 8, 16, stages=3),
        _backward(32, 4, 16),
        _backward(32, 4, 24),
        _backward(32, 4, 32),
        _backward(96, 2, 16),
        _backward(128, 2, 16),
        _backward(96, 2, 32, blocks=2),
        _backward(256, 1, 16, stages=3, blocks=2),
        _backward(320, 1, 16, stages=3, blocks=2),
        _backward(384, 1, 16),
        _backward(512, 1, 16, stages=3),
        _backward(512, 1, 24),
        _backward(512, 1, 32),
        _backward(128, 1, 32, cluster=8, blocks=4),
        _backward(256, 1, 32, cluster=8, blocks=2),
        _backward(512, 1, 32, cluster=8),
        _backward(512, 1, 32, cluster=16),
    ),
}
"""The same of backward, whose blocks always stay."""


def _shifted(
    threads: int, rows: int, elements: int, cluster: int = 1, stages: int = 2, blocks: int = 1, turns: int = 0
) -> Shape:
    return Shape(threads, rows, elements, cluster, stages, blocks, turns, shifted=True)


_SHIFTED_CLUSTERS = tuple(_shifted(384, 1, 40, cluster=n) for n in (2, 4, 8, 16))

SHIFTED_FORWARD: dict[str, tuple[Shape, ...]] = {
    "rms": (
        _shifted(32, 4, 40, turns=8),
        _shifted(64, 2, 40, turns=8),
        _shifted(128, 1, 40, turns=8),
        _shifted(256, 1, 40, turns=8),
        _shifted(384, 1, 40, turns=8),
        *_SHIFTED_CLUSTERS,
    ),
    "layer": (
        _shifted(16, 4, 32, turns=32),
        _shifted(32, 4, 40),
        _shifted(64, 2, 40),
        _shifted(128, 1, 40, stages=3, blocks=3),
        _shifted(256, 1, 40, stages=3),
        _shifted(384, 1, 40),
        *_SHIFTED_CLUSTERS,
    ),
}
"""For rows that begin between two accesses. Many elements a thread: what is asked at their edges costs instructions."""

SHIFTED_BACKWARD: tuple[Shape, ...] = (
    _shifted(16, 8, 32),
    _shifted(32, 4, 32),
    _shifted(64, 2, 32),
    _shifted(96, 1, 32, blocks=4),
    _shifted(160, 1, 32, blocks=3),
    _shifted(256, 1, 32, blocks=2),
    _shifted(384, 1, 32),
    _shifted(384, 1, 32, cluster=2),
    _shifted(384, 1, 32, cluster=4),
    _shifted(384, 1, 32, cluster=8),
    _shifted(384, 1, 32, cluster=16),
)
"""The same of backward."""


def forward_shapes(plan: NormPlan) -> tuple[Shape, ...]:
    """Those of forward. Expressions need registers of their own: with them no number of blocks is promised."""
    return _sorted((*FORWARD[plan.spec.norm], *SHIFTED_FORWARD[plan.spec.norm]), plan)


def backward_shapes(plan: NormPlan) -> tuple[Shape, ...]:
    """Those of backward. Sums for two columns or more take the registers that layer norm's weight and bias take."""
    assert plan.backward is not None
    few = plan.spec.norm == "rms" and len(plan.backward.columns) < 2
    shapes = BACKWARD["rms" if few and _plain(plan) else "layer"]
    return _sorted((*shapes, *SHIFTED_BACKWARD), plan)


def _sorted(shapes: tuple[Shape, ...], plan: NormPlan) -> tuple[Shape, ...]:
    if not _plain(plan):
        shapes = tuple(replace(s, blocks=1) for s in shapes)
    return tuple(sorted(shapes, key=lambda s: s.width))


def _plain(plan: NormPlan) -> bool:
    """Whether a kernel has no more to hold than rows of 16-bit elements and a weight."""
    spec = plan.spec
    return (
        spec.input_mod is None
        and spec.output_mod is None
        and not spec.residual
        and spec.statistics == "save"
        and spec.dtypes["input"] != "fp32"
    )
