"""The kernels of the backward pass of linear attention in Triton: one dataclass for each of their
templates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from kgen.expr.differentiate import is_one
from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.targets.triton.finishing import (
    FinishBack,
    Finishing,
    gradient_store,
)
from kgen.kernels.linear_attention.targets.triton.functions import (
    ROWS,
    TILE,
    VALUES,
    At,
    Functions,
)
from kgen.kernels.linear_attention.targets.triton.kernels import (
    SCALE,
    Builder,
    Elements,
    Kernel,
)
from kgen.kernels.linear_attention.targets.triton.signatures import (
    TOKENS,
    K,
    KernelSignature,
    Operand,
    Q,
    V,
    chunk_signature,
    sequence_signature,
)
from kgen.targets.code import Code, Name, Statement
from kgen.targets.template import Template

DO = Operand("do", TOKENS)
BLOCKS = ("BLOCK_K", "BLOCK_V")
LOG_OF_2 = math.log(2)
Terms = list[tuple[str, bool]]
"""Terms of a gradient. A term with True has columns."""


@dataclass(frozen=True)
class ValuesBack(Kernel):
    """The kernel of the gradients of updates from the output of their chunk."""

    template: ClassVar[str] = "linear_attention/triton/_values_back.j2"


@dataclass(frozen=True)
class StatesBack(Kernel):
    """The kernel of the gradients of states, which runs from the last chunk to the first."""

    template: ClassVar[str] = "linear_attention/triton/_states_back.j2"


@dataclass(frozen=True)
class KeysBack(Kernel):
    """The kernel of the gradients of q and k for each value head."""

    template: ClassVar[str] = "linear_attention/triton/_keys_back.j2"


@dataclass(frozen=True)
class SolveBack(Kernel):
    """The kernel of the gradients of the triangular system."""

    template: ClassVar[str] = "linear_attention/triton/_solve_back.j2"

    skip: Elements | None
    """The derivative of the skip term with respect to v."""


@dataclass(frozen=True)
class UpdatesBack(Kernel):
    """The kernel of dv without the delta rule."""

    template: ClassVar[str] = "linear_attention/triton/_updates_back.j2"

    reads_v: bool
    skip: Elements | None
    """The derivative of the skip term with respect to v."""


@dataclass(frozen=True)
class PairsBack(Kernel):
    """The kernel of the gradients of pairs of tokens, with a decay that varies along columns."""

    template: ClassVar[str] = "linear_attention/triton/_pairs_back.j2"


@dataclass(frozen=True)
class GatesBack(Kernel):
    """The kernel of the gradients of the buffers of the decay and of beta."""

    template: ClassVar[str] = "linear_attention/triton/_gates_back.j2"

    decay: Elements | None
    beta: Elements | None
    summed: list[str]
    """The gradients that are sums over columns."""
    by_column: list[str]
    """Statements for a block of columns."""
    by_row: list[str]
    """Statements for the tokens of a chunk."""


@dataclass(frozen=True)
class SkipBack(Template):
    """The kernel of the gradients of the buffers of the skip term."""

    template: ClassVar[str] = "linear_attention/triton/_skip_back.j2"

    signature: KernelSignature
    chunk: Template
    reads: list[Statement]
    stores: list[str]


@dataclass(frozen=True)
class MapBack(Template):
    """The kernel that adds the gradients of q or k over value heads, through the feature map."""

    template: ClassVar[str] = "linear_attention/triton/_map_back.j2"

    signature: KernelSignature
    chunk: Template
    of: str
    """`q` or `k`."""
    words: str
    mapped: bool
    value: Code | None
    slope: Code | None
    eps: str | None


@dataclass(frozen=True)
class BackwardKernels:
    """The kernels of backward, in the order of their launches."""

    finish_back: FinishBack | None
    values_back: ValuesBack
    states_back: StatesBack
    keys_back: KeysBack
    solve_back: SolveBack | None
    updates_back: UpdatesBack | None
    pairs_back: PairsBack | None
    gates_back: GatesBack | None
    skip_back: SkipBack | None
    q_map_back: MapBack
    k_map_back: MapBack


def learned(plan: LinearAttentionPlan, *fields: str) -> list[str]:
    """Return the buffers with gradients through some expressions, in the order of the arguments."""
    found = {n for f in fields if f in plan.formulas for n in plan.formulas[f].slopes}
    return [name for name in plan.learned if name in found]


class BackwardBuilder:
    """Build the kernels of backward for one plan."""

    def __init__(self, builder: Builder, functions: Functions) -> None:
        self.builder, self.functions = builder, functions
        self.plan, self.spec, self.traits = builder.plan, builder.spec, builder.traits
        self.chunk, self.decays, self.betas = builder.chunk, builder.decays, builder.betas
        self.delta = self.traits.delta
        self.dG = [Operand("dG")] if self.traits.decay_learned else []
        self.dbetas = [Operand("dbetas")] if self.traits.beta_learned else []

    def kernels(self) -> BackwardKernels:
        """Return all kernels."""
        gates = learned(self.plan, "decay", "beta")
        return BackwardKernels(
            finish_back=Finishing(self.plan, self.functions).backward()
            if self.plan.finishes
            else None,
            values_back=self.values_back(),
            states_back=self.states_back(),
            keys_back=self.keys_back(),
            solve_back=self.solve_back() if self.delta else None,
            updates_back=None if self.delta else self.updates_back(),
            pairs_back=self.pairs_back() if self.traits.by_column else None,
            gates_back=self.gates_back() if gates else None,
            skip_back=self.skip_back() if learned(self.plan, "skip") else None,
            q_map_back=self.map_back("q"),
            k_map_back=self.map_back("k"),
        )

    def values_back(self) -> ValuesBack:
        """Return the kernel of P^T dO."""
        pairs = [Operand("P")] if self.traits.by_column else [Q, K, *self.decays]
        signature = chunk_signature(
            self.plan,
            "_values_back_kernel",
            [*pairs, DO, Operand("dnew")],
            numbers=() if self.traits.by_column else SCALE,
            constants=("HV",) if self.traits.by_column else ("H", "HV"),
            tile=("BLOCK_V",) if self.traits.by_column else BLOCKS,
        )
        return ValuesBack(signature, self.chunk, self.traits)

    def states_back(self) -> StatesBack:
        """Return the kernel of the gradients of states."""
        solution = [Operand("W")] if self.delta else []
        results = [Operand("dnew"), Operand("dstates")]
        ends = [Operand("dfinal_state"), Operand("dinitial_state")]
        signature = sequence_signature(
            self.plan,
            "_states_back_kernel",
            [Q, K, DO, *self.decays, *solution, *results, *ends],
            numbers=SCALE,
            constants=("H", "HV", "INITIAL", "FINAL"),
            tile=("BLOCK_V",),
        )
        return StatesBack(signature, self.builder.sequence, self.traits)

    def keys_back(self) -> KeysBack:
        """Return the kernel of the gradients of q and k."""
        updates = [Operand("new"), Operand("dnew"), Operand("dW")] if self.delta else []
        updates = updates or [V, *self.betas]
        pairs = [Operand("dP")] if self.traits.by_column else []
        states = [Operand("states"), Operand("dstates")]
        results = [Operand("dq_parts"), Operand("dk_parts"), *self.dG, *pairs]
        signature = chunk_signature(
            self.plan,
            "_keys_back_kernel",
            [Q, K, DO, *updates, *self.decays, *states, *results],
            numbers=SCALE,
            tile=BLOCKS,
        )
        return KeysBack(signature, self.chunk, self.traits)

    def _of_skip(self, x: str) -> Elements | None:
        """Return the derivative of the skip term with respect to v, whose value is `x`."""
        formula = self.plan.formulas.get("skip")
        if formula is None or "v" not in formula.slopes:
            return None
        at = replace(VALUES, x=x, live="live")  # in these kernels, `live` is a column
        names = self.functions.parameters_of(formula.slopes["v"])
        if is_one(formula.slopes["v"]):
            return Elements([], Name("1.0"))
        return Elements(at.reads(self.plan, names), self.functions.slope("skip", "v", at))

    def _skip_slope_reads_v(self) -> bool:
        slope = self.plan.formulas["skip"].slopes["v"]
        return "v" in self.functions.parameters_of(slope)

    def solve_back(self) -> SolveBack:
        """Return the kernel of the gradients of the triangular system."""
        skip = self._of_skip("v.to(tl.float32)")
        through = [DO, *self.builder.buffers("skip")] if skip else []
        equations = [Operand("dA")] if self.traits.by_column else []
        given = [Operand("inverse"), Operand("dnew"), Operand("dW"), Operand("dk_parts")]
        signature = chunk_signature(
            self.plan,
            "_solve_back_kernel",
            [
                *(K, V, *through, *self.decays, *self.betas),
                *(*given, *self.dG, *self.dbetas, *equations, Operand("dv")),
            ],
            tile=BLOCKS,
        )
        return SolveBack(signature, self.chunk, self.traits, skip)

    def updates_back(self) -> UpdatesBack:
        """Return the kernel of dv without the delta rule."""
        skip = self._of_skip("v")
        through = [DO, *self.builder.buffers("skip")] if skip else []
        reads_v = self.traits.beta_learned or (skip is not None and self._skip_slope_reads_v())
        signature = chunk_signature(
            self.plan,
            "_updates_back_kernel",
            [
                *([V] if reads_v else []),
                *(*through, *self.betas, Operand("dnew"), *self.dbetas, Operand("dv")),
            ],
            constants=("HV",),
        )
        return UpdatesBack(signature, self.chunk, self.traits, reads_v, skip)

    def pairs_back(self) -> PairsBack:
        """Return the kernel of the gradients of pairs of tokens."""
        equations = [Operand("dA")] if self.delta else []
        betas = [*self.betas, *self.dbetas] if self.delta else []
        results = [Operand("dq_parts"), Operand("dk_parts"), *self.dG]
        signature = chunk_signature(
            self.plan,
            "_pairs_back_kernel",
            [Q, K, *self.decays, *betas, Operand("dP"), *equations, *results],
            tile=("BLOCK_K",),
        )
        return PairsBack(signature, self.chunk, self.traits)

    # --- buffers ------------------------

    def gates_back(self) -> GatesBack:
        """Return the kernel of the gradients of the buffers of the decay and of beta."""
        traits, names = self.traits, learned(self.plan, "decay", "beta")
        elements = self.builder.elements
        fields = [
            *(["decay"] if traits.decay_learned else []),
            *(["beta"] if traits.beta_learned else []),
        ]
        parts = [
            *(["PARTS"] if traits.by_head and traits.decay_learned else []),
            *(["BETA_PARTS"] if traits.beta_learned else []),
        ]
        signature = chunk_signature(
            self.plan,
            "_gates_back_kernel",
            [
                *(*self.builder.buffers(*fields), *self.dG, *self.dbetas),
                *(Operand(f"grad_{name}") for name in names),
            ],
            constants=("HV", *parts),
            tile=("BLOCK_K",) if traits.by_column and traits.decay_learned else (),
        )
        at = TILE if traits.by_column else ROWS
        terms = {name: list(self._terms(name, at)) for name in names}
        return GatesBack(
            signature,
            self.chunk,
            traits,
            decay=elements("decay", at) if traits.decay_learned else None,
            beta=self._of_beta() if traits.beta_learned else None,
            summed=[f"grad_{n}" for n in names if self._summed(n, terms[n])],
            by_column=[line for n in names for line in self._of_columns(n, terms[n])],
            by_row=[line for n in names for line in self._of_rows(n, terms[n])],
        )

    def _of_beta(self) -> Elements:
        """Return the loads of the buffers that the derivatives of beta read."""
        slopes = self.plan.formulas["beta"].slopes.values()
        read = {one for s in slopes if not is_one(s) for one in self.functions.parameters_of(s)}
        return Elements(ROWS.reads(self.plan, read), self.functions.call("beta", ROWS))

    def _summed(self, name: str, terms: Terms) -> bool:
        """Return True if the gradient of a buffer has terms for columns, but no columns."""
        return self.spec.buffers[name].columns is None and any(wide for _, wide in terms)

    def _of_columns(self, name: str, terms: Terms) -> list[str]:
        """Return the statements of a buffer's gradient for a block of columns."""
        wide = " + ".join(term for term, wide in terms if wide)
        if not wide:
            return []
        if self._summed(name, terms):
            return [f"grad_{name} += tl.sum({wide}, 1)"]
        return [f"grad_{name} = {wide}", gradient_store(self.plan, name, f"grad_{name}", "c")]

    def _of_rows(self, name: str, terms: Terms) -> list[str]:
        """Return the statements of a buffer's gradient for the tokens of a chunk."""
        if self.spec.buffers[name].columns is not None:
            return []
        narrow = [term for term, wide in terms if not wide]
        total = " + ".join([*([f"grad_{name}"] if self._summed(name, terms) else []), *narrow])
        assigned = [f"grad_{name} = {total}"] if narrow else []
        return [*assigned, gradient_store(self.plan, name, f"grad_{name}", "c")]

    def _terms(self, name: str, at: At) -> Iterator[tuple[str, bool]]:
        """Yield the terms of the gradient of a buffer, each with True if it has columns."""
        factor = "" if self.plan.natural else f" * {LOG_OF_2}"
        of = {
            "decay": (at, "kept", f"ddecay{factor}"),
            "beta": (ROWS, "live", "dbeta"),
        }
        for field, (place, guard, change) in of.items():
            if field in self.plan.formulas and name in self.plan.formulas[field].slopes:
                term = self._product(field, name, place, change)
                yield f"tl.where({guard}, {term}, 0.0)", place.columns is not None

    def _product(self, field: str, name: str, at: At, change: str) -> str:
        slope = self.plan.formulas[field].slopes[name]
        return change if is_one(slope) else f"{change} * {self.functions.slope(field, name, at)}"

    def skip_back(self) -> SkipBack:
        """Return the kernel of the gradients of the buffers of the skip term."""
        names, slopes = learned(self.plan, "skip"), self.plan.formulas["skip"].slopes
        read = {one for name in names for one in self.functions.parameters_of(slopes[name])}
        signature = chunk_signature(
            self.plan,
            "_skip_back_kernel",
            [
                *(V, DO, *self.builder.buffers("skip")),
                *(Operand(f"skip_{name}") for name in names),
            ],
            constants=("HV",),
        )
        stores = []
        for name in names:
            term = f"tl.where(live[:, None], {self._product('skip', name, VALUES, 'do')}, 0.0)"
            wide = self.spec.buffers[name].columns is not None
            stores.append(f"skip_{name} = {term if wide else f'tl.sum({term}, 1)'}")
            stores.append(gradient_store(self.plan, name, f"skip_{name}", "offs_v"))
        return SkipBack(signature, self.chunk, VALUES.reads(self.plan, read), stores)

    # --- queries and keys ------------------------

    def map_back(self, of: str) -> MapBack:
        """Return the kernel that adds gradients over value heads, through the feature map."""
        field, eps = f"{of}_map", self.builder.eps
        formula = self.plan.formulas.get(field)
        mapped = formula is not None or eps is not None
        raw = [Operand(f"{of}_raw", TOKENS)] if mapped else []
        signature = chunk_signature(
            self.plan, f"_{of}_map_back_kernel", [*raw, Operand(f"d{of}_parts"), Operand(f"d{of}")]
        )
        slopes = formula is not None and not is_one(formula.slopes["x"])
        return MapBack(
            signature,
            self.chunk,
            of,
            ", and pass them through the feature map" if mapped else "",
            mapped,
            value=self.functions.call(field, ROWS) if formula is not None else None,
            slope=self.functions.slope(field, "x", ROWS) if slopes else None,
            eps=eps,
        )
