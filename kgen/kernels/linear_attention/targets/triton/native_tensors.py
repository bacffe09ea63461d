"""The tensors of a call of linear attention from C."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.plan.tiles import tile_tables
from kgen.kernels.linear_attention.targets.triton.counts import Count, Made
from kgen.kernels.linear_attention.targets.triton.gradients import BackwardKernels
from kgen.kernels.linear_attention.targets.triton.kernels import Kernels
from kgen.kernels.linear_attention.targets.triton.steps import Steps
from kgen.targets.code import Code, Name, op, row
from kgen.targets.native import DTYPES, WORDS, Tensor, fixed, member

FAR_TOKENS, FAR_COLUMNS = 24, 23
"""Limits of strides, as powers of two: kernels multiply positions by strides in 32 bits."""
CALLED = {"slots": "chunks"}
"""Sizes that have another name in headers."""
ENDS = row("add", Name("N"), fixed(1))
"""The size of the tensor with the ends of sequences."""
MEMBERS = (
    *("q", "k", "v", "o", "cu_seqlens", "scale", "initial_state", "final_state", "chunk_states"),
    *("saved", "saved_apart", "do_", "dfinal_state", "dq", "dk", "dv", "dinitial_state"),
    *("state", "token_states", "token_states_bf16"),
)
"""The members of the struct of arguments, apart from buffers and their gradients."""


@dataclass(frozen=True)
class Argument(Tensor):
    """A tensor among the arguments of a call."""

    stride: str = ""
    """The first name of its strides in kernels; empty if they take none."""
    by_token: bool = False
    """True if it has a stride of tokens."""

    @property
    def numel(self) -> str:
        """The number of elements, as a C expression."""
        return " * ".join(self.sizes)


@dataclass(frozen=True)
class Room:
    """A tensor in a workspace, or among the tensors that forward saves."""

    name: str
    bytes: str
    """The number of bytes, as a C expression."""
    dtype: str


@dataclass(frozen=True)
class Learned:
    """A tensor with the gradient of a buffer, or with terms of it."""

    argument: Argument
    buffer: str
    """The name of the buffer for callers."""
    sums: bool
    """True if its first dimensions are parts, which the caller adds up."""


@dataclass(frozen=True)
class Arguments:
    """The tensors of all passes."""

    inputs: tuple[Argument, ...]
    """The floating-point tensors that all passes read."""
    cu_seqlens: Argument | None
    o: Argument
    initial_state: Argument
    final_state: Argument
    chunk_states: Argument
    do: Argument
    dfinal_state: Argument
    gradients: tuple[Argument, ...]
    """dq, dk and dv."""
    dinitial_state: Argument
    learned: tuple[Learned, ...]
    state: Argument
    token_states: Argument
    kept: tuple[Argument, ...] = ()
    """The tensors of `saved`, for callers that keep them apart."""

    @property
    def members(self) -> Mapping[str, str]:
        """The members of tensors that callers allocate, by the names in kernels."""
        found = (*self.gradients, *(one.argument for one in self.learned), self.o)
        return {one.name: one.member for one in found}


def arguments_of(
    plan: LinearAttentionPlan, called: Mapping[str, str], kept: Sequence[Made] = ()
) -> Arguments:
    """Return the tensors of a plan.

    Args:
        called: The names of buffers for callers.
        kept: The tensors that forward keeps for backward.
    """
    spelled = _Spelled(plan, called, kept)
    states = ("N", "HV", *spelled.of_state)
    within = ("slots", "HV") if plan.spec.varlen else ("B", "NT", "HV")
    dtype = plan.spec.state_dtype
    final = "written unless data is NULL: the state after each sequence"
    chunk = f"written unless data is NULL: the state after each {plan.spec.chunk_size} tokens of a "
    chunk += "sequence, and after its last token"
    after = "written unless data is NULL: the state after each token"
    token = spelled.argument(
        "token_states", ("B", "T", "HV", *spelled.of_state), "fp32", after, stride="states"
    )
    return Arguments(
        inputs=tuple(spelled.inputs()),
        cu_seqlens=spelled.cu_seqlens() if plan.spec.varlen else None,
        o=spelled.argument("o", spelled.of_values, plan.spec.dtype, "written", contiguous=True),
        initial_state=spelled.argument(
            "initial_state", states, dtype, "NULL for zeros", contiguous=True
        ),
        final_state=spelled.argument("final_state", states, dtype, final, contiguous=True),
        chunk_states=spelled.argument(
            "chunk_states", (*within, *spelled.of_state), dtype, chunk, contiguous=True
        ),
        do=spelled.argument("do", spelled.of_values, plan.spec.dtype, stride="do"),
        dfinal_state=spelled.argument(
            "dfinal_state", states, dtype, "NULL for zeros", contiguous=True
        ),
        gradients=tuple(spelled.gradients()) if plan.backward else (),
        dinitial_state=spelled.argument(
            "dinitial_state", states, dtype, "written unless data is NULL", contiguous=True
        ),
        learned=tuple(spelled.learned()) if plan.backward else (),
        state=spelled.argument("state", states, dtype, "updated in place", stride="state"),
        token_states=token,
        kept=tuple(map(spelled.kept, kept)),
    )


class _Spelled:
    """Build the tensors of one plan."""

    def __init__(
        self, plan: LinearAttentionPlan, called: Mapping[str, str], kept: Sequence[Made] = ()
    ) -> None:
        self.plan, self.spec, self.called = plan, plan.spec, called
        self.taken = {*MEMBERS, *(f"saved_{one.name}" for one in kept)}
        K, V = plan.spec.head_dim.qk, plan.spec.head_dim.v
        self.of_state: tuple[str | int, ...] = (K, V)
        self.of_values: tuple[str | int, ...] = ("B", "T", "HV", V)
        self.of_keys: tuple[str | int, ...] = ("B", "T", "H", K)

    def own(self, label: str) -> str:
        """Return a member for a name of the user, and take it."""
        found = member(label, self.taken)
        self.taken.add(found)
        return found

    def argument(
        self,
        name: str,
        sizes: tuple[str | int, ...],
        dtype: str,
        said: str = "",
        *,
        contiguous: bool = False,
        stride: str = "",
    ) -> Argument:
        """Return a tensor that each spec has. `said` follows its shape and dtype."""
        words = f"[{', '.join(CALLED.get(str(n), str(n)) for n in sizes)}] {WORDS[dtype]}"
        words += ", contiguous" if contiguous else ""
        words += f": {said}" if said else ""
        first = f"stride_{stride}_b" if stride else ""
        own, widest = member(name, ()), f"(INT64_C(1) << {FAR_COLUMNS}) - 1"
        extents = tuple(fixed(n) if isinstance(n, int) else Name(n) for n in sizes)
        by_token = bool(stride) and len(sizes) > 2 and sizes[1] == "T"
        return Argument(name, name, own, extents, dtype, words, contiguous, widest, first, by_token)

    def inputs(self) -> Iterator[Argument]:
        """Yield q, k, v and the buffers."""
        for name, sizes in (("q", self.of_keys), ("k", self.of_keys), ("v", self.of_values)):
            yield self.argument(name, sizes, self.spec.dtype, stride=name)
        for name in self.plan.buffers:
            label, buffer = self.called.get(name, name), self.spec.buffers[name]
            words = f"[{', '.join(map(str, self.shape(name)))}] {WORDS[buffer.dtype]}"
            first = f"stride_{name}_{'b' if buffer.tokens else _axis(buffer.shape[0])}"
            yield Argument(
                name,
                label,
                self.own(label),
                tuple(fixed(n) if isinstance(n, int) else Name(n) for n in self.shape(name)),
                buffer.dtype,
                words,
                widest=f"(INT64_C(1) << {FAR_COLUMNS}) - 1",
                stride=first,
                by_token=buffer.tokens,
            )

    def shape(self, name: str) -> tuple[str | int, ...]:
        """Return the sizes of a buffer, or of q, k or v."""
        if name in ("q", "k"):
            return self.of_keys
        if name == "v":
            return self.of_values
        K, V = self.of_state
        sizes: dict[str, tuple[str | int, ...]] = {
            "T": ("B", "T"),
            "HV": ("HV",),
            "K": (K,),
            "V": (V,),
        }
        return tuple(one for size in self.spec.buffers[name].shape for one in sizes[size])

    def cu_seqlens(self) -> Argument:
        """Return the offsets of packed sequences. Machine code exists for int32."""
        said = (
            "[N + 1] int32, contiguous: where each sequence begins, from 0 on, and the last one "
            "ends; B is 1; tokens after it give zeros"
        )
        name = "cu_seqlens"
        return Argument(name, name, name, (ENDS,), "int32", said, contiguous=True)

    def gradients(self) -> Iterator[Argument]:
        """Yield the gradients of q, k and v."""
        for name in ("q", "k", "v"):
            sizes = self.shape(name)
            yield self.argument(f"d{name}", sizes, self.spec.dtype, "written", contiguous=True)

    def learned(self) -> Iterator[Learned]:
        """Yield the gradients of buffers, or the terms of which the caller computes the sum."""
        steps = Steps(self.plan)
        for name in self.plan.learned:
            made = list(steps.gradients_of(name))
            for number, one in enumerate(made):
                yield self._learned(name, one, number, len(made))

    def kept(self, made: Made) -> Argument:
        """Return a tensor that forward keeps for backward."""
        sizes = [one.factors for one in made.shape] or [(n,) for n in self.shape(made.like)]
        dtype, own = made.dtype or self.spec.dtype, f"saved_{made.name}"
        words = (
            f"[{', '.join(CALLED.get(str(n), str(n)) for (n,) in sizes)}] {WORDS.get(dtype, dtype)}"
        )
        extents = tuple(fixed(n) if isinstance(n, int) else Name(str(n)) for (n,) in sizes)
        return Argument(
            made.name, own, own, extents, dtype, f"{words}, contiguous", contiguous=True
        )

    def _learned(self, name: str, made: Made, number: int, of: int) -> Learned:
        label, parts = self.called.get(name, name), bool(made.shape)
        own = f"d{label}" + (f"_{number + 1}" if number else "")
        sizes = tuple(_extent(self.plan, one) for one in made.shape)
        shown = [_words(self.plan, one) for one in made.shape]
        rest = self.shape(name) if not parts or made.behind else ()
        sizes += tuple(fixed(n) if isinstance(n, int) else Name(n) for n in rest)
        shown += [str(n) for n in rest]
        dtype = made.dtype or self.spec.buffers[name].dtype
        said = "written"
        if parts:
            heads = "two dimensions" if Steps(self.plan).shared(name) else "dimension"
            said += f", parts whose sum over the first {heads} is "
            said += f"a term of the gradient of {label}" if of > 1 else f"the gradient of {label}"
        elif of > 1:
            said += f", a term of the gradient of {label}: add all terms"
        words = f"[{', '.join(shown)}] {WORDS[dtype]}, contiguous: {said}"
        found = Argument(
            made.name, own, self.own(own), sizes, dtype, words, contiguous=True, widest="INT32_MAX"
        )
        return Learned(found, label, parts)


def _axis(size: str) -> str:
    return {"HV": "h", "K": "c", "V": "c"}[size]


def _extent(plan: LinearAttentionPlan, one: Count) -> Code:
    """Return a size of parts of a gradient, for a call from C."""
    match one.factors:
        case (str(name),):
            return Name(name)
        case (int(number),):
            return fixed(number)
    rows = rows_of(plan)
    blocks = op(f"({{0}} + {rows - 1}) / {rows}", Name("T"))
    return op("{0} * ({1})", Name("B"), blocks)


def _words(plan: LinearAttentionPlan, one: Count) -> str:
    """Return a size of parts of a gradient, for readers."""
    match one.factors:
        case (str(name),):
            return CALLED.get(name, name)
        case (int(number),):
            return str(number)
    return f"B * ceil(T / {rows_of(plan)})"


def rows_of(plan: LinearAttentionPlan) -> int:
    """Return the rows of each part of gradients of the output's buffers, the same on all chips."""
    found = {tile.ROWS for tile in tile_tables(plan)["finish_back"].values()}
    (rows,) = found
    assert rows is not None
    return rows


