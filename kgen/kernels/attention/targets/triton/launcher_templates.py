"""The templates of the launcher, from argument checks to reductions of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.row_max import RowResults
from kgen.kernels.attention.targets.triton.choice import (
    BackwardWay,
    Way,
    Ways,
)
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.gradient_sums import (
    GradientSums,
)
from kgen.kernels.attention.targets.triton.interface import Check, Operator
from kgen.kernels.attention.targets.triton.launches import (
    DeltaLaunch,
    GradientLaunch,
    Launch,
    OutsideDelta,
    OwnDelta,
)
from kgen.kernels.attention.targets.triton.made import BackwardBranch
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.targets.arguments import (
    Derivatives,
    Numbers,
)
from kgen.targets.code import Assign, Statement, text
from kgen.targets.folding import Bracketed
from kgen.targets.launching import LaunchFunctions
from kgen.targets.template import Template


@dataclass(frozen=True)
class Descriptors(Template):
    """The function that builds TMA descriptors of [B, H, S, D] tensors."""

    template: ClassVar[str] = "attention/triton/_descriptors.j2"


@dataclass(frozen=True)
class PackedDescriptors(Template):
    """The functions that build TMA descriptors of packed sequences."""

    template: ClassVar[str] = "attention/triton/_packed_descriptors.j2"

    outside: str
    """The access of TMA to rows past a sequence, in words."""


@dataclass(frozen=True)
class Launching(Template):
    """The beginning of the launcher: descriptors, and in a single-file package the functions that
    all launchers share.
    """

    template: ClassVar[str] = "attention/triton/_launch.j2"

    name: str
    launching: LaunchFunctions | None
    descriptors: Descriptors | PackedDescriptors | None
    """The functions that build TMA descriptors. None if TMA loads no tiles."""

    def launch_functions(self) -> Iterable[str]:
        return ("_arch_for", "_library")


@dataclass(frozen=True)
class Aligned(Template):
    """The emitted function that aligns tensors of narrow values."""

    template: ClassVar[str] = "attention/triton/_aligned.j2"


@dataclass(frozen=True)
class PortableForward(Launch, Operator, Exact, RowResults, Placement, Template):
    """The launch of the portable forward kernel, and the branches that need layouts."""

    template: ClassVar[str] = "attention/triton/_portable_forward.j2"

    aligned: list[Statement]
    """The statement that aligns V."""
    ways: list[Way]
    """The branches that need the layouts of the tensors."""

    def launch_functions(self) -> Iterable[str]:
        return ("_launch", "_layouts", "_tile", *self.dividers)

    @property
    def laid_out(self) -> Bracketed:
        """The statement that computes the layouts of tensors."""
        return Bracketed("layouts = _layouts(", (*self.input_tensors, "out"), ")")


@dataclass(frozen=True)
class RowMax(Operator, Exact, Placement, Template):
    """The operator that also returns the largest score of each row, and the results of a call."""

    template: ClassVar[str] = "attention/triton/_row_max.j2"

    name: str
    needs_gradient: str | None
    """The condition under which a backward pass may follow. None without a backward pass."""

    def launch_functions(self) -> Iterator[str]:
        yield "_operator"
        yield from self.allocators
        if self.needs_gradient is not None:
            yield from ("_COMPILED", "_compile_ahead", "_transformed")

    @property
    def returned_all(self) -> Bracketed:
        """The return statement of the operator."""
        return Bracketed("return *_forward(", (*self.inputs, "True", "row_max"), "), row_max")


@dataclass(frozen=True)
class ForwardLauncher(Operator, Exact, RowResults, Placement, Template):
    """The forward pass, and its operators."""

    template: ClassVar[str] = "attention/triton/_forward_launcher.j2"
    optional_fields: ClassVar[tuple[str, ...]] = (*RowResults.optional_fields, "row_max")

    name: str
    bf16: bool
    ways: Ways
    """The branches of the forward pass that need no layouts, and the branch for all other calls."""
    portable: PortableForward | None
    """The launch of the portable forward kernel. None if other kernels serve every call."""
    needs_gradient: str | None
    """The condition under which a backward pass may follow. None without a backward pass."""
    row_max: list[RowMax]
    """The operator of calls with `return_max`."""

    def launch_functions(self) -> Iterator[str]:
        yield "_operator"
        yield from self.allocators
        yield from self.ways.launch_functions()
        if self.needs_gradient is not None:
            yield from ("_COMPILED", "_compile_ahead", "_transformed")

    @property
    def sizes_of_keys(self) -> list[str]:
        """The statements for the sizes that only the portable kernel needs."""
        return self.other_sizes if self.portable is not None else []

    @property
    def returned_out(self) -> Bracketed:
        """The return statement of the operator that returns out."""
        return Bracketed("return _forward(", (*self.inputs, "False"), ")[0]")

    @property
    def returned_both(self) -> Bracketed:
        """The return statement of the operator that returns out and its log-sum-exp."""
        return Bracketed("return _forward(", (*self.inputs, "True"), ")")


@dataclass(frozen=True)
class UseDelta(Template):
    """The emitted function that replaces the kernel of delta."""

    template: ClassVar[str] = "attention/triton/_use_delta.j2"

    name: str


@dataclass(frozen=True)
class SharedLauncher(Template):
    """The functions that begin and end backward calls with shared tensors."""

    template: ClassVar[str] = "attention/triton/_shared_launcher.j2"

    name: str
    branches: list[BackwardBranch]
    shares: BackwardBranch
    """The branch whose calls share sums."""
    sinks: list[str]
    sizes_of_q: str
    aligned: list[Statement]
    """The statement that aligns dO."""
    launch: DeltaLaunch

    def launch_functions(self) -> Iterator[str]:
        yield "_layouts"
        if self.sinks:
            yield "_cdiv"
        if self.shares.dout:
            yield self.shares.dout


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
    aligned: list[Statement]
    """The statement that aligns V and dO."""
    widest_step: str
    shares: BackwardBranch | None
    """The branch whose calls share sums if backward runs in parts of the keys. None without one."""
    delta: DeltaLaunch | OwnDelta | OutsideDelta
    first: list[Launch]
    """The portable launches that every call makes."""
    otherwise: list[list[Launch]]
    """The portable launches of calls that take no branch, if there are branches."""
    of_buffers: list[GradientLaunch]

    @property
    def shared_param(self) -> list[str]:
        """The parameter for the tensors that several calls share."""
        return ["shared=None"] if self.shares is not None else []

    @property
    def shared_words(self) -> str | None:
        """The result of a call with shared tensors, for the docstring."""
        if self.shares is None:
            return None
        return "That for q is None if `shared` is not None."

    @property
    def allocated(self) -> Statement:
        """The statement that allocates the gradients that no other call shares."""
        names = ("dk", "dv") if self.shares is not None else ("dq", "dk", "dv")
        like = {"dq": self.like_q, "dk": self.like_k, "dv": self.like_v}
        return Assign(names, tuple(text(like[name]) for name in names))

    @property
    def returned_dq(self) -> str:
        """The gradient of q. A call with shared tensors adds it to their sum."""
        return "dq if shared is None else None" if self.shares is not None else "dq"

    def launch_functions(self) -> Iterator[str]:
        yield from ("_launch", "_layouts", "_operator", "_tile", *self.allocators, *self.dividers)
        if self.of_buffers or "sinks" in self.learned:
            yield "_cdiv"
        yield from (branch.dout for branch in self.branches if branch.dout)


@dataclass(frozen=True)
class Scatter(Template):
    """The emitted function that scatters values: it adds them to elements at computed indices."""

    template: ClassVar[str] = "attention/triton/_scatter.j2"

    reads: bool
    """True if the indices read a buffer."""


@dataclass(frozen=True)
class Autograd(GradientSums, Operator, Exact, RowResults, Template):
    """The registration of autograd for the forward operator."""

    template: ClassVar[str] = "attention/triton/_autograd.j2"
    optional_fields: ClassVar[tuple[str, ...]] = (
        *RowResults.optional_fields,
        *("out_and_lse", "results_without_gradient", "gradients_of_rows"),
    )

    name: str

    @property
    def out_and_lse(self) -> str:
        """The slice of an operator's results that backward uses, if an operator has others."""
        return "[:2]" if self.row_results else ""

    @property
    def results_without_gradient(self) -> list[str]:
        """The statement that marks the other results."""
        return ["ctx.mark_non_differentiable(*output[2:])"] if self.row_results else []

    @property
    def gradients_of_rows(self) -> list[str]:
        """The parameter for their gradients, which are None."""
        return ["*_"] if self.row_results else []

    def launch_functions(self) -> Iterable[str]:
        return ("_once", "_register_autograd")


