"""The launcher of attention in Triton, from argument checks to reductions of gradients: what its templates print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.nodes import Type
from kgen.kernels.attention.lowered.model import KernelParams
from kgen.kernels.attention.lowered.ranges import lists_of
from kgen.kernels.attention.plan.decode import MOST_QUERIES
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.targets.triton.block_mask import BlockMaskLauncher, block_mask_launcher
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.gradient_sums import GradientSums, gradient_sums, learned_of
from kgen.kernels.attention.targets.triton.interface import Check, Interface
from kgen.kernels.attention.targets.triton.launches import (
    BackwardLaunches,
    DecodeLaunch,
    DeltaLaunch,
    GradientLaunch,
    Launch,
    Launches,
)
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.kernels.attention.targets.triton.portable import PortableKernels, narrow_values
from kgen.spec.common import differentiable
from kgen.targets import opening
from kgen.targets.arguments import (
    NO_BACKWARD,
    NO_DERIVATIVE,
    NOT_ASKED_FOR,
    NOT_LEARNED,
    Derivatives,
    Numbers,
    cast_lines,
    dense,
    derivatives_of,
    numbers_of,
)
from kgen.targets.launching import LaunchFunctions
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES

_TYPES = {"int": "int", "float": "float"}


@dataclass(frozen=True)
class Operator:
    """The arguments of a file's operators."""

    tensors: list[str]
    scalars: list[str]
    typed: list[str]
    """The same with types."""

    @property
    def typed_backward(self) -> list[str]:
        """The arguments of the backward operator, with types."""
        return ["dout: Tensor", "dlse: Optional[Tensor]", "out: Tensor", "lse: Tensor", *self.typed]

    @property
    def names(self) -> list[str]:
        """All arguments."""
        return [*self.tensors, *self.scalars]


@dataclass(frozen=True)
class ChipKernels:
    """Which passes have kernels for one chip, and how they are called."""

    forward: bool = False
    dq: bool = False
    backward: bool = False
    fused: bool = False
    """True where one kernel has dq, dk and dv."""
    dynamic: bool = False
    """True where programs take tiles from a counter."""
    streamed: tuple[str, ...] = ()
    """The tensors beside q, k and v that TMA has to be able to load."""
    operands: tuple[str, ...] = ()
    """The operands that the backward pass hands on."""
    beside: str = ""
    """The module that has them; empty where this file has."""

    @property
    def there(self) -> bool:
        """True where a pass has some."""
        return self.forward or self.backward


@dataclass(frozen=True)
class Launching(Template):
    """The beginning of the launcher: descriptors, and in a file that stands alone the functions of all launchers."""

    template: ClassVar[str] = "attention/triton/_launch.j2"

    name: str
    launching: LaunchFunctions | None
    packed: bool
    by_tma: bool
    """True where TMA loads tiles."""
    writes_by_tma: bool


@dataclass(frozen=True)
class DecodeLauncher(Template):
    """The launcher of the kernels for few queries."""

    template: ClassVar[str] = "attention/triton/_decode_launcher.j2"

    op: Operator
    params: KernelParams
    combine_params: KernelParams
    pages: list[str]
    balanced: bool
    exact: Exact
    width: int
    """Columns of a value."""
    kv_sizes: str


@dataclass(frozen=True)
class ChipChoice(Template):
    """When the kernels for a chip serve."""

    template: ClassVar[str] = "attention/triton/_chip.j2"

    single: bool
    """True where they are in this file."""


@dataclass(frozen=True)
class Aligned(Template):
    """The function that aligns narrow values."""

    template: ClassVar[str] = "attention/triton/_aligned.j2"


@dataclass(frozen=True)
class ForwardLauncher(Template):
    """The forward pass, and its operators."""

    template: ClassVar[str] = "attention/triton/_forward_launcher.j2"

    name: str
    op: Operator
    at: Placement
    exact: Exact
    bf16: bool
    launch: Launch | None
    """None where decoding takes every call."""
    decodes: bool
    chip: ChipKernels
    narrow_values: bool
    needs_gradient: str | None
    """When a backward pass may follow; None where there is none."""
    most_queries: int = MOST_QUERIES
    """How many queries decoding takes."""


@dataclass(frozen=True)
class BackwardLauncher(Template):
    """The backward pass, and its operator."""

    template: ClassVar[str] = "attention/triton/_backward_launcher.j2"

    name: str
    op: Operator
    at: Placement
    exact: Exact
    bf16: bool
    chip: ChipKernels
    narrow_values: bool
    widest_step: str
    outside_delta: bool
    """True where a user may bring a kernel of delta."""
    shares: bool
    """True where calls with some of the keys share what they have in common."""
    sinks: list[str]
    delta: DeltaLaunch
    dq: Launch
    dkdv: Launch
    pairs: list[GradientLaunch]
    diagonals: list[GradientLaunch]
    gradients: GradientSums


