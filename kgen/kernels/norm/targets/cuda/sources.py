"""The CUDA target of norms: `cuda.cu` with the kernels, `cuda.py` with the operators, and
`cuda_launch.cu` with functions for C and C++.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.functions import in_order
from kgen.kernels.norm.plan.planning import plan_norm
from kgen.kernels.norm.targets.arguments import norm_signature
from kgen.kernels.norm.targets.cuda.backward import Backward, BackwardKernel, backward_of
from kgen.kernels.norm.targets.cuda.c_launcher import c_launcher_of
from kgen.kernels.norm.targets.cuda.forward import Forward, ForwardKernel, forward_of
from kgen.kernels.norm.targets.cuda.launcher import module_of, passes_words
from kgen.kernels.norm.targets.cuda.names import FUNCTIONS
from kgen.kernels.norm.targets.cuda.spelled import Constant, Spelled
from kgen.kernels.norm.targets.formula import formula
from kgen.sizes import ELEMENT_SIZE
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.code import CUDA
from kgen.targets.cuda.elements import Elements, used
from kgen.targets.cuda.loader import Loader
from kgen.targets.template import Template

STAYING = 256
"""Values of a row that blocks of a cluster read where they are:
docs/decisions/0020-norm-rows.md.
"""


@dataclass(frozen=True)
class WholeSlots(Template):
    """The slots of the ring, if all accesses have 16 bytes."""

    template: ClassVar[str] = "norm/cuda/_whole_slots.j2"


@dataclass(frozen=True)
class SlotsInChunks(Template):
    """The slots of the ring for accesses of any size."""

    template: ClassVar[str] = "norm/cuda/_slots_in_chunks.j2"


@dataclass(frozen=True)
class Clusters(Template):
    """Barriers and shared memory of clusters."""

    template: ClassVar[str] = "norm/cuda/_clusters.j2"
    language: ClassVar[str] = CUDA

    sends: bool
    """True if blocks of a cluster send parts of sums to each other."""


@dataclass(frozen=True)
class OwnParts(Template):
    """The exchange of parts of sums without clusters."""

    template: ClassVar[str] = "norm/cuda/_own_parts.j2"


@dataclass(frozen=True)
class StayingParts(Template):
    """The exchange of parts of sums that stay in the block that computed them."""

    template: ClassVar[str] = "norm/cuda/_staying_parts.j2"


@dataclass(frozen=True)
class SentParts(Template):
    """The exchange of parts of sums that may be sent to other blocks."""

    template: ClassVar[str] = "norm/cuda/_sent_parts.j2"


@dataclass(frozen=True)
class File(Template):
    """`cuda.cu`."""

    template: ClassVar[str] = "norm/cuda/norm.cu.j2"
    language: ClassVar[str] = CUDA

    name: str
    summary: str
    formula: tuple[str, ...]
    heads_words: tuple[str, ...]
    passes_words: tuple[str, ...]
    least_capability: int
    elements: Elements
    row_gradients: bool
    """True if a row stores single values in the dtype of a tensor."""
    constants: tuple[Constant, ...]
    helpers: tuple[str, ...]
    slots: WholeSlots | SlotsInChunks
    clusters: Clusters | None
    exchange: OwnParts | StayingParts | SentParts
    warps_before: str | None
    """The number of warps of a row in the cluster's blocks before this one."""
    per_row: bool
    """True if rows have scales."""
    moments: bool
    """True if each part of a row has its own mean."""
    forward: ForwardKernel
    backward: BackwardKernel | None


def sources(loaded: Loaded) -> list[Source]:
    """Return `cuda.cu`, `cuda_launch.cu` and `cuda.py`."""
    spelled = Spelled(plan_norm(loaded))
    forward, backward = forward_of(spelled), backward_of(spelled)
    loader = Loader(loaded.spec.name, 8, 9 if loaded.spec.quantize else 0, dynamic_shared=True)
    module = module_of(spelled, loader, forward, backward)
    least = 10 * loader.major + loader.minor
    launcher = c_launcher_of(spelled, least, forward, backward)
    return [
        Source("cuda.cu", _file(spelled, least, forward, backward), comment="//"),
        Source("cuda_launch.cu", launcher, comment="//", reserved=FUNCTIONS),
        Source(
            "cuda.py",
            module,
            rank=2,
            needs="cuda.core",
            launches=True,
            signature=norm_signature(spelled.plan),
            docstring=module.function.docstring,
        ),
    ]


def _file(spelled: Spelled, least: int, forward: Forward, backward: Backward | None) -> File:
    plan, spec = spelled.plan, spelled.spec
    loads = (*forward.loads, *(backward.loads if backward else ()))
    whole = all(ELEMENT_SIZE[o.dtype] * spelled.vector == 16 for o in loads if o.along == "element")
    sends = _sends(spelled)
    return File(
        name=spec.name,
        summary=opening(spec, in_comment=True),
        formula=tuple(formula(plan)),
        heads_words=("rows of different heads one after the other",) if spec.heads else (),
        passes_words=passes_words(plan),
        least_capability=least,
        elements=_elements(spelled),
        row_gradients=bool(plan.backward and plan.backward.rows),
        constants=spelled.constants,
        helpers=tuple(in_order(spelled.printer.helpers)),
        slots=WholeSlots() if whole else SlotsInChunks(),
        clusters=Clusters(sends) if spelled.clusters else None,
        exchange=_exchange(spelled.clusters, sends),
        warps_before="cluster_rank() * Sums::WARPS" if spelled.clusters else None,
        per_row=bool(spec.quantize and spec.quantize.scale == "per_row"),
        moments=plan.layer,
        forward=forward.kernel,
        backward=backward.kernel if backward else None,
    )


def _exchange(clusters: bool, sends: bool) -> OwnParts | StayingParts | SentParts:
    if not clusters:
        return OwnParts()
    return SentParts() if sends else StayingParts()


def _sends(spelled: Spelled) -> bool:
    """True if a cluster exchanges more values for a row than its warps can read from other blocks
    in time.
    """
    plan = spelled.plan
    statistics = 2 if plan.layer else 1
    shapes = [(s, statistics) for s in spelled.forward_shapes]
    if plan.backward:
        sums = max(
            len(plan.backward.means), len(plan.backward.rows), 1 if plan.saves else statistics
        )
        shapes += [(s, sums) for s in spelled.backward_shapes]
    return any(
        s.cluster > 1 and values * s.cluster * -(-s.threads // 32) > STAYING for s, values in shapes
    )


def _elements(spelled: Spelled) -> Elements:
    """Return the element types of all tensors. Partial sums over rows are float32."""
    plan = spelled.plan
    dtypes = {o.dtype for o in plan.operands} | set(spelled.spec.dtypes.values())
    sums = plan.backward is not None and bool(plan.backward.columns)
    return used(dtypes, rounds=True, rounded=spelled.rounds, stores_fp32="fp32" in dtypes or sums)
