"""The data of the launcher's templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kgen.expr.nodes import Type
from kgen.kernels.attention.lowered.row_max import RowResults, row_results_of
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.targets.triton.block_mask import (
    BlockMaskKernels,
    block_mask_launcher,
)
from kgen.kernels.attention.targets.triton.choice import (
    Ways,
    WhichKernels,
    backward_ways,
    portable_first,
    ways_of,
    workspace_lines,
)
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.gradient_sums import (
    gradient_sums,
    learned_of,
)
from kgen.kernels.attention.targets.triton.launcher_templates import (
    Aligned,
    Autograd,
    BackwardLauncher,
    BlockMaskArgument,
    BlockTableChecks,
    Descriptors,
    Docstring,
    ForwardLauncher,
    Function,
    Launching,
    PackedDescriptors,
    PortableForward,
    RowMax,
    Scatter,
    SharedLauncher,
    UseDelta,
)
from kgen.kernels.attention.targets.triton.launches import (
    BackwardLaunches,
    DeltaLaunch,
    Launches,
    OutsideDelta,
    OwnDelta,
    counters_zeroed,
)
from kgen.kernels.attention.targets.triton.made import BackwardBranch, InFile, Made, Needs, Planned
from kgen.kernels.attention.targets.triton.shared import aligned, narrow_values
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
from kgen.targets.signature import Signature
from kgen.targets.template import Template, filled
from kgen.targets.triton.text import TORCH_DTYPES


class Launcher:
    """Build the parts of one plan's launcher."""

    def __init__(
        self, planned: Planned, made: Sequence[Made], kernels: BlockMaskKernels | None
    ) -> None:
        self.interface, self.op, self.made = planned.interface, planned.op, made
        self.plan, self.spec, self.at = planned.plan, planned.plan.spec, planned.at
        self.name, self.exact = self.spec.name, Exact(self.plan.exact)
        self.rows = RowResults(row_results_of(self.spec))
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
        defaults |= {row.argument: "False" for row in self.rows.row_results}
        tensors = ("q", "k", "v", *self.packed)
        return Signature(tensors, tuple(self.interface.required()), tuple(defaults.items()))

    def parts(
        self, parts: Sequence[InFile], which: WhichKernels, launching: LaunchFunctions | None
    ) -> list[Template]:
        """Return all parts in the order of the file, including the parts of schedules."""
        start = Launching(
            name=self.name,
            launching=launching,
            descriptors=self._descriptors(),
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

    def _descriptors(self) -> Descriptors | PackedDescriptors | None:
        if not self.needs.by_tma:
            return None
        if not self.spec.varlen:
            return Descriptors()
        writes = " and writes nothing" if self.needs.writes_by_tma else ""
        return PackedDescriptors(f"reads zeros{writes}")

    def _forward(self, parts: Sequence[InFile]) -> ForwardLauncher:
        made = zip(parts, self.made, strict=True)
        branches = [(of.branch, part.prefix) for part, of in made if of.branch is not None]
        ways = ways_of(branches, f"_layouts({', '.join(self.op.input_tensors)}, out)")
        own = filled(
            RowMax,
            self.op,
            self.exact,
            self.at,
            name=self.name,
            needs_gradient=self.needs_gradient if self.plan.backward else None,
        )
        return filled(
            ForwardLauncher,
            self.op,
            self.exact,
            self.rows,
            self.at,
            name=self.name,
            bf16=self.spec.dtype == "bf16",
            ways=ways,
            portable=self._portable_forward(ways),
            needs_gradient=own.needs_gradient,
            row_max=[own] if self.spec.row_max else [],
        )

    def _portable_forward(self, ways: Ways) -> PortableForward | None:
        launch = self.launches.forward
        if launch is None:
            return None
        return filled(
            PortableForward,
            launch,
            self.op,
            self.exact,
            self.rows,
            self.at,
            aligned=aligned(self.plan, "v"),
            ways=ways.laid_out,
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
            aligned=aligned(self.plan, "v", "dout"),
            widest_step=self.interface.widest_step(),
            shares=shares,
            delta=self._delta(launches, shares),
            first=portable[:count],
            otherwise=[portable[count:]] if branches else [],
            of_buffers=launches.of_buffers,
        )
        scatter = [Scatter(gradients.read)] if gradients.scattered else []
        autograd = filled(Autograd, gradients, self.op, self.exact, self.rows, name=self.name)
        ahead = self._ahead_of_backward(branches, shares, launches.delta)
        return [*ahead, launcher, *scatter, autograd]

    def _delta(
        self, launches: BackwardLaunches, shares: BackwardBranch | None
    ) -> DeltaLaunch | OwnDelta | OutsideDelta:
        """Return the computation of delta. A CUDA target may replace its kernel."""
        if self.spec.targets.cuda is not None:
            zeroed = counters_zeroed() if launches.counts else []
            return OutsideDelta(self.name, zeroed, launches.delta)
        return launches.delta if shares is None else OwnDelta(launches.delta)

    def _ahead_of_backward(
        self, branches: list[BackwardBranch], shares: BackwardBranch | None, delta: DeltaLaunch
    ) -> Iterator[Template]:
        """Yield the functions before the backward pass."""
        if self.spec.targets.cuda is not None:
            yield UseDelta(self.name)
        if shares is not None:
            yield SharedLauncher(
                name=self.name,
                branches=branches,
                shares=shares,
                sinks=self.sinks,
                sizes_of_q=self.at.sizes_of_q,
                aligned=aligned(self.plan, "dout"),
                launch=delta,
            )

    def _numbers(self) -> Numbers:
        own = self.interface
        names = [*self.spec.buffers, *own.runtime]
        divisors = own.divisor_lines(own.runtime)
        return numbers_of(self.name, own.runtime, self.plan.called, names, divisors)

    def docstring(self) -> Docstring:
        """Return the docstring of the spec's function."""
        spec = self.spec
        return filled(
            Docstring,
            self.rows,
            self.at,
            width_qk=spec.head_dim.qk,
            width_v=spec.head_dim.v,
            dtype=spec.dtype,
            kv_shapes=self.interface.kv_shapes(),
            gqa_words=self.interface.gqa_words(),
            last_stride=self.interface.widest_step(),
            argument_words=self.interface.all_argument_words(),
            dead_row="zeros and its sink; exp(sink) is a term of the sum"
            if spec.sinks
            else "zeros and -inf",
            derivatives=self.derivatives,
        )

    def _block_mask(self) -> BlockMaskArgument | None:
        mask = self.mask
        return None if mask is None else BlockMaskArgument(self.name, mask.list_sizes, mask.given)

    def function(self) -> Function:
        """Return the spec's function."""
        spec, own = self.spec, self.interface
        tables = ["block_table"] if spec.paged_kv is not None else []
        beside = [*self.packed, *tables, *map(own.called, spec.buffers), *self.sinks]
        of_mask = ["*block_mask[1:]"] if self.mask is not None else []
        return filled(
            Function,
            self.exact,
            self.rows,
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
            block_table_checks=BlockTableChecks(self.name) if spec.paged_kv is not None else None,
            checked_sizes=own.checked_sizes(),
            k_shape=own.k_shape(),
            kv_shapes=own.kv_shapes(),
            operand_shapes=own.operand_shapes(),
            numbers=self._numbers(),
            checks=own.checks(),
            derivatives=self.derivatives,
            block_mask=self._block_mask(),
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