@dataclass(frozen=True)
class Scatter(Template):
    """The function that adds values to elements by their indices."""

    template: ClassVar[str] = "attention/triton/_scatter.j2"

    reads: bool
    """True where indices read a buffer."""


@dataclass(frozen=True)
class Autograd(Template):
    """How the operator of forward is derived."""

    template: ClassVar[str] = "attention/triton/_autograd.j2"

    name: str
    op: Operator
    exact: Exact
    gradients: GradientSums


@dataclass(frozen=True)
class Docstring(Template):
    """The function's docstring on arguments and results."""

    template: ClassVar[str] = "attention/triton/_docstring.j2"

    at: Placement
    width_qk: int
    width_v: int
    dtype: str
    kv_shapes: str
    gqa_words: str
    argument_words: list[str]
    dead_row: str
    derivatives: Derivatives


@dataclass(frozen=True)
class Function(Template):
    """The spec's function."""

    template: ClassVar[str] = "attention/triton/_function.j2"

    name: str
    summary: str
    signature: str
    docstring: Docstring
    at: Placement
    exact: Exact
    width_qk: int
    width_v: int
    torch_dtype: str
    dense_check: str
    operand_casts: list[str]
    buffer_casts: list[str]
    paged: bool
    checked_sizes: str
    k_shape: str
    kv_shapes: str
    numbers: Numbers
    checks: list[Check]
    derivatives: Derivatives
    block_mask: BlockMaskLauncher | None
    default_scale: str
    needs_lse: str | None
    """When the log-sum-exp is wanted though the caller does not ask for it."""
    given: list[str]
    """The arguments of the operators."""


@dataclass(frozen=True)
class WhichKernels(Template):
    """The function that says which kernels a call takes."""

    template: ClassVar[str] = "attention/triton/_which_kernels.j2"

    name: str
    asked: list[str]
    """The tensors on which it depends."""
    by_name: str
    """The same with their names, as TMA has them."""
    passes: list[tuple[str, str]]
    decodes: bool
    hopper: bool


