"""The data of the launcher's templates, from argument checks to reductions of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.nodes import Type
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.targets.triton.block_mask import (
    BlockMaskKernels,
    BlockMaskLauncher,
    block_mask_launcher,
)
from kgen.kernels.attention.targets.triton.choice import (
    BackwardWay,
    Ways,
    WhichKernels,
    backward_ways,
    portable_first,
    ways_of,
    workspace_lines,
)
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.gradient_sums import (
    GradientSums,
    gradient_sums,
    learned_of,
)
from kgen.kernels.attention.targets.triton.interface import Check, Operator
from kgen.kernels.attention.targets.triton.launches import (
    BackwardLaunches,
    DeltaLaunch,
    GradientLaunch,
    Launch,
    Launches,
)
from kgen.kernels.attention.targets.triton.made import BackwardBranch, InFile, Made, Needs, Planned
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.kernels.attention.targets.triton.shared import narrow_values
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
from kgen.targets.folding import Bracketed
from kgen.targets.launching import LaunchFunctions
from kgen.targets.signature import Signature
from kgen.targets.template import Template, filled
from kgen.targets.triton.text import TORCH_DTYPES


@dataclass(frozen=True)
class Launching(Template):
    """The beginning of the launcher: descriptors, and in a single-file package the functions that
    all launchers share.
    """

    template: ClassVar[str] = "attention/triton/_launch.j2"

    name: str
    launching: LaunchFunctions | None
    packed: bool
    by_tma: bool
    """True if TMA loads tiles."""
    writes_by_tma: bool

    def launch_functions(self) -> Iterable[str]:
        return ("_arch_for", "_library")


@dataclass(frozen=True)
class Aligned(Template):
    """The emitted function that aligns tensors of narrow values."""

    template: ClassVar[str] = "attention/triton/_aligned.j2"


@dataclass(frozen=True)
class ForwardLauncher(Operator, Exact, Placement, Template):
    """The forward pass, and its operators."""

    template: ClassVar[str] = "attention/triton/_forward_launcher.j2"

    name: str
    bf16: bool
    ways: Ways
    """The branches of the forward pass that the launcher tests before `launch`."""
    launch: Launch | None
    """The launch of the portable forward kernel. None if other kernels serve every call."""
    narrow_values: bool
    needs_gradient: str | None
    """The condition under which a backward pass may follow. None without a backward pass."""

    def launch_functions(self) -> Iterator[str]:
        yield "_operator"
        yield from self.allocators
        yield from self.ways.launch_functions()
        if self.launch is not None:
            yield from ("_launch", "_layouts", "_tile", *self.dividers)
        if self.needs_gradient is not None:
            yield from ("_COMPILED", "_compile_ahead", "_transformed")

    @property
    def laid_out(self) -> Bracketed:
        """The statement that computes the layouts of tensors."""
        return Bracketed("layouts = _layouts(", (*self.input_tensors, "out"), ")")

    @property
    def returned_out(self) -> Bracketed:
        """The return statement of the operator that returns out."""
        return Bracketed("return _forward(", (*self.inputs, "False"), ")[0]")

    @property
    def returned_both(self) -> Bracketed:
        """The return statement of the operator that returns out and its log-sum-exp."""
        return Bracketed("return _forward(", (*self.inputs, "True"), ")")


@dataclass(frozen=True)
class BackwardLauncher(GradientSums, Operator, Exact, Placement, Template):
    """The backward pass, and its operator."""

    template: ClassVar[str] = "attention/triton/_backward_launcher.j2"

    name: str
    bf16: bool
    branches: list[BackwardBranch]
    """The branches of the backward pass, in the order in which the launcher tests them."""
    ways: list[BackwardWay]
    """The tests and calls of these branches."""
    workspace: list[str]
    """The statements that allocate counters and sums."""
    narrow_values: bool
    widest_step: str
    outside_delta: bool
    """True if the caller may replace the delta kernel (`use_delta`)."""
    shares: BackwardBranch | None
    """The branch whose calls share sums if backward runs in parts of the keys. None without one."""
    sinks: list[str]
    delta: DeltaLaunch
    first: list[Launch]
    """The portable launches that every call makes."""
    rest: list[Launch]
    """The portable launches of calls that take no branch."""
    pairs: list[GradientLaunch]
    diagonals: list[GradientLaunch]

    def launch_functions(self) -> Iterator[str]:
        yield from ("_cdiv", "_launch", "_layouts", "_operator", "_tile", *self.allocators)
        yield from (branch.dout for branch in self.branches if branch.dout)


@dataclass(frozen=True)
class Scatter(Template):
    """The emitted function that scatters values: it adds them to elements at computed indices."""

    template: ClassVar[str] = "attention/triton/_scatter.j2"

    reads: bool
    """True if the indices read a buffer."""


@dataclass(frozen=True)
class Autograd(GradientSums, Operator, Exact, Template):
    """The registration of autograd for the forward operator."""

    template: ClassVar[str] = "attention/triton/_autograd.j2"

    name: str

    def launch_functions(self) -> Iterable[str]:
        return ("_once", "_register_autograd")


@dataclass(frozen=True)
class Docstring(Placement, Template):
    """The docstring of the spec's function: its arguments and results."""

    template: ClassVar[str] = "attention/triton/_docstring.j2"

    width_qk: int
    width_v: int
    dtype: str
    kv_shapes: str
    gqa_words: str
    argument_words: list[str]
    dead_row: str
    derivatives: Derivatives