@dataclass(frozen=True)
class Docstring(RowResults, Placement, Template):
    """The docstring of the spec's function: its arguments and results."""

    template: ClassVar[str] = "attention/triton/_docstring.j2"

    width_qk: int
    width_v: int
    dtype: str
    kv_shapes: str
    gqa_words: str
    last_stride: str
    """The largest last stride of q, k and v."""
    argument_words: list[str]
    dead_row: str
    derivatives: Derivatives


@dataclass(frozen=True)
class BlockTableChecks(Template):
    """The checks of a block table."""

    template: ClassVar[str] = "attention/triton/_block_table_checks.j2"

    name: str

    def launch_functions(self) -> Iterable[str]:
        return ("_dtype",)


@dataclass(frozen=True)
class BlockMaskArgument(Template):
    """The default of the argument for a block mask, and its checks."""

    template: ClassVar[str] = "attention/triton/_block_mask_argument.j2"

    name: str
    list_sizes: str
    """Number of batches and heads with separate lists."""
    given: list[str]
    """The arguments of the operator that builds a block mask, except the device."""


@dataclass(frozen=True)
class Function(Exact, RowResults, Placement, Template):
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
    block_table_checks: BlockTableChecks | None
    checked_sizes: str
    """The statement for the sizes in checks."""
    k_shape: str
    kv_shapes: str
    operand_shapes: str
    """The shapes of q, k and v by name, for error messages."""
    numbers: Numbers
    checks: list[Check]
    derivatives: Derivatives
    block_mask: BlockMaskArgument | None
    default_scale: str
    needs_lse: str | None
    """Condition under which autograd may need the log-sum-exp. None without a backward pass."""
    given: list[str]
    """The arguments of the operators."""

    @property
    def dtypes_differ(self) -> str:
        """The message for operands of another dtype."""
        return (
            f"q, k and v must be {self.torch_dtype}, got {{q.dtype}}, {{k.dtype}} and {{v.dtype}}"
        )

    def launch_functions(self) -> Iterator[str]:
        yield from ("_cast", "_dense", "_real")
        yield from self.numbers.launch_functions()
        yield from self.derivatives.launch_functions()
        if any(check.shows_dtype for check in self.checks):
            yield "_dtype"
        if self.needs_lse is not None:
            yield "_transformed"