class Launcher:
    """Makes the parts of one plan's launcher."""

    def __init__(
        self, interface: Interface, at: Placement, kernels: PortableKernels, launches: Launches, shares: bool
    ) -> None:
        self.interface, self.plan, self.spec = interface, interface.plan, interface.spec
        self.at, self.kernels, self.launches, self.shares = at, kernels, launches, shares
        self.name, self.exact = self.spec.name, Exact(self.plan.exact)
        self.packed = ["cu_seqlens_q", "cu_seqlens_k"] if self.spec.varlen else []
        self.tables = ["block_table"] if self.spec.paged_kv is not None else []
        self.sinks = ["sinks"] if self.spec.sinks else []
        sides = ("kv", "q") if self.plan.backward else ("kv",)
        listed = sides if self.plan.block_mask is not None else ()
        self.lists = [name for side in listed for name in lists_of(side)]
        self.passed = ["q", "k", "v", *self.packed, *self.tables, *self.spec.buffers, *self.sinks]
        self.op = self._operator()
        of_gradients = ["q", "k", "v", *learned_of(self.plan)]
        self.needs = " or ".join(["_transformed()", *(f"{x}.requires_grad" for x in of_gradients)])
        self.derivatives = _derivatives(self.plan, of_gradients)
        self.mask = (
            block_mask_launcher(self.plan.block_mask, interface, kernels.block_mask)
            if self.plan.block_mask is not None and kernels.block_mask is not None
            else None
        )

    def _operator(self) -> Operator:
        runtime = self.interface.runtime
        typed = [f"{name}: Tensor" for name in (*self.passed, *self.lists)] + ["scale: float"]
        typed += [f"{name}: {_TYPES[p.type]}" for name, p in runtime.items()]
        return Operator([*self.passed, *self.lists], ["scale", *runtime], typed)

    @property
    def signature(self) -> str:
        """The parameters of the spec's function."""
        mask = ["block_mask=None"] if self.mask is not None else []
        keywords = [*self.interface.required(), *mask, "scale=None", "return_lse=False"]
        return ", ".join(["q", "k", "v", *self.packed, "*", *keywords])

    def parts(
        self, chip: ChipKernels, which: WhichKernels, launching: LaunchFunctions | None
    ) -> list[Template]:
        """All parts, in the order of a file."""
        found: list[Template] = [
            Launching(
                name=self.name,
                launching=launching,
                packed=self.spec.varlen,
                by_tma=self.kernels.many_queries,
                writes_by_tma=chip.there,
            )
        ]
        if self.launches.decode is not None:
            found.append(self._decode(self.launches.decode))
        if chip.there:
            found.append(ChipChoice(single=not chip.beside))
        if narrow_values(self.plan):
            found.append(Aligned())
        if self.mask is not None:
            found.append(self.mask)
        found.append(self._forward(chip))
        if self.launches.backward is not None:
            found += self._backward(chip, self.launches.backward)
        return [*found, self.function(), which]

    def _decode(self, of: DecodeLaunch) -> DecodeLauncher:
        return DecodeLauncher(
            op=self.op,
            params=of.params,
            combine_params=of.combine_params,
            pages=of.pages,
            balanced=of.balanced,
            exact=self.exact,
            width=self.spec.head_dim.v,
            kv_sizes=self.interface.kv_sizes(),
        )

    def _forward(self, chip: ChipKernels) -> ForwardLauncher:
        return ForwardLauncher(
            name=self.name,
            op=self.op,
            at=self.at,
            exact=self.exact,
            bf16=self.spec.dtype == "bf16",
            launch=self.launches.forward if self.kernels.many_queries else None,
            decodes=self.kernels.decode is not None,
            chip=chip,
            narrow_values=narrow_values(self.plan),
            needs_gradient=self.needs if self.plan.backward else None,
        )

    def _backward(self, chip: ChipKernels, launches: BackwardLaunches) -> list[Template]:
        others = [*self.passed[3:], *self.lists]
        gradients = gradient_sums(self.interface, others, self.op.scalars)
        launcher = BackwardLauncher(
            name=self.name,
            op=self.op,
            at=self.at,
            exact=self.exact,
            bf16=self.spec.dtype == "bf16",
            chip=chip,
            narrow_values=narrow_values(self.plan),
            widest_step=self.interface.widest_step(),
            outside_delta=self.spec.targets.cuda is not None,
            shares=self.shares,
            sinks=self.sinks,
            delta=launches.delta,
            dq=launches.dq,
            dkdv=launches.dkdv,
            pairs=launches.pairs,
            diagonals=launches.diagonals,
            gradients=gradients,
        )
        scatter = [Scatter(gradients.read)] if gradients.scattered else []
        return [launcher, *scatter, Autograd(self.name, self.op, self.exact, gradients)]

    def _numbers(self) -> Numbers:
        own = self.interface
        names = [*self.spec.buffers, *own.runtime]
        divisors = own.divisor_lines(own.runtime)
        return numbers_of(self.name, own.runtime, self.plan.called, names, divisors)

    def docstring(self) -> Docstring:
        """The function's docstring on arguments and results."""
        spec, of_gqa = self.spec, {"any": "a multiple of", 1: "equal to"}
        return Docstring(
            at=self.at,
            width_qk=spec.head_dim.qk,
            width_v=spec.head_dim.v,
            dtype=spec.dtype,
            kv_shapes=self.interface.kv_shapes(),
            gqa_words=of_gqa.get(spec.gqa, f"{spec.gqa} times"),
            argument_words=self.interface.all_argument_words(),
            dead_row="zeros and its sink" if spec.sinks else "zeros and -inf",
            derivatives=self.derivatives,
        )

    def function(self) -> Function:
        """The spec's function."""
        spec, own = self.spec, self.interface
        beside = [*self.packed, *self.tables, *map(own.called, spec.buffers), *self.sinks]
        of_mask = ["*block_mask[1:]"] if self.mask is not None else []
        return Function(
            name=self.name,
            summary=opening(spec),
            signature=self.signature,
            docstring=self.docstring(),
            at=self.at,
            exact=self.exact,
            width_qk=spec.head_dim.qk,
            width_v=spec.head_dim.v,
            torch_dtype=TORCH_DTYPES[spec.dtype],
            dense_check=dense(self.name, beside),
            operand_casts=cast_lines(dict.fromkeys(("q", "k", "v"), f"torch.{TORCH_DTYPES[spec.dtype]}")),
            buffer_casts=own.casts(spec.buffers),
            paged=spec.paged_kv is not None,
            checked_sizes=own.checked_sizes(),
            k_shape=own.k_shape(),
            kv_shapes=own.kv_shapes(),
            numbers=self._numbers(),
            checks=own.checks(),
            derivatives=self.derivatives,
            block_mask=self.mask,
            default_scale=f"{spec.head_dim.qk} ** -0.5",
            needs_lse=f"(torch.is_grad_enabled() and ({self.needs}))" if self.plan.backward else None,
            given=[*self.passed, *of_mask, *self.op.scalars],
        )


def _derivatives(plan: AttentionPlan, learned: list[str]) -> Derivatives:
    """The derivatives of a function of which `learned` tensors have a gradient."""
    spec = plan.spec
    real = ["q", "k", "v", *(n for n, b in spec.buffers.items() if b.element is Type.FLOAT)]
    if spec.sinks:
        real.append("sinks")
    learnable = differentiable(plan.score_mod) if plan.score_mod is not None else frozenset()
    words: Mapping[str, str] = dict.fromkeys(real, NO_BACKWARD if spec.paged_kv else NOT_ASKED_FOR)
    if plan.backward:
        words = {n: NOT_LEARNED if n in learnable else NO_DERIVATIVE for n in real if n not in learned}
    return derivatives_of(real, words, derived=plan.backward, called=plan.called)
