"""The backward kernels for Hopper: a dataclass for each template, and their launches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.schedules.hopper.parts import (
    OPTIONS,
    Equations,
    Factor,
    GluonKernel,
    Launched,
    equations,
    factors_of,
    rows_of,
    sliced,
    tabled,
)
from kgen.kernels.linear_attention.targets.triton.counts import Made, count
from kgen.kernels.linear_attention.targets.triton.gradients import DO
from kgen.kernels.linear_attention.targets.triton.kernels import SCALE, Builder, Kernels, RowChunk
from kgen.kernels.linear_attention.targets.triton.made import Call, OfBackward
from kgen.kernels.linear_attention.targets.triton.signatures import (
    K,
    KernelSignature,
    Operand,
    Q,
    V,
    chunk_signature,
)
from kgen.kernels.linear_attention.targets.triton.steps import Step, Steps
from kgen.targets.code import GLUON
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES

EARLY, LATE = 3, 2
"""Slots of the operands of the first products of a chunk, and of the others: at most 172 KiB of
shared memory.
"""
FUNCTION = "backward_on_hopper"
"""The function that launches the kernels."""
REPLACED = ("values_back", "states_back", "keys_back", "solve_back")
"""The portable kernels that do not run."""


@dataclass(frozen=True)
class SweepBack(GluonKernel):
    """The kernel of the gradients of states, from the last chunk to the first, in Gluon."""

    template: ClassVar[str] = "linear_attention/hopper/_sweep_back.j2"

    before: Factor | None
    """The factor of the gradients of values that the state has for keys."""

    @property
    def first_factors(self) -> list[Factor]:
        """The factors that a program loads one chunk ahead."""
        return [row for row in self.factors if row.name in ("queried", "after", "last")]

    @property
    def names(self) -> list[str]:
        """The names of the factors that a program loads one chunk ahead."""
        return [row.name for row in self.first_factors]

    @property
    def allocated_factors(self) -> str:
        """The end of a list of slots."""
        return f", _slots(factors_desc, EARLY * {self.count})" if self.factors else ""

    @property
    def times_queried(self) -> str:
        """The factor of do for the state."""
        return "queried[None, :]" if self.decays else "at.scale"


@dataclass(frozen=True)
class Gradients(Template):
    """The kernel of the gradients of q, k and v of a chunk, and of its decays and betas."""

    template: ClassVar[str] = "linear_attention/hopper/_gradients.j2"

    signature: KernelSignature
    chunk: Template
    decays: bool
    betas: bool
    decay_learned: bool
    beta_learned: bool

    @property
    def of_gates(self) -> bool:
        """True if the kernel computes gradients of decays or betas."""
        return self.decay_learned or self.beta_learned

    @property
    def minus_xs(self) -> str:
        """The gradient of keys through the values that the state has for them."""
        if self.decays:
            return "xs * (-before)[:, None]"
        return "xs * (-betas)[:, None]" if self.betas else "-xs"

    @property
    def outputs(self) -> str:
        """The results in the docstring."""
        more = ["the decays"] if self.decay_learned else []
        more += ["betas"] if self.beta_learned else []
        listed = ["q", "k", "v", *more]
        return f"{', '.join(listed[:-1])} and {listed[-1]}"


@dataclass(frozen=True)
class GradientsInGluon(Template):
    """The same kernel in Gluon, for K = V = 128 and updates with a factor."""

    template: ClassVar[str] = "linear_attention/hopper/_gradients_in_gluon.j2"
    language: ClassVar[str] = GLUON
    PARTS: ClassVar[dict[str, int]] = {"dG": 5, "dbetas": 2}
    """The parts of gradients, which different warps compute."""

    decays: bool

    @property
    def named_G(self) -> str:
        """The name of the decays, before others."""
        return '"G", ' if self.decays else ""

    @property
    def named_dG(self) -> str:
        """The names of the decays and of their gradients, before others."""
        return '"G", "dG", ' if self.decays else ""

    @property
    def G_desc(self) -> str:
        """The descriptor of the decays, before others."""
        return "G_desc, " if self.decays else ""

    @property
    def G_slots(self) -> str:
        """The slots of the decays, before others."""
        return "_slots(G_desc, 2), " if self.decays else ""

    @property
    def G_pointers(self) -> str:
        """The pointers to the decays and to their gradients, before others."""
        return "G_ptr, dG_ptr, " if self.decays else ""

    @property
    def gates(self) -> str:
        """The tensors of gates in docstrings."""
        return "G or betas" if self.decays else "betas"

    @property
    def all_gates(self) -> str:
        """The same tensors, all of them."""
        return "G and betas" if self.decays else "betas"

    @property
    def state_readers(self) -> int:
        """The number of partitions that read states."""
        return 4 if self.decays else 2

    @property
    def dstate_readers(self) -> int:
        """The number of partitions that read gradients of states."""
        return 3 if self.decays else 1

    @property
    def warps(self) -> list[int]:
        """The warps of all partitions but the first."""
        return [4, 4, 1, 1, 1] if self.decays else [4, 4, 1]

    @property
    def registers(self) -> list[int]:
        """Their registers per thread."""
        return [152, 160, 40, 40, 40] if self.decays else [152, 160, 40]

    @property
    def times_queried(self) -> str:
        """The factor of the products of do and states."""
        return "queried[:, None]" if self.decays else "grid.scale"


@dataclass(frozen=True)
class LauncherBack(Template):
    """The function that launches the kernels of backward."""

    template: ClassVar[str] = "linear_attention/hopper/_launcher_back.j2"
    language: ClassVar[str] = GLUON

    operands: list[str]
    state_shape: str
    state_dtype: str
    BT: int
    K: int
    V: int
    first: list[Launched]
    """The launches after which `do` is the gradient of the output before gate and norm."""
    mapped: list[str]
    """Statements that replace q and k by the results of their feature maps."""
    pairs: Launched
    factors: list[Factor]
    of_states_back: list[str]
    """The tensors of chunks up to the sweep."""
    in_gluon: bool
    """True if the kernel of gradients is in Gluon."""
    gradients: Launched
    of_gradients: list[str]
    """The tensors of the kernel of gradients."""
    steps: list[Launched]
    sums: list[str]
    """Statements that add parts of gradients."""
    results: list[str]
    EARLY: int = EARLY
    LATE: int = LATE

    def launch_functions(self) -> Iterable[str]:
        rows = ["_cdiv"] if self.first else []
        return ("_launch", "_tile", *(["_multiprocessors"] if self.in_gluon else []), *rows)

    @property
    def blocks(self) -> int:
        """The number of programs of a head."""
        return self.V // 64

    @property
    def rows_of_G(self) -> str:
        """The descriptor of the decays, before others."""
        return "_gluon_rows(G), " if "G" in self.of_gradients else ""

    @property
    def G_and_dG(self) -> str:
        """The decays and their gradients, before others."""
        return "G, dG, " if "G" in self.of_gradients else ""

    @property
    def sliced_states_back(self) -> list[str]:
        """The elements of a part up to the sweep."""
        return sliced(self.of_states_back)

    @property
    def sliced_gradients(self) -> list[str]:
        """The elements of a part for the kernel of gradients."""
        return sliced(self.of_gradients)


@dataclass(frozen=True)
class OnHopper:
    """The kernels and the launcher of backward, and the names that the launcher uses."""

    kernels: tuple[Template, ...]
    launcher: LauncherBack
    launched: list[Launched]
    """The portable kernels that it launches."""
    traces: bool
    """True if kernels compute traces in registers."""
    reads_v: bool
    """True if kernels read V, the number of columns of values."""


def backward_of(builder: Builder, kernels: Kernels, call: Call) -> OnHopper | None:
    """Return the kernels of backward, or None if a spec has no backward pass on Hopper."""
    of = call.backward
    if of is None or not of.saved:
        return None
    pairs = equations(builder, "_pairs_hopper_kernel", (), solved=False)
    gradients = _gradients(builder)
    steps = Steps(builder.plan)
    rest = [tabled(step) for step in steps.backward(of.kernels) if step.name not in REPLACED]
    first = [tabled(step) for step in steps.first(kernels, of.kernels)]
    gluon = _in_gluon(builder)
    launcher = _launcher(builder, of, pairs, gradients, gluon, first, rest)
    own = gluon if gluon is not None else gradients
    return OnHopper(
        (pairs, _sweep(builder), own),
        launcher,
        [*first, *rest],
        traces=gluon is not None and gluon.decays,
        reads_v=gluon is None,
    )


def _in_gluon(builder: Builder) -> GradientsInGluon | None:
    """Return the kernel of gradients in Gluon, or None if the one in Triton runs."""
    traits, size = builder.traits, builder.spec.head_dim
    learned = traits.beta_learned and traits.decay_learned == traits.decays
    wide = (size.qk, size.v) == (128, 128)
    return GradientsInGluon(traits.decays) if wide and learned else None


def _sweep(builder: Builder) -> SweepBack:
    rows = rows_of(builder.plan)
    found = {row.name: row for row in rows}
    before = found.get("before") or found.get("betas")
    return SweepBack(rows, builder.traits.decays, builder.traits.betas, before)


def _gradients(builder: Builder) -> Gradients:
    traits = builder.traits
    dG = [Operand("dG")] if traits.decay_learned else []
    dbetas = [Operand("dbetas")] if traits.beta_learned else []
    values = [V] if traits.beta_learned else []
    given = ("new", "x", "states", "dstates")
    operands = [Q, K, *values, DO, *map(Operand, given), *builder.decays, *builder.betas]
    operands += [Operand("dq_parts"), Operand("dk_parts"), *dG, *dbetas, Operand("dv")]
    signature = chunk_signature(builder.plan, "_gradients_hopper_kernel", operands, numbers=SCALE)
    return Gradients(
        signature,
        RowChunk(),
        traits.decays,
        traits.betas,
        traits.decay_learned,
        traits.beta_learned,
    )


def _launcher(
    builder: Builder,
    of: OfBackward,
    pairs: Equations,
    gradients: Gradients,
    gluon: GradientsInGluon | None,
    first: list[Launched],
    rest: list[Launched],
) -> LauncherBack:
    plan, spec, steps = builder.plan, builder.spec, Steps(builder.plan)
    size = spec.head_dim
    of_pairs = {"P": steps.made()["P"], "factors": factors_of(steps, pairs)}
    read = [one.name for one in pairs.signature.operands[2:]]
    made = steps.made_by_backward() | _parts(plan, steps, gluon)
    made = {n: one for n, one in made.items() if n not in ("dstates", "do")}
    return LauncherBack(
        operands=of.operands,
        state_shape=f"(N, HV, {size.qk}, {size.v})",
        state_dtype=TORCH_DTYPES[spec.state_dtype],
        BT=spec.chunk_size,
        K=size.qk,
        V=size.v,
        first=first,
        mapped=of.mapped,
        pairs=_with(steps.step("pairs", pairs.signature, count("slots", "H"), of_pairs), OPTIONS),
        factors=pairs.factors,
        of_states_back=[*read, "inverse", "x", "dstates"],
        of_gradients=[one.name for one in gradients.signature.operands],
        in_gluon=gluon is not None,
        gradients=_with(
            steps.step("gradients", gradients.signature, count("slots", "HV"), made),
            ("num_warps=8", "num_stages=1"),
        ),
        steps=rest,
        sums=steps.sums(),
        results=of.results,
    )


def _parts(
    plan: LinearAttentionPlan, steps: Steps, gluon: GradientsInGluon | None
) -> dict[str, Made]:
    """Return the gradients of decays and betas, as parts that a later kernel adds."""
    of = GradientsInGluon.PARTS if gluon is not None else {"dG": 1, "dbetas": 1}
    chunk = plan.spec.chunk_size
    return {n: steps.new(n, parts, "slots", "HV", chunk, dtype="fp32") for n, parts in of.items()}


def _with(step: Step, options: tuple[str, ...]) -> Launched:
    return Launched(
        step.kernel, step.programs, step.made, step.arguments, step.after, options=options
    )
