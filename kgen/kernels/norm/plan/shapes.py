"""Launch shapes of norms in CUDA: how threads share rows, by the widest row of a shape.

Timed on an H200 in bf16 (docs/performance/norm_cuda.md). Narrow rows are fastest with many small
blocks that each load their own row. Wider rows need many elements per thread, and the widest
several blocks per row (a cluster).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kgen.kernels.norm.plan.planning import NormPlan, Operand
from kgen.kernels.norm.spec import MAX_WIDTH
from kgen.sizes import ELEMENT_SIZE, SHARED_LIMITS

NARROW = 4096
"""The widest row for which 128 threads read rows of any width from memory; wider rows have 1024."""


# `cuda.cu` and `cuda.py` print the same rows: a `.cu` file must stand alone, and Python cannot
# parse C++. Kernels take the numbers of a row as template arguments, not its index, so that a
# profile is readable.
@dataclass(frozen=True)
class Shape:
    """How threads share rows.

    | field | meaning |
    |---|---|
    | `threads` | threads of a block that share a row |
    | `rows` | rows that a block holds |
    | `elements` | elements of a row that a thread owns; 0 for any number |
    | `cluster` | blocks that share a row |
    | `stages` | stages of the ring in shared memory; with 0, rows are in registers |
    | `blocks` | the least number of blocks that fit on a multiprocessor |
    | `turns` | most sets of `rows` rows of a persistent block, approximately; 0 for no limit |
    | `single` | True for rows that are not whole accesses: threads own single elements |
    | `shared` | bytes of shared memory of the ring |

    With `turns`, blocks of different speed balance their load, and a block loads columns once for
    all its rows.
    """

    threads: int
    rows: int
    elements: int
    cluster: int = 1
    stages: int = 1
    blocks: int = 1
    turns: int = 0
    single: bool = False
    shared: int = 0

    @property
    def width(self) -> int:
        """The elements of the widest row."""
        if self.elements == 0:
            return NARROW if self.threads < 1024 else MAX_WIDTH
        return self.threads * self.elements * self.cluster


@dataclass(frozen=True)
class Bytes:
    """Bytes of one element in all loaded tensors, and in all stored tensors."""

    loaded: int
    stored: int

    @classmethod
    def of(cls, loads: Iterable[Operand], stored: Iterable[str]) -> Bytes:
        """Sum the sizes of the loads that vary along a row, and of the stored dtypes."""
        loaded = sum(ELEMENT_SIZE[o.dtype] for o in loads if o.along == "element")
        return cls(loaded, sum(ELEMENT_SIZE[dtype] for dtype in stored))

    def shared(self, shape: Shape) -> int:
        """Return the bytes of shared memory of a shape.

        With single elements, outputs pass through shared memory too. Each row then needs 16 more
        elements, because its first and last 16 bytes may be shared with other rows.
        """
        elements, stages = shape.threads * shape.elements, shape.stages * self.loaded
        if shape.single and stages:
            return shape.rows * (elements + 16) * (stages + self.stored)
        return shape.rows * elements * stages


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
        Shape(64, 2, 16, stages=0),
        Shape(96, 2, 16),
        Shape(128, 1, 16, stages=0),
        Shape(96, 1, 32, blocks=10),
        Shape(256, 1, 16, stages=0),
        Shape(160, 1, 32, stages=0),
        Shape(224, 1, 32, blocks=4),
        Shape(512, 1, 16, blocks=4),
        Shape(512, 1, 24, blocks=3),
        Shape(512, 1, 32, blocks=3),
        Shape(384, 1, 64),
        Shape(512, 1, 64, blocks=2),
        Shape(1024, 1, 64),
        Shape(288, 1, 32, cluster=8, stages=2, blocks=4),
        Shape(256, 1, 64, cluster=8, stages=2, blocks=3),
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
        Shape(256, 1, 32, cluster=8, stages=2, blocks=4),
        Shape(288, 1, 32, cluster=8, stages=2, blocks=3),
        Shape(512, 1, 64, cluster=4, blocks=2),
        Shape(512, 1, 64, cluster=8, blocks=2),
    ),
}
"""Shapes by norm, narrowest first. The launcher takes the first that is wide enough and fits into
shared memory.
"""

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
"""Shapes of backward by norm. Its blocks are always persistent."""


def _single(
    threads: int,
    rows: int,
    elements: int,
    cluster: int = 1,
    stages: int = 2,
    blocks: int = 1,
    turns: int = 0,
) -> Shape:
    return Shape(threads, rows, elements, cluster, stages, blocks, turns, single=True)


SINGLE_FORWARD: dict[str, tuple[Shape, ...]] = {
    "rms": (
        _single(8, 16, 8, turns=2),
        _single(8, 16, 16, turns=2),
        _single(16, 8, 17, blocks=9, turns=2),
        _single(32, 4, 16, turns=4),
        _single(64, 2, 12, turns=4),
        _single(64, 2, 16, blocks=9, turns=4),
        _single(128, 1, 12, turns=4),
        _single(128, 1, 16, blocks=9, turns=4),
        _single(256, 1, 12, turns=4),
        _single(256, 1, 16, blocks=5, turns=4),
        _single(512, 1, 12, turns=4),
        _single(512, 1, 16, blocks=2, turns=4),
        _single(1024, 1, 12, turns=4),
        _single(1024, 1, 16, turns=4),
        *(_single(256, 1, 32, cluster, blocks=3) for cluster in (4, 8)),
        *(_single(512, 1, 32, cluster) for cluster in (8, 16)),
    ),
    "layer": (
        _single(8, 16, 8, turns=8),
        _single(8, 16, 16, turns=8),
        _single(16, 8, 17, blocks=8, turns=8),
        _single(16, 8, 32, turns=4),
        _single(32, 4, 24, turns=4),
        _single(32, 2, 32, turns=4),
        _single(64, 2, 24),
        _single(64, 2, 32),
        _single(128, 1, 24),
        _single(128, 1, 32),
        _single(192, 1, 32),
        _single(256, 1, 32),
        _single(384, 1, 32),
        _single(512, 1, 32),
        *(_single(256, 1, 32, cluster) for cluster in (4, 8)),
        *(_single(512, 1, 32, cluster) for cluster in (8, 16)),
    ),
}
"""Shapes for rows that are not whole accesses. The cost per row is high, so a thread owns many
elements.
"""

_SINGLE_BACKWARD = (
    _single(8, 16, 8),
    _single(8, 16, 16),
    _single(16, 32, 17, stages=3),
    _single(32, 4, 16),
    _single(32, 4, 24, stages=3),
    _single(32, 4, 32, stages=3, blocks=3),
    _single(64, 2, 24, stages=3),
    _single(64, 2, 32, stages=3, blocks=3),
    _single(128, 1, 24, stages=3),
    _single(128, 1, 32, stages=3, blocks=3),
    _single(192, 1, 32, stages=3),
    _single(256, 1, 32),
    _single(384, 1, 24),
)
SINGLE_BACKWARD: dict[str, tuple[Shape, ...]] = {
    "rms": (
        *_SINGLE_BACKWARD,
        *(_single(256, 1, 16, cluster, 3, 3) for cluster in (4, 8, 16)),
        _single(384, 1, 32, 16),
    ),
    "layer": (
        *_SINGLE_BACKWARD,
        *(_single(512, 1, 16, cluster, 3) for cluster in (2, 4, 8, 16)),
        _single(384, 1, 32, 16),
    ),
}
"""Shapes of backward for rows that are not whole accesses."""

OWN = 8192
"""The most bytes of static shared memory of a kernel."""

ANY = tuple(
    Shape(threads, 1, 0, stages=0, single=single)
    for threads in (128, 1024)
    for single in (False, True)
)
"""Shapes for all other rows: each pass over a row reads it from memory or a cache."""


def forward_shapes(plan: NormPlan) -> tuple[Shape, ...]:
    """Return the shapes of forward.

    With expressions, `blocks` is 1, because they need more registers.
    """
    spec = plan.spec
    stored = [spec.dtypes["output"], *([spec.dtypes["residual"]] if plan.stores_h else [])]
    shapes = (*FORWARD[spec.norm], *SINGLE_FORWARD[spec.norm])
    return _sorted(shapes, plan, Bytes.of(plan.forward.loads, stored))


def backward_shapes(plan: NormPlan) -> tuple[Shape, ...]:
    """Return the shapes of backward.

    With two sums of columns, RMS norm needs the registers of layer norm.
    """
    assert plan.backward is not None
    few = plan.spec.norm == "rms" and len(plan.backward.columns) < 2
    norm = "rms" if few and _plain(plan) else "layer"
    loads = (*plan.upstream, *plan.backward.loads)
    bytes_ = Bytes.of(loads, [g.dtype for g in plan.backward.elements])
    return _sorted((*BACKWARD[norm], *SINGLE_BACKWARD[norm]), plan, bytes_)


def _sorted(shapes: tuple[Shape, ...], plan: NormPlan, bytes_: Bytes) -> tuple[Shape, ...]:
    if not _plain(plan):
        shapes = tuple(replace(s, blocks=1, stages=max(s.stages, 1)) for s in shapes)
    shapes = tuple(replace(s, shared=bytes_.shared(s)) for s in shapes)
    # Keep one more shape than is needed, for chips that cannot run the shape before it.
    found = _needed(sorted(shapes, key=lambda s: s.width), plan, 2)
    return (*found, *([] if _fit_everywhere(found, plan) else _needed(ANY, plan, 1)))


def _fit_everywhere(shapes: Sequence[Shape], plan: NormPlan) -> bool:
    """True if every chip can run a shape of either kind for the widest row of the spec."""
    widths = plan.spec.width
    if widths == "any":
        return False
    most = widths if isinstance(widths, int) else max(widths)
    return {s.single for s in shapes if s.width >= most and _fits(s)} == {False, True}


def _fits(shape: Shape) -> bool:
    """True if every chip can run a shape."""
    return shape.cluster == 1 and shape.shared <= min(SHARED_LIMITS.values()) - OWN


def _needed(shapes: Sequence[Shape], plan: NormPlan, last: int) -> list[Shape]:
    """Return the shapes for the widths of the spec, with the `last` narrowest shapes that hold the
    widest row.
    """
    if plan.spec.width == "any":
        return [*shapes]
    widths = [plan.spec.width] if isinstance(plan.spec.width, int) else plan.spec.width
    least, most = min(widths), max(widths)
    wide = [
        [s for s in shapes if s.single == single and s.width >= most] for single in (False, True)
    ]
    wide = [
        [s for s in shapes if s.single == single and s.width >= most] for single in (False, True)
    ]
    enough = [s for kind in wide for s in kind[: 1 if any(map(_fits, kind[:1])) else last]]
    return [s for s in shapes if least <= s.width < most or s in enough]


def _plain(plan: NormPlan) -> bool:
    """Return True if a kernel holds only rows of 16-bit elements and a weight."""
    spec = plan.spec
    return (
        spec.input_mod is None
        and spec.output_mod is None
        and not spec.residual
        and spec.statistics == "save"
        and spec.dtypes["input"] != "fp32"
    )