@dataclass(frozen=True)
class Function(Exact, Placement, Template):
    """The emitted function of the spec."""

    template: ClassVar[str] = "attention/triton/_function.j2"

    name: str
    summary: str
    signature: str
    docstring: Docstring
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
    operand_shapes: str
    """The shapes of q, k and v by name, for error messages."""
    numbers: Numbers
    checks: list[Check]
    derivatives: Derivatives
    block_mask: BlockMaskLauncher | None
    default_scale: str
    needs_lse: str | None
    """Condition under which autograd may need the log-sum-exp. None without a backward pass."""
    given: list[str]
    """The arguments of the operators."""

    def launch_functions(self) -> Iterator[str]:
        yield from ("_cast", "_dense", "_real")
        yield from self.numbers.launch_functions()
        yield from self.derivatives.launch_functions()
        if self.paged or any(check.shows_dtype for check in self.checks):
            yield "_dtype"
        if self.needs_lse is not None:
            yield "_transformed"


class Launcher:
    """Build the parts of one plan's launcher."""

    def __init__(
        self, planned: Planned, made: Sequence[Made], kernels: BlockMaskKernels | None
    ) -> None:
        self.interface, self.op, self.made = planned.interface, planned.op, made
        self.plan, self.spec, self.at = planned.plan, planned.plan.spec, planned.at
        self.name, self.exact = self.spec.name, Exact(self.plan.exact)
        self.needs = Needs()
        for of in made:
            self.needs |= of.needs
        launches = [of.launches for of in made if of.launches is not None]
        self.launches = launches[0] if launches else Launches(None, None)
        branches = [of.backward for of in made if of.backward is not None]
        self.shares = self.spec.backward_in_parts and any(branch.ends for branch in branches)
        """True if calls for parts of the keys share sums of dq."""
        self.packed = ["cu_seqlens_q", "cu_seqlens_k"] if self.spec.varlen else []
        self.sinks = ["sinks"] if self.spec.sinks else []
        of_gradients = ["q", "k", "v", *learned_of(self.plan)]
        self.needs_gradient = " or ".join(
            ["_transformed()", *(f"{x}.requires_grad" for x in of_gradients)]
        )
        self.derivatives = _derivatives(self.plan, of_gradients)
        mask = self.plan.block_mask
        self.mask = (
            block_mask_launcher(mask, self.interface, kernels)
            if mask is not None and kernels is not None
            else None
        )

    @property
    def signature(self) -> Signature:
        """The parameters of the spec's function."""
        defaults = {"scale": "None", "return_lse": "False"}
        if self.mask is not None:
            defaults = {"block_mask": "None", **defaults}
        tensors = ("q", "k", "v", *self.packed)
        return Signature(tensors, tuple(self.interface.required()), tuple(defaults.items()))

    def parts(
        self, parts: Sequence[InFile], which: WhichKernels, launching: LaunchFunctions | None
    ) -> list[Template]:
        """Return all parts in the order of the file, including the parts of schedules."""
        start = Launching(
            name=self.name,
            launching=launching,
            packed=self.spec.varlen,
            by_tma=self.needs.by_tma,
            writes_by_tma=self.needs.writes_by_tma,
        )
        found: list[Template] = [start, *(part for of in parts for part in of.launcher)]
        if narrow_values(self.plan):
            found.append(Aligned())
        if self.mask is not None:
            found.append(self.mask)
        found.append(self._forward(parts))
        if self.launches.backward is not None:
            made = zip(parts, self.made, strict=True)
            branches = [
                of.backward.inside(part.prefix) for part, of in made if of.backward is not None
            ]
            found += self._backward(branches, self.launches.backward)
        return [*found, self.function(), which]

    def _forward(self, parts: Sequence[InFile]) -> ForwardLauncher:
        made = zip(parts, self.made, strict=True)
        branches = [(of.branch, part.prefix) for part, of in made if of.branch is not None]
        return filled(
            ForwardLauncher,
            self.op,
            self.exact,
            self.at,
            name=self.name,
            bf16=self.spec.dtype == "bf16",
            ways=ways_of(branches, f"_layouts({', '.join(self.op.input_tensors)}, out)"),
            launch=self.launches.forward,
            narrow_values=narrow_values(self.plan),
            needs_gradient=self.needs_gradient if self.plan.backward else None,
        )

    def _backward(
        self, branches: list[BackwardBranch], launches: BackwardLaunches
    ) -> list[Template]:
        gradients = gradient_sums(self.interface, self.op.input_tensors[3:], self.op.input_scalars)
        shares = next((branch for branch in branches if branch.ends), None) if self.shares else None
        portable = [launches.dq, launches.dkdv]
        count = portable_first(branches)
        launcher = filled(
            BackwardLauncher,
            gradients,
            self.op,
            self.exact,
            self.at,
            name=self.name,
            bf16=self.spec.dtype == "bf16",
            branches=branches,
            ways=backward_ways(branches, shares, self.op.inputs, launches.dq),
            workspace=workspace_lines(branches, shares),
            narrow_values=narrow_values(self.plan),
            widest_step=self.interface.widest_step(),
            outside_delta=self.spec.targets.cuda is not None,
            shares=shares,
            sinks=self.sinks,
            delta=launches.delta,
            first=portable[:count],
            rest=portable[count:],
            pairs=launches.pairs,
            diagonals=launches.diagonals,
        )
        scatter = [Scatter(gradients.read)] if gradients.scattered else []
        autograd = filled(Autograd, gradients, self.op, self.exact, name=self.name)
        return [launcher, *scatter, autograd]

    def _numbers(self) -> Numbers:
        own = self.interface
        names = [*self.spec.buffers, *own.runtime]
        divisors = own.divisor_lines(own.runtime)
        return numbers_of(self.name, own.runtime, self.plan.called, names, divisors)

    def docstring(self) -> Docstring:
        """Return the docstring of the spec's function."""
        spec, of_gqa = self.spec, {"any": "a multiple of", 1: "equal to"}
        return filled(
            Docstring,
            self.at,
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
        """Return the spec's function."""
        spec, own = self.spec, self.interface
        tables = ["block_table"] if spec.paged_kv is not None else []
        beside = [*self.packed, *tables, *map(own.called, spec.buffers), *self.sinks]
        of_mask = ["*block_mask[1:]"] if self.mask is not None else []
        return filled(
            Function,
            self.exact,
            self.at,
            name=self.name,
            summary=opening(spec),
            signature=str(self.signature),
            docstring=self.docstring(),
            width_qk=spec.head_dim.qk,
            width_v=spec.head_dim.v,
            torch_dtype=TORCH_DTYPES[spec.dtype],
            dense_check=dense(self.name, beside),
            operand_casts=cast_lines(
                dict.fromkeys(("q", "k", "v"), f"torch.{TORCH_DTYPES[spec.dtype]}")
            ),
            buffer_casts=own.casts(spec.buffers),
            paged=spec.paged_kv is not None,
            checked_sizes=own.checked_sizes(),
            k_shape=own.k_shape(),
            kv_shapes=own.kv_shapes(),
            operand_shapes=own.operand_shapes(),
            numbers=self._numbers(),
            checks=own.checks(),
            derivatives=self.derivatives,
            block_mask=self.mask,
            default_scale=f"{spec.head_dim.qk} ** -0.5",
            needs_lse=self.needs_gradient if self.plan.backward else None,
            given=[*self.op.passed, *of_mask, *self.op.input_scalars],
        )


def _derivatives(plan: AttentionPlan, learned: list[str]) -> Derivatives:
    """Return the derivatives of a function, with gradients for its `learned` tensors."""
    spec = plan.spec
    real = ["q", "k", "v", *(n for n, b in spec.buffers.items() if b.element is Type.FLOAT)]
    if spec.sinks:
        real.append("sinks")
    learnable = differentiable(plan.score_mod) if plan.score_mod is not None else frozenset()
    words: Mapping[str, str] = dict.fromkeys(real, NO_BACKWARD if spec.paged_kv else NOT_ASKED_FOR)
    if plan.backward:
        words = {
            n: NOT_LEARNED if n in learnable else NO_DERIVATIVE for n in real if n not in learned
        }
    return derivatives_of(real, words, derived=plan.backward, called=plan.called)
