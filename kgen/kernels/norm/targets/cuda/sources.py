"""The CUDA target of norms: `cuda.cu` with the kernels, `cuda.py` with the operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.functions import in_order
from kgen.kernels.norm.plan.planning import plan_norm
from kgen.kernels.norm.targets.cuda.backward import Backward, BackwardKernel, backward_of
from kgen.kernels.norm.targets.cuda.forward import Forward, ForwardKernel, forward_of
from kgen.kernels.norm.targets.cuda.host import Host, host_of
from kgen.kernels.norm.targets.cuda.launcher import module_of, passes_words
from kgen.kernels.norm.targets.cuda.names import FUNCTIONS
from kgen.kernels.norm.targets.cuda.spelled import Constant, Spelled
from kgen.kernels.norm.targets.formula import formula
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.code import CUDA
from kgen.targets.cuda.elements import Elements, used
from kgen.targets.cuda.loader import Loader
from kgen.targets.template import Template


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
    """True where a row stores single numbers in the dtype of a tensor."""
    constants: tuple[Constant, ...]
    helpers: tuple[str, ...]
    per_row: bool
    """True where rows have scales."""
    moments: bool
    """True where parts of a row have means of their own."""
    forward: ForwardKernel
    backward: BackwardKernel | None
    host: Host


def sources(loaded: Loaded) -> list[Source]:
    """Both files."""
    spelled = Spelled(plan_norm(loaded))
    forward, backward = forward_of(spelled), backward_of(spelled)
    loader = Loader(loaded.spec.name, 8, 9 if loaded.spec.quantize else 0, dynamic_shared=True)
    module = module_of(spelled, loader, forward, backward)
    return [
        Source("cuda.cu", _file(spelled, loader, forward, backward), comment="//", reserved=FUNCTIONS),
        Source(
            "cuda.py",
            module,
            rank=2,
            needs="cuda.core",
            signature=module.function.signature,
            docstring=module.function.docstring,
        ),
    ]


def _file(spelled: Spelled, loader: Loader, forward: Forward, backward: Backward | None) -> File:
    plan, spec = spelled.plan, spelled.spec
    least = 10 * loader.major + loader.minor
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
        per_row=bool(spec.quantize and spec.quantize.scale == "per_row"),
        moments=plan.layer,
        forward=forward.kernel,
        backward=backward.kernel if backward else None,
        host=host_of(spelled, least, forward, backward),
    )


def _elements(spelled: Spelled) -> Elements:
    """The element types of all tensors; sums over rows are stored in parts of float32."""
    plan = spelled.plan
    dtypes = {o.dtype for o in plan.operands} | set(spelled.spec.dtypes.values())
    sums = plan.backward is not None and bool(plan.backward.columns)
    return used(dtypes, rounds=True, rounded=spelled.rounds, stores_fp32="fp32" in dtypes or sums)
