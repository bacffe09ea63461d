"""The kernels of linear attention in Triton: one dataclass for each of their templates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.schedules import keeps
from kgen.kernels.linear_attention.targets.triton.finishing import Finish, Finishing
from kgen.kernels.linear_attention.targets.triton.functions import (
    ROWS,
    STEP,
    STEP_VALUES,
    TILE,
    VALUES,
    At,
    Functions,
)
from kgen.kernels.linear_attention.targets.triton.signatures import (
    K,
    KernelSignature,
    Operand,
    Q,
    V,
    buffer_operand,
    chunk_signature,
    sequence_signature,
)
from kgen.targets.code import Code, Statement
from kgen.targets.template import Template


@dataclass(frozen=True)
class RowChunk(Template):
    """Statements that find a chunk in a batch of sequences of one length."""

    template: ClassVar[str] = "linear_attention/triton/_row_chunk.j2"

    batch: bool = True
    """True if the kernel reads `batch`, the row of its tensors."""


@dataclass(frozen=True)
class PackedChunk(Template):
    """Statements that find a chunk in packed sequences."""

    template: ClassVar[str] = "linear_attention/triton/_packed_chunk.j2"

    batch: bool = True
    """True if the kernel reads `batch`, the row of its tensors."""


@dataclass(frozen=True)
class RowSequence(Template):
    """Statements that find a sequence in a batch of sequences of one length."""

    template: ClassVar[str] = "linear_attention/triton/_row_sequence.j2"

    slot: bool = True
    """True if the kernel reads `slot`, the first chunk."""


@dataclass(frozen=True)
class PackedSequence(Template):
    """Statements that find a packed sequence."""

    template: ClassVar[str] = "linear_attention/triton/_packed_sequence.j2"

    slot: bool = True
    """True if the kernel reads `slot`, the first chunk."""


@dataclass(frozen=True)
class Traits:
    """The properties of a spec by which templates choose statements."""

    by_head: bool
    """True if the decay is one number for each token and head."""
    by_column: bool
    """True if the decay varies along the columns of the keys."""
    decays: bool
    delta: bool
    betas: bool
    """True if updates have a factor."""
    decay_learned: bool
    """True if a buffer of the decay has a gradient."""
    by_head_learned: bool
    beta_learned: bool
    rows: bool
    """True if the forward kernels of chunks index rows of intermediate tensors."""


def traits_of(plan: LinearAttentionPlan) -> Traits:
    """Return the properties of a plan."""
    decays, learned = "decay" in plan.formulas, plan.spec.buffers.keys()
    changes = {f: bool(learned & of.slopes.keys()) for f, of in plan.formulas.items()}
    decay_learned = changes.get("decay", False)
    return Traits(
        by_head=decays and not plan.by_column,
        by_column=plan.by_column,
        decays=decays,
        delta=plan.delta,
        betas="beta" in plan.formulas,
        decay_learned=decay_learned,
        by_head_learned=decay_learned and not plan.by_column,
        beta_learned=changes.get("beta", False),
        rows=decays or plan.delta or "beta" in plan.formulas,
    )


@dataclass(frozen=True)
class Kernel(Template):
    """A kernel of chunks."""

    signature: KernelSignature
    chunk: Template
    """Statements that set `batch`, `first` (first token) and `end` (end of the tokens)."""
    traits: Traits


@dataclass(frozen=True)
class Elements:
    """A value of an expression, and the loads of the buffers that it reads."""

    reads: list[Statement]
    value: Code


@dataclass(frozen=True)
class Gates(Kernel):
    """The kernel that sums up decays, and computes the factors of updates."""

    template: ClassVar[str] = "linear_attention/triton/_gates.j2"

    decay: Elements | None
    beta: Elements | None


@dataclass(frozen=True)
class FeatureMap(Template):
    """The kernel that applies a feature map and the norm to queries or keys."""

    template: ClassVar[str] = "linear_attention/triton/_map.j2"

    signature: KernelSignature
    of: str
    """`q` or `k`."""
    value: Code | None
    eps: str | None
    """The number under the root of the norm; None without a norm."""


@dataclass(frozen=True)
class Pairs(Kernel):
    """The kernel of products of queries and keys whose decay varies along columns."""

    template: ClassVar[str] = "linear_attention/triton/_pairs.j2"

    levels: int
    """The number of bits of an index in a chunk."""


@dataclass(frozen=True)
class Equations(Kernel):
    """The kernel of the matrix A of the triangular system of a chunk."""

    template: ClassVar[str] = "linear_attention/triton/_equations.j2"


@dataclass(frozen=True)
class Solve(Kernel):
    """The kernel that multiplies values and keys by the inverse of a chunk."""

    template: ClassVar[str] = "linear_attention/triton/_solve.j2"
    optional_fields: ClassVar[tuple[str, ...]] = ("optional_values",)
    FLAG: ClassVar[str] = "VALUES"
    """The constant of a kernel whose launch may leave out U."""

    optional_values: bool = False
    """True if the kernel has this constant."""


@dataclass(frozen=True)
class Inverse(Template):
    """The kernel that inverts the triangular matrix of a chunk, and its functions."""

    template: ClassVar[str] = "linear_attention/triton/_inverse.j2"

    signature: KernelSignature
    blocks: int
    """The number of blocks of 16 rows."""
    levels: list[Level]
    """The steps up to inverses of half of the rows."""
    last: int
    """Half of the rows, or 0 if the matrix is one block."""


@dataclass(frozen=True)
class Level:
    """One step from inverses of blocks to inverses of blocks of twice the size."""

    pairs: int
    size: int


@dataclass(frozen=True)
class States(Kernel):
    """The kernel that computes the state before each chunk."""

    template: ClassVar[str] = "linear_attention/triton/_states.j2"

    packed: bool
    """True if sequences are packed, so that slots may have no tokens."""


@dataclass(frozen=True)
class Output(Kernel):
    """The kernel of the output."""

    template: ClassVar[str] = "linear_attention/triton/_output.j2"

    skip: Elements | None


@dataclass(frozen=True)
class Decode(Kernel):
    """The kernel that steps the state of a sequence."""

    template: ClassVar[str] = "linear_attention/triton/_decode.j2"

    reads: list[Statement]
    """The loads of buffers of the decay and of beta."""
    decay: Code | None
    beta: Code | None
    q_map: Code | None
    k_map: Code | None
    eps: str | None
    skip: Elements | None


@dataclass(frozen=True)
class Kernels:
    """The kernels of forward, in the order of their launches, and of decoding."""

    gates: Gates | None
    q_map: FeatureMap | None
    k_map: FeatureMap | None
    pairs: Pairs | None
    equations: Equations | None
    inverse: Inverse | None
    solve: Solve | None
    states: States
    output: Output
    finish: Finish | None
    decode: Decode | None


SCALE = ("scale",)


class Builder:
    """Build the kernels of one plan."""

    def __init__(self, plan: LinearAttentionPlan, functions: Functions) -> None:
        self.plan, self.spec, self.functions = plan, plan.spec, functions
        self.traits = traits_of(plan)
        self.chunk = PackedChunk() if plan.spec.varlen else RowChunk()
        self.sequence = PackedSequence() if plan.spec.varlen else RowSequence()
        self.eps = None if plan.spec.norm_eps is None else repr(plan.spec.norm_eps)
        self.decays = [Operand("G")] if self.traits.decays else []
        self.betas = [Operand("betas")] if self.traits.betas else []

    def kernels(self) -> Kernels:
        """Return all kernels."""
        delta, column = self.traits.delta, self.traits.by_column
        return Kernels(
            gates=self.gates() if self.decays or self.betas else None,
            q_map=self.feature_map("q"),
            k_map=self.feature_map("k"),
            pairs=self.pairs() if column else None,
            equations=self.equations() if delta and not column else None,
            inverse=inverse(self.spec.chunk_size) if delta else None,
            solve=self.solve() if delta else None,
            states=self.states(),
            output=self.output(),
            finish=Finishing(self.plan, self.functions).forward() if self.plan.finishes else None,
            decode=self.decode() if self.plan.decode else None,
        )

    def elements(self, field: str, at: At) -> Elements | None:
        """Return an expression at some elements, or None if the spec lacks it."""
        formula = self.plan.formulas.get(field)
        if formula is None:
            return None
        return Elements(at.reads(self.plan, formula.read), self.functions.call(field, at))

    def buffers(self, *fields: str) -> list[Operand]:
        """Return the buffers that expressions read."""
        read = {n for f in fields if f in self.plan.formulas for n in self.plan.formulas[f].read}
        return [buffer_operand(self.plan, name) for name in self.plan.buffers if name in read]

    def by_token(self, *fields: str) -> bool:
        """Return True if expressions read a buffer that differs by token."""
        return any(self.spec.buffers[one.name].tokens for one in self.buffers(*fields))

    def gates(self) -> Gates:
        operands = [*self.buffers("decay", "beta"), *self.decays, *self.betas]
        tile = ("BLOCK_K",) if self.traits.by_column else ()
        return Gates(
            chunk_signature(self.plan, "_gates_kernel", operands, constants=("HV",), tile=tile),
            replace(self.chunk, batch=self.by_token("decay", "beta")),
            self.traits,
            decay=self.elements("decay", TILE if self.traits.by_column else ROWS),
            beta=self.elements("beta", ROWS),
        )

    def feature_map(self, of: str) -> FeatureMap | None:
        """Return the kernel of a feature map, or None if it would change nothing."""
        field, eps = f"{of}_map", self.eps
        mapped = field in self.plan.formulas
        if not mapped and eps is None:
            return None
        signature = KernelSignature(
            f"_{field}_kernel",
            (Operand(of, "bthc"), Operand(f"{of}_mapped")),
            ("T",),
            ("H",),
            ("ROWS",),
        )
        value = self.functions.call(field, ROWS) if mapped else None
        return FeatureMap(signature, of, value, eps)

    def pairs(self) -> Pairs:
        equations = [*self.betas, Operand("A")] if self.traits.delta else []
        operands = [Q, K, *self.decays, Operand("P"), *equations]
        signature = chunk_signature(
            self.plan, "_pairs_kernel", operands, numbers=SCALE, tile=("BLOCK_K",)
        )
        levels = self.spec.chunk_size.bit_length() - 1
        return Pairs(signature, self.chunk, self.traits, levels)

    def equations(self) -> Equations:
        operands = [K, *self.decays, *self.betas, Operand("A")]
        signature = chunk_signature(self.plan, "_equations_kernel", operands, tile=("BLOCK_K",))
        return Equations(signature, self.chunk, self.traits)

    def solve(self) -> Solve:
        results = [Operand("W"), Operand("U")]
        operands = [K, V, *self.decays, *self.betas, Operand("inverse"), *results]
        optional = keeps(self.plan)
        signature = chunk_signature(
            self.plan,
            "_solve_kernel",
            operands,
            constants=("H", "HV", *((Solve.FLAG,) if optional else ())),
            tile=("BLOCK_K", "BLOCK_V"),
        )
        return Solve(signature, self.chunk, self.traits, optional)

    def states(self) -> States:
        delta = self.traits.delta
        updates = [Operand("W"), Operand("U"), Operand("new")] if delta else [V, *self.betas]
        ends = [Operand(n) for n in ("states", "ends", "initial_state", "final_state")]
        signature = sequence_signature(
            self.plan,
            "_states_kernel",
            [K, *updates, *self.decays, *ends],
            numbers=("N", "NT") if self.spec.varlen else (),
            constants=("H", "HV", "INITIAL", "FINAL", "ENDS"),
            tile=("BLOCK_V",),
        )
        return States(signature, self.sequence, self.traits, self.spec.varlen)

    def output(self) -> Output:
        """Return the kernel of the output."""
        traits, skip = self.traits, self.elements("skip", VALUES)
        keys = [Operand("P")] if traits.by_column else [K]
        through = [Operand("new"), *([V] if skip else [])]
        updates = through if traits.delta else [V, *self.betas]
        operands = [Q, *keys, *updates, *self.decays, Operand("states"), *self.buffers("skip")]
        signature = chunk_signature(
            self.plan,
            "_output_kernel",
            [*operands, Operand("o")],
            numbers=SCALE,
            tile=("BLOCK_K", "BLOCK_V"),
        )
        return Output(signature, self.chunk, traits, skip)

    def decode(self) -> Decode:
        formulas, functions = self.plan.formulas, self.functions
        first = {n for f in ("decay", "beta") if f in formulas for n in formulas[f].read}
        skip = self.elements("skip", STEP_VALUES)
        if skip is not None:
            rest = formulas["skip"].read - first
            skip = Elements(STEP_VALUES.reads(self.plan, rest), skip.value)

        def called(field: str, x: str = "x") -> Code | None:
            at = At(STEP.token, STEP.live, STEP.columns, STEP.suffix, x)
            return functions.call(field, at) if field in formulas else None

        operands = [Q, K, V, *self.buffers("decay", "beta", "skip")]
        signature = sequence_signature(
            self.plan,
            "_decode_kernel",
            [
                *operands,
                Operand("state", "bhkv"),
                Operand("states", "bthkv", optional=True),
                Operand("o"),
            ],
            numbers=SCALE,
            constants=("H", "HV", "STATES"),
            tile=("BLOCK_V",),
        )
        return Decode(
            signature,
            replace(self.sequence, slot=False),
            self.traits,
            reads=STEP.reads(self.plan, first),
            decay=called("decay"),
            beta=called("beta"),
            q_map=called("q_map", "q"),
            k_map=called("k_map", "k"),
            eps=self.eps,
            skip=skip,
        )


def inverse(chunk: int) -> Inverse:
    """Return the kernel that inverts a matrix of `chunk` rows."""
    last = chunk // 2 if chunk > 16 else 0
    sizes: Iterable[int] = (size for size in (16, 32) if size < last)
    levels = [Level(chunk // 2 // size, size) for size in sizes]
    operands = (Operand("A"), Operand("inverse"))
    return Inverse(
        KernelSignature("_inverse_kernel", operands, (), (), ()), chunk // 16, levels, last
    )
