"""The kernels for Hopper: the templates and launches of forward, and the parts of files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from kgen.kernels.linear_attention.schedules import keeps
from kgen.kernels.linear_attention.schedules.hopper import CHIP
from kgen.kernels.linear_attention.schedules.hopper.backward import (
    FUNCTION as BACKWARD,
)
from kgen.kernels.linear_attention.schedules.hopper.backward import OnHopper, backward_of
from kgen.kernels.linear_attention.schedules.hopper.parts import (
    OPTIONS,
    Equations,
    Factor,
    GluonKernel,
    Launched,
    Parts,
    equations,
    factors_of,
    rows_of,
    sliced,
    tabled,
)
from kgen.kernels.linear_attention.targets.triton.counts import count
from kgen.kernels.linear_attention.targets.triton.kernels import Builder, Kernels, Solve
from kgen.kernels.linear_attention.targets.triton.made import Call, InFile, Made
from kgen.kernels.linear_attention.targets.triton.steps import Step, Steps
from kgen.targets import Source, opening
from kgen.targets.code import GLUON
from kgen.targets.launching import ImportsLaunch, imported
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES
from kgen.targets.triton.tritons import GLUON as GLUON_TRITONS

UPDATES, OUTPUTS, STORES = 3, 2, 2
"""Slots of the operands of updates, of operands of the output, and of the output: at most 189 KiB
of shared memory.
"""

FUNCTION = "forward_on_hopper"
"""The function that launches the kernels."""
LATER = ("queried", "after")
"""The factors that only later products of a chunk need."""


@dataclass(frozen=True)
class Layouts(Template):
    """Names that come from Gluon, and layouts."""

    template: ClassVar[str] = "linear_attention/hopper/_layouts.j2"
    language: ClassVar[str] = GLUON

    K: int
    factors: list[Factor]


@dataclass(frozen=True)
class GluonOpening(Template):
    """The supported versions of Triton, and the import of Gluon if the kernels are in this file."""

    template: ClassVar[str] = "linear_attention/hopper/_opening.j2"

    layouts: Layouts | None
    traces: bool
    """True if kernels compute traces in registers."""
    gluon_tritons: str = str(GLUON_TRITONS)


@dataclass(frozen=True)
class ChipChoice(Template):
    """The condition under which the kernels run."""

    template: ClassVar[str] = "linear_attention/hopper/_chip.j2"

    name: str
    single: bool
    """True if the kernels are in this file."""

    def launch_functions(self) -> Iterable[str]:
        return ("_by_tma",)


@dataclass(frozen=True)
class SweepKernel(GluonKernel):
    """The kernel of the recurrence over chunks, in Gluon."""

    template: ClassVar[str] = "linear_attention/hopper/_sweep.j2"

    queried: Factor | None
    after: Factor | None
    """The factors that a program loads during products, because registers are scarce."""

    @property
    def first_factors(self) -> list[Factor]:
        """The factors that a program loads one chunk ahead."""
        return [row for row in self.factors if row.name not in LATER]

    @property
    def names(self) -> list[str]:
        """The names of the factors that a program loads one chunk ahead."""
        return [row.name for row in self.first_factors]

    @property
    def allocated_factors(self) -> str:
        """The end of a list of slots."""
        return f", _slots(factors_desc, UPDATES * {self.count})" if self.factors else ""

    @property
    def times_before(self) -> str:
        """The factor of the values that the state has for keys."""
        if self.decays:
            return " * before[None, :]"
        return " * betas[None, :]" if self.betas else ""

    @property
    def times_queried(self) -> str:
        """The factor of the products of state and queries."""
        return "queried[None, :]" if self.decays else "at.scale"


@dataclass(frozen=True)
class Launcher(Template):
    """The function that launches the kernels."""

    template: ClassVar[str] = "linear_attention/hopper/_launcher.j2"
    language: ClassVar[str] = GLUON

    operands: list[str]
    """The operands of the operator of forward."""
    keeps: bool
    """True if the operator has the flag `keep`."""
    state_shape: str
    state_dtype: str
    ends: str
    """The call that allocates the states after chunks."""
    BT: int
    K: int
    V: int
    part: list[str]
    """The tensors of which a part of the sequences has elements."""
    gates: Launched | None
    equations: Launched
    inverse: Launched
    factors: list[Factor]
    mapped: list[str]
    """Statements that replace q and k by the results of their feature maps."""
    solve: Launched
    finish: Step | None
    saved: list[str]
    UPDATES: int = UPDATES
    OUTPUTS: int = OUTPUTS
    STORES: int = STORES

    def launch_functions(self) -> Iterable[str]:
        rows = ["_cdiv"] if self.finish is not None else []
        return ("_launch", "_tile", *rows)

    @property
    def blocks(self) -> int:
        """The number of programs of a head."""
        return self.V // 64

    @property
    def sliced(self) -> list[str]:
        """The elements of a part."""
        return sliced(self.part)

    @property
    def keep_operand(self) -> str:
        """The flag as the last operand."""
        return ", keep" if self.keeps else ""

    @property
    def keep(self) -> str:
        """The value of the kernel's flag."""
        return "keep" if self.keeps else "False"

    @property
    def kept_descs(self) -> str:
        """The descriptors of the tensors for backward."""
        return "new_desc, states_desc" if self.keeps else "o_desc, o_desc"


