"""Parts of forward and of backward: factors of tokens, the kernel of products of q and k, and
launches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.schedules.hopper.conditions import factors
from kgen.kernels.linear_attention.targets.triton.counts import Made, count
from kgen.kernels.linear_attention.targets.triton.kernels import Builder, RowChunk
from kgen.kernels.linear_attention.targets.triton.signatures import (
    K,
    KernelSignature,
    Operand,
    Q,
    chunk_signature,
)
from kgen.kernels.linear_attention.targets.triton.steps import Step, Steps
from kgen.targets.code import GLUON, Code
from kgen.targets.template import Template

OPTIONS = ("num_warps=4", "num_stages=1")
"""The launch options of the kernel of products of q and k."""


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
class Mapped:
    """q or k in the kernel of the equations, with its feature map and norm."""

    name: str
    mapped: bool
    value: Code | None
    eps: str | None


@dataclass(frozen=True)
class Equations(Template):
    """The kernel that computes P and the factors of tokens. In forward, it also maps q and k, and
    computes A.
    """

    template: ClassVar[str] = "linear_attention/hopper/_equations.j2"

    signature: KernelSignature
    chunk: Template
    operands: list[Mapped]
    decays: bool
    betas: bool
    factors: list[Factor]
    solved: bool
    """True if the kernel computes A."""

    @property
    def count(self) -> int:
        """The number of rows of factors."""
        return len(self.factors)

    @property
    def matrices(self) -> str:
        """The matrices in the docstring."""
        return "matrices A and P" if self.solved else "matrix P"

    @property
    def decayed_a(self) -> str:
        """The products of keys, with their decay."""
        return "a * power" if self.decays else "a"

    @property
    def words(self) -> str:
        """The end of the docstring's first sentence."""
        more = ["the factors of tokens"] if self.factors else []
        more += [f"the mapped rows of {one.name}" for one in self.operands if one.mapped]
        return f", {', '.join(more[:-1])}{' and ' * (len(more) > 1)}{more[-1]}" if more else ""


@dataclass(frozen=True)
class Parts(Template):
    """The parts of a sequence, the stream of the sweeps, and descriptors."""

    template: ClassVar[str] = "linear_attention/hopper/_parts.j2"
    language: ClassVar[str] = GLUON

    BT: int
    blocks: int
    """The number of programs of a head."""
    factors: list[Factor]
    PART: int = 128
    half: int = 66
    """Half of the multiprocessors of an H100 SXM, and of an H200."""


@dataclass(frozen=True)
class GluonKernel(Template):
    """A kernel that processes chunks in order. Each chunk has rows of factors of tokens."""

    language: ClassVar[str] = GLUON

    factors: list[Factor]
    decays: bool
    betas: bool

    @property
    def count(self) -> int:
        """The number of rows of factors."""
        return len(self.factors)

    @property
    def slots_of_factors(self) -> str:
        """The end of a list of names of operands."""
        return ', "factors"' if self.factors else ""

    @property
    def bytes_of_factors(self) -> str:
        """The end of the sum of the bytes of a chunk."""
        return f" + {self.count} * d.factors.block_type.nbytes" if self.factors else ""

    @property
    def descs_of_factors(self) -> str:
        """The parameter of the factors, before others."""
        return "factors_desc, " if self.factors else ""

    @property
    def and_factors(self) -> str:
        """The end of the docstring's sentence."""
        return " and the factors that it needs first" if self.factors else ""


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


BY_TOKEN = ("q", "k", "v", "do", "o", "dv", "q_mapped", "k_mapped")
"""Tensors [batch, token, ...]. Others are [chunk, ...]."""
IN_PARTS = ("dG", "dbetas")
"""Tensors [part of a sum, chunk, ...]."""


def sliced(names: Iterable[str]) -> list[str]:
    """Return the elements of tensors of a part of the sequences, in Python."""
    tokens = dict.fromkeys(BY_TOKEN, "[:, tokens]") | dict.fromkeys(IN_PARTS, "[:, chunks]")
    return [f"{name}{tokens.get(name, '[chunks]')}" for name in names]


def factors_of(steps: Steps, equations: Equations) -> Made:
    """Return the tensor of the factors, [chunk, head and row, token]."""
    rows = count("HV", equations.count)
    return steps.new("factors", "slots", rows, steps.chunk, dtype="fp32")


def tabled(step: Step) -> Launched:
    """Return a launch whose tile is in a table."""
    return Launched(step.kernel, step.programs, step.made, step.arguments, step.after, step.table)


def rows_of(plan: LinearAttentionPlan) -> list[Factor]:
    """Return the rows of factors of a chunk."""
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


def equations(builder: Builder, name: str, maps: Collection[str], *, solved: bool) -> Equations:
    """Return the kernel that maps the rows named in `maps`, and computes A if `solved`."""
    rows = rows_of(builder.plan)
    found = {of: builder.feature_map(of) if of in maps else None for of in ("q", "k")}
    operands = [Q, K, *builder.decays, *builder.betas]
    operands += [Operand(n) for n in (*(["A"] if solved else []), "P")]
    operands += [Operand("factors")] if rows else []
    operands += [Operand(f"{of}_mapped") for of, one in found.items() if one is not None]
    return Equations(
        chunk_signature(builder.plan, name, operands, numbers=("scale",)),
        RowChunk(),
        [
            Mapped(of, True, one.value, one.eps) if one else Mapped(of, False, None, None)
            for of, one in found.items()
        ],
        builder.traits.decays,
        builder.traits.betas,
        rows,
        solved,
    )
