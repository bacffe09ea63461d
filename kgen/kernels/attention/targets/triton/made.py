"""The parts that schedules put into the files of a spec, and their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.targets.triton.interface import Interface, Operator
from kgen.kernels.attention.targets.triton.launches import Launches
from kgen.kernels.attention.targets.triton.opening import TileTable
from kgen.kernels.attention.targets.triton.placement import Placement
from kgen.spec.load import Loaded
from kgen.targets import Source
from kgen.targets.code import If, Statement, assign, text
from kgen.targets.template import Template


@dataclass(frozen=True)
class Planned:
    """A spec, planned and lowered."""

    loaded: Loaded
    plan: AttentionPlan
    free_plan: AttentionPlan
    """The plan without length promises, for kernels whose loads stop at the end of the tensor."""
    lowering: Lowering
    free_lowering: Lowering
    """The lowering of `free_plan`."""
    at: Placement
    interface: Interface
    op: Operator


@dataclass(frozen=True)
class Branch:
    """A branch of the forward pass: a function that writes out and lse, and the condition for its
    calls.

    Its arguments are the layouts of the tensors if `laid_out`, then the arguments of the operators.
    Then follow out, lse, and a bool that is true if the function must store lse.
    """

    function: str
    when: str
    """The condition under which a call takes this branch."""
    laid_out: bool = False
    takes_rest: bool = False
    """True if the branch also serves calls that no other branch serves."""
    leaves: str = ""
    """The condition under which a call may take another branch, if this branch serves the rest."""


@dataclass(frozen=True)
class BackwardBranch:
    """A branch of the backward pass: a function that launches kernels after the kernel of delta.

    Its arguments are the layouts of the tensors, the arguments of the operators, dout, lse, delta,
    and then the operands.
    """

    function: str
    variable: str
    """The variable of the launcher that is true for the calls of this branch."""
    when: str
    """The condition under which a call takes this branch."""
    operands: tuple[str, ...]
    """Further variables of the launcher: gradients, `counters` or `dq_sum`."""
    dq: bool = True
    """False if the portable kernel computes dq."""
    dout: str = ""
    """The function of `_launch.py` that is true for a dout that its kernels can load. They get a
    contiguous copy of any other.
    """
    overlaps: bool = False
    """True if programmatic dependent launch starts its first kernel before the kernel of delta
    ends.
    """
    counts: bool = False
    """True if its kernels take tiles from `counters`, which the kernel of delta resets."""
    sums: str = ""
    """The function that returns `dq_sum`, float32 sums to which the kernels add dq, or None if they
    do not.
    """
    ends: str = ""
    """The function that writes dq from sums that several calls share."""

    @property
    def copied(self) -> list[Statement]:
        """The statement that copies a dout that its kernels cannot load."""
        if not self.dout:
            return []
        copy = "dout.clone(memory_format=torch.contiguous_format)"
        line = assign("dout", copy, "the gradient of a sum has strides of 0")
        return [If(text(f"{self.variable} and not {self.dout}(dout)"), (line,))]

    def inside(self, prefix: str) -> BackwardBranch:
        """Return the branch with the module of its functions as a prefix."""
        function, sums, ends = (
            name and prefix + name for name in (self.function, self.sums, self.ends)
        )
        return replace(self, function=function, sums=sums, ends=ends)


@dataclass(frozen=True)
class Follower:
    """Kernels that start by programmatic dependent launch, before the kernel of delta ends."""

    when: str
    """The condition in the launcher."""
    counts: bool
    """True if the kernel of delta resets the counters of their tiles."""


def follower_of(branches: Iterable[BackwardBranch]) -> Follower | None:
    """Return the kernels that overlap the kernel of delta in any branch, or None."""
    found = [branch for branch in branches if branch.overlaps]
    when = " or ".join(branch.variable for branch in found)
    return Follower(when, any(branch.counts for branch in found)) if found else None


@dataclass(frozen=True)
class Needs:
    """The features that determine the helper functions of the launcher."""

    by_tma: bool = False
    """True if the tiles of a table may be for TMA."""
    many_queries: bool = False
    """True if some kernel serves many queries."""
    decodes: bool = False
    """True if some kernel serves few queries."""
    multiprocessors: bool = False
    writes_by_tma: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, f.name) or getattr(other, f.name) for f in fields(Needs)))


@dataclass(frozen=True)
class InFile:
    """The parts of a schedule in one file."""

    modules: tuple[str, ...] = ()
    """The modules that it imports."""
    named_tuples: bool = False
    dependents: tuple[str, ...] = ()
    """The functions for programmatic dependent launch."""
    opening: tuple[Template, ...] = ()
    """The lines after the imports."""
    forward: tuple[Template, ...] = ()
    """The kernels of the forward pass, which come before all others."""
    kernels: tuple[Template, ...] = ()
    """The other kernels."""
    launcher: tuple[Template, ...] = ()
    """The functions that launch or select the kernels."""
    prefix: str = ""
    """The module prefix of the launch functions. Empty for the same file."""


@dataclass(frozen=True)
class Answer:
    """An expression for the kind of kernels that a pass uses."""

    text: str
    given: tuple[str, ...]
    """The kinds of kernels that the expression can name."""
    by_call: bool = False
    """True if the expression depends on the call."""
    named: bool = False
    """True if the expression uses the variable `kernels`, which the lines of a schedule assign."""


@dataclass(frozen=True)
class Choice:
    """The calls that use the kernels of one schedule."""

    passes: Mapping[str, Answer] = field(default_factory=dict)
    """The answers for the passes that no earlier schedule serves."""
    kind: str = ""
    """The kind of its kernels, in results."""
    words: str = ""
    """The result that names its kernels, and a description of their calls."""
    few: str = ""
    """The condition under which a call uses its few-query kernels (the result `own`)."""
    few_in: tuple[str, ...] = ("forward",)
    """The passes with that condition."""
    own: str = ""
    takes_rest: bool = False
    """True if forward also uses its kernels for calls that no other schedule serves."""
    lines: tuple[Template, ...] = ()
    """The statements that compute results."""
    naming: str = ""
    """The statement that names its kernels, or states the reason for portable kernels."""
    streamed: tuple[str, ...] = ()
    """The names of the tensors other than q, k and v on which the lines depend."""


@dataclass(frozen=True)
class Made:
    """The parts that a schedule puts into the files of a spec."""

    together: InFile = field(default_factory=InFile)
    """Its parts in `triton.py` of a folder."""
    alone: InFile = field(default_factory=InFile)
    """Its parts in a single-file package."""
    beside: Source | None = None
    """Its separate file."""
    helpers: frozenset[str] = frozenset()
    """The functions that its kernels in `triton.py` call."""
    forward_tables: tuple[TileTable, ...] = ()
    tables: tuple[TileTable, ...] = ()
    needs: Needs = field(default_factory=Needs)
    branch: Branch | None = None
    """Its branch of the forward pass, if the launcher does not contain it."""
    launches: Launches | None = None
    """The launches in the launcher itself, for calls without a branch."""
    backward: BackwardBranch | None = None
    """Its branch of the backward pass, if it has kernels in addition to the portable ones."""
    choice: Choice = field(default_factory=Choice)
    remarks: tuple[str, ...] = ()
    """Remarks for the user who renders the spec."""
    offers: tuple[str, ...] = ()
    """Its public functions, other than the function of the spec."""
    unbuilt: str = ""
    """Its pass, if `kgen build` cannot compile its kernels."""