class Rooms:
    """The tensors that the launcher in C places in memory of the caller."""

    def __init__(
        self,
        plan: LinearAttentionPlan,
        kernels: Kernels,
        backward: BackwardKernels | None,
    ) -> None:
        self.plan, self.steps = plan, Steps(plan)
        self.spelled = _Spelled(plan, {})
        self.kernels, self.of_backward = kernels, backward

    def kept(self) -> tuple[Made, ...]:
        """Return the tensors that forward keeps for backward."""
        if not (self.plan.backward and self.plan.spec.saves_states):
            return ()
        held = set(self.steps.held(self.kernels))
        return tuple(made for made in self._of_forward() if made.name in {*held, "o_raw"})

    def saved(self) -> tuple[Room, ...]:
        """Return the places of the tensors that forward keeps for backward."""
        return tuple(map(self.room, self.kept()))

    def forward(self) -> tuple[Room, ...]:
        """Return the tensors that forward does not keep. Backward computes them again if forward
        keeps nothing.
        """
        kept = {made.name for made in self.kept()}
        return tuple(self.room(made) for made in self._of_forward() if made.name not in kept)

    def _of_forward(self) -> Iterator[Made]:
        if self.plan.spec.varlen:
            yield self.steps.new("seqs", "slots", dtype="int32")
        for step in self.steps.chunks(self.kernels):
            yield from (one for one in step.tensors if one.name != "ends")
        if self.plan.finishes:
            yield Made("o_raw", "v")

    def backward(self) -> tuple[Room, ...]:
        """Return the tensors that only backward computes."""
        if self.of_backward is None:
            return ()
        first = self.steps.first(self.kernels, self.of_backward)
        steps = [*first, *self.steps.backward(self.of_backward)]
        given = {"o", "dq", "dk", "dv"}
        given |= {one.name for n in self.plan.learned for one in self.steps.gradients_of(n)}
        made = {one.name: one for step in steps for one in step.tensors if one.name not in given}
        return tuple(map(self.room, made.values()))

    def decode(self) -> tuple[Room, ...]:
        """Return the tensors of a step: o before the norm, which is not rounded."""
        (made,) = self.steps.decode(self.kernels).tensors
        return (self.room(replace(made, name="o_raw")),) if self.plan.finishes else ()

    def room(self, made: Made) -> Room:
        """Return the place of a tensor."""
        dtype = made.dtype or self.dtype(made.like)
        sizes = [one.in_c() for one in made.shape] or self.dims(made.like)
        sizes += [] if made.behind is None else self.dims(made.behind)
        name, size = DTYPES[dtype]
        return Room(made.name, " * ".join([str(size), *sizes]), name)

    def dtype(self, name: str) -> str:
        """Return the dtype of an input."""
        spec = self.plan.spec
        return spec.buffers[name].dtype if name in spec.buffers else spec.dtype

    def dims(self, name: str) -> list[str]:
        """Return the sizes of an input as C expressions."""
        return [f"p->{n}" if isinstance(n, str) else str(n) for n in self.spelled.shape(name)]
