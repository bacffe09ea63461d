"""The forward kernels for Hopper: a dataclass for each template, and their launches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.schedules import keeps
from kgen.kernels.linear_attention.schedules.hopper import CHIP
from kgen.kernels.linear_attention.schedules.hopper.conditions import factors
from kgen.kernels.linear_attention.targets.triton.counts import count
from kgen.kernels.linear_attention.targets.triton.kernels import Builder, Kernels, RowChunk, Solve
from kgen.kernels.linear_attention.targets.triton.made import Call, InFile, Made
from kgen.kernels.linear_attention.targets.triton.signatures import (
    K,
    KernelSignature,
    Operand,
    Q,
    chunk_signature,
)
from kgen.kernels.linear_attention.targets.triton.steps import Step, Steps
from kgen.targets import Source, opening
from kgen.targets.code import GLUON, Code
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
class Factor:
    """One row of the factors of a chunk: a number for each token."""

    name: str
    number: int
    value: str
    """Its value in the kernel of the equations."""
    axis: int = 0
    layout: str = "TOKENS"
    """The accumulators that it multiplies, and the axis along which they have the same factor."""


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
class Mapped:
    """q or k in the kernel of the equations, with its feature map and norm."""

    name: str
    mapped: bool
    value: Code | None
    eps: str | None


@dataclass(frozen=True)
class Equations(Template):
    """The kernel that maps q and k, and computes A, P and the factors of tokens."""

    template: ClassVar[str] = "linear_attention/hopper/_equations.j2"

    signature: KernelSignature
    chunk: Template
    operands: list[Mapped]
    decays: bool
    betas: bool
    factors: list[Factor]

    @property
    def count(self) -> int:
        """The number of rows of factors."""
        return len(self.factors)

    @property
    def words(self) -> str:
        """The end of the docstring's first sentence."""
        more = ["the factors of tokens"] if self.factors else []
        more += [f"the mapped rows of {one.name}" for one in self.operands if one.mapped]
        return f", {', '.join(more[:-1])}{' and ' * (len(more) > 1)}{more[-1]}" if more else ""


@dataclass(frozen=True)
class SweepKernel(Template):
    """The kernel of the recurrence over chunks, in Gluon."""

    template: ClassVar[str] = "linear_attention/hopper/_sweep.j2"
    language: ClassVar[str] = GLUON

    factors: list[Factor]
    decays: bool
    betas: bool
    queried: Factor | None
    after: Factor | None
    """The factors that a program loads during products, because registers are scarce."""

    @property
    def count(self) -> int:
        """The number of rows of factors."""
        return len(self.factors)

    @property
    def first_factors(self) -> list[Factor]:
        """The factors that a program loads one chunk ahead."""
        return [row for row in self.factors if row.name not in LATER]

    @property
    def names(self) -> list[str]:
        """The names of the factors that a program loads one chunk ahead."""
        return [row.name for row in self.first_factors]

    @property
    def slots_of_factors(self) -> str:
        """The end of a list of names of operands."""
        return ', "factors"' if self.factors else ""

    @property
    def bytes_of_factors(self) -> str:
        """The end of the sum of the bytes of a chunk."""
        return f" + {self.count} * d.factors.block_type.nbytes" if self.factors else ""

    @property
    def allocated_factors(self) -> str:
        """The end of a list of slots."""
        return f", _slots(factors_desc, UPDATES * {self.count})" if self.factors else ""

    @property
    def descs_of_factors(self) -> str:
        """The parameter of the factors, before others."""
        return "factors_desc, " if self.factors else ""

    @property
    def and_factors(self) -> str:
        """The end of the docstring's sentence."""
        return " and the factors that it needs first" if self.factors else ""

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
class Launched:
    """One launch with a tile table, or with options."""

    kernel: str
    programs: str
    made: list[str]
    arguments: list[str]
    after: list[str]
    table: str = ""
    options: tuple[str, ...] = ()


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
    steps: list[Launched]
    factors: list[Factor]
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
    kernels: list[Template]
    launcher: Launcher