@dataclass(frozen=True)
class HopperFile(ImportsLaunch):
    """`hopper.py`."""

    template: ClassVar[str] = "linear_attention/hopper/hopper.j2"
    import_indent: ClassVar[int] = 0
    language: ClassVar[str] = GLUON

    summary: str
    imported: str
    """The end of the statement that imports from `triton.py`."""
    layouts: Layouts
    traces: bool
    """True if kernels compute traces in registers."""
    kernels: list[Template]
    """The kernels, and the functions that launch them."""


def made(builder: Builder, kernels: Kernels, call: Call) -> Made:
    """Return the kernels for Hopper of a spec, and their parts of its files."""
    spec, rows = builder.spec, rows_of(builder.plan)
    later = {row.name: row for row in rows if row.name in LATER}
    first = equations(builder, "_equations_hopper_kernel", "qk", solved=True)
    sweep = SweepKernel(
        rows, builder.traits.decays, builder.traits.betas, *(later.get(name) for name in LATER)
    )
    launcher, back = _launcher(builder, kernels, first, call), backward_of(builder, kernels, call)
    parts: list[Template] = [first, sweep, *(back.kernels if back else ())]
    parts += [
        Parts(spec.chunk_size, launcher.blocks, rows),
        launcher,
        *([back.launcher] if back else []),
    ]
    layouts = Layouts(spec.head_dim.qk, rows)
    names = imported(_imported(builder, launcher, back), 0)
    modules = ("functools", "warnings")
    backward, traces = BACKWARD if back else "", back is not None and back.traces
    return Made(
        InFile(
            GluonOpening(None, traces=False),
            ChipChoice(spec.name, single=False),
            f"{CHIP.module}().{FUNCTION}",
            f"{CHIP.module}().{backward}" if back else "",
            modules,
        ),
        InFile(
            GluonOpening(layouts, traces),
            ChipChoice(spec.name, single=True),
            FUNCTION,
            backward,
            ("collections", "contextlib", *modules),
            tuple(parts),
        ),
        Source(CHIP.file, HopperFile(opening(spec), names, layouts, traces, parts), arch=CHIP.arch),
    )


def _launcher(
    builder: Builder,
    kernels: Kernels,
    equations: Equations,
    call: Call,
) -> Launcher:
    plan, spec, steps = builder.plan, builder.spec, Steps(builder.plan)
    made, found = steps.made(), {step.kernel: step for step in steps.chunks(kernels)}
    size = spec.head_dim
    there = {"G", "betas"}
    new = {name: one for name, one in made.items() if name not in there}
    new["factors"] = factors_of(steps, equations)
    step = steps.step("equations", equations.signature, count("slots", "H"), new)
    mapped = [f"{one.name} = {one.name}_mapped" for one in equations.operands if one.mapped]
    of_equations = Launched(
        step.kernel, step.programs, step.made, step.arguments, mapped, options=OPTIONS
    )
    gates, inverse = found.get("_gates_kernel"), found["_inverse_kernel"]
    assert kernels.solve is not None  # the rule is `delta`
    read = [one.name for one in equations.signature.operands]
    kept = ["new", "states"] if keeps(plan) else []
    return Launcher(
        operands=call.operands,
        keeps=keeps(plan),
        state_shape=f"(N, HV, {size.qk}, {size.v})",
        state_dtype=TORCH_DTYPES[spec.state_dtype],
        ends=made["ends"].call("sweep"),
        BT=spec.chunk_size,
        K=size.qk,
        V=size.v,
        part=[*read[:2], "v", *read[2:], "inverse", *kept, "o"],
        gates=tabled(gates) if gates is not None else None,
        equations=of_equations,
        inverse=tabled(inverse),
        factors=equations.factors,
        mapped=mapped,
        solve=_of_keys(found["_solve_kernel"], kernels.solve),
        finish=steps.finish(kernels),
        saved=call.saved,
    )


def _of_keys(step: Step, kernel: Solve) -> Launched:
    """Return the launch that computes only W. The kernel then does not write to U."""
    arguments = kernel.signature.arguments_with({"U": "W", Solve.FLAG: "False"})
    return replace(tabled(step), made=[], arguments=arguments)


def _imported(builder: Builder, launcher: Launcher, back: OnHopper | None) -> list[str]:
    """Return the names that `hopper.py` imports from `triton.py`."""
    launched = [*([launcher.gates] if launcher.gates else []), launcher.inverse]
    launched += [launcher.solve] if launcher.keeps else []
    launched += back.launched if back else []
    names = ["BT", "K", *(["V"] if back and back.reads_v else []), "_sizes"]
    names += [n for one in launched for n in (one.kernel, one.table)]
    if launcher.finish is not None:
        names += [launcher.finish.kernel, launcher.finish.table]
    return [*names, *(f"_{of}_map" for of in "qk" if f"{of}_map" in builder.plan.formulas)]