def made(builder: Builder, kernels: Kernels, call: Call) -> Made:
    """Return the kernels for Hopper of a spec, and their parts of its files."""
    spec, rows = builder.spec, _rows(builder.plan)
    later = {row.name: row for row in rows if row.name in LATER}
    equations = _equations(builder)
    sweep = SweepKernel(
        rows, builder.traits.decays, builder.traits.betas, *(later.get(name) for name in LATER)
    )
    launcher = _launcher(builder, kernels, equations, call)
    layouts, names = Layouts(spec.head_dim.qk, rows), imported(_imported(builder, launcher), 0)
    file = HopperFile(opening(spec), names, layouts, [equations, sweep], launcher)
    modules = ("functools", "warnings")
    return Made(
        InFile(
            GluonOpening(None),
            ChipChoice(spec.name, single=False),
            f"{CHIP.module}().{FUNCTION}",
            modules,
        ),
        InFile(
            GluonOpening(layouts),
            ChipChoice(spec.name, single=True),
            FUNCTION,
            ("collections", *modules),
            (equations, sweep, launcher),
        ),
        Source(CHIP.file, file, arch=CHIP.arch),
    )


def _rows(plan: LinearAttentionPlan) -> list[Factor]:
    of_state = " * betas" if "beta" in plan.formulas else ""
    values = {
        "betas": "betas",
        "before": f"tl.exp2(G){of_state}",
        "queried": "tl.exp2(G) * scale",
        "after": "tl.exp2(G_last - G)",
        "last": "tl.exp2(G_last)",
    }
    rows = [Factor(name, i, values[name]) for i, name in enumerate(factors(plan))]
    return [replace(r, axis=1, layout="STATE") if r.name == "last" else r for r in rows]


def _equations(builder: Builder) -> Equations:
    plan, made = builder.plan, {"q": None, "k": None}
    maps = {of: builder.feature_map(of) for of in made}
    rows = _rows(plan)
    operands = [Q, K, *builder.decays, *builder.betas, Operand("A"), Operand("P")]
    operands += [Operand("factors")] if rows else []
    operands += [Operand(f"{of}_mapped") for of, found in maps.items() if found is not None]
    return Equations(
        chunk_signature(plan, "_equations_hopper_kernel", operands, numbers=("scale",)),
        RowChunk(),
        [
            Mapped(of, True, found.value, found.eps) if found else Mapped(of, False, None, None)
            for of, found in maps.items()
        ],
        builder.traits.decays,
        builder.traits.betas,
        rows,
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
    rows = count("slots", "HV", equations.count)
    new["factors"] = steps.new("factors", rows, spec.chunk_size, dtype="fp32")
    step = steps.step("equations", equations.signature, count("slots", "H"), new)
    mapped = [f"{one.name} = {one.name}_mapped" for one in equations.operands if one.mapped]
    of_equations = Launched(
        step.kernel, step.programs, step.made, step.arguments, mapped, options=_OPTIONS
    )
    gates, inverse = found.get("_gates_kernel"), found["_inverse_kernel"]
    assert kernels.solve is not None  # the rule is `delta`
    first = [_tabled(gates)] if gates is not None else []
    return Launcher(
        operands=call.operands,
        keeps=keeps(plan),
        state_shape=f"(N, HV, {size.qk}, {size.v})",
        state_dtype=TORCH_DTYPES[spec.state_dtype],
        ends=made["ends"].call("sweep"),
        BT=spec.chunk_size,
        K=size.qk,
        V=size.v,
        steps=[*first, of_equations, _tabled(inverse)],
        factors=equations.factors,
        solve=_of_keys(found["_solve_kernel"], kernels.solve),
        finish=steps.finish(kernels),
        saved=call.saved,
    )


_OPTIONS = ("num_warps=4", "num_stages=1")
"""The launch options of the kernel of the equations."""


def _tabled(step: Step) -> Launched:
    return Launched(step.kernel, step.programs, step.made, step.arguments, step.after, step.table)


def _of_keys(step: Step, kernel: Solve) -> Launched:
    """Return the launch that computes only W. The kernel then does not write to U."""
    arguments = kernel.signature.arguments_with({"U": "W", Solve.FLAG: "False"})
    return replace(_tabled(step), made=[], arguments=arguments)


def _imported(builder: Builder, launcher: Launcher) -> list[str]:
    """Return the names that `hopper.py` imports from `triton.py`."""
    launched = [one for one in launcher.steps if one.table]
    launched += [launcher.solve] if launcher.keeps else []
    names = ["BT", "K", "_sizes", *(n for one in launched for n in (one.kernel, one.table))]
    if launcher.finish is not None:
        names += [launcher.finish.kernel, launcher.finish.table]
    return [*names, *(f"_{of}_map" for of in "qk" if f"{of}_map" in builder.plan.formulas)]
