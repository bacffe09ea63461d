"""The tensors of a call of chunk_output from C."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan
from kgen.kernels.chunk_output.plan.tiles import tile_tables
from kgen.targets.code import Code, Name, row
from kgen.targets.native import WORDS, Tensor, fixed, member

ENDS = row("add", Name("N"), fixed(1))
"""The size of the tensor with the ends of sequences."""
FAR_COLUMNS = 23
"""The limit of strides inside a row: kernels multiply positions by strides in 32 bits."""


@dataclass(frozen=True)
class Argument(Tensor):
    """A tensor among the arguments of a call."""

    stride: str = ""
    """The first name of its strides in kernels."""

    @property
    def count(self) -> str:
        """The number of elements, as a C expression."""
        return " * ".join(self.sizes)


@dataclass(frozen=True)
class Packing:
    """The tensors with the offsets of packed sequences, and their chunks.

    Machine code exists for int32.
    """

    cu_seqlens: Argument
    chunk_indices: Argument


@dataclass(frozen=True)
class Gradients:
    """The tensors that only backward uses."""

    do: Argument
    of_keys: tuple[Argument, ...]
    of_values: tuple[Argument, ...]
    """dv and dh."""
    dg: tuple[Argument, ...]
    """The partial sums of the gradient of the gate, if it has one."""
    of_tokens: tuple[Argument, ...]
    """The gradients with rows for tokens after the last sequence."""
    parts: int
    """The most partial sums of dg on any chip: one per block of columns."""

    @property
    def tensors(self) -> tuple[Argument, ...]:
        """All tensors, in the order of the struct."""
        return (self.do, *self.of_keys, *self.of_values, *self.dg)


@dataclass(frozen=True)
class Arguments:
    """The tensors of both passes."""

    inputs: tuple[Argument, ...]
    packing: Packing | None
    o: Argument
    gradients: Gradients | None


def arguments_of(plan: ChunkOutputPlan) -> Arguments:
    """Return the tensors of a plan."""
    spells = _Spelled(plan)
    return Arguments(
        spells.inputs(),
        spells.packing() if plan.spec.varlen else None,
        spells.of_tokens("o", "HV", plan.spec.head_dim.v, "written by forward", contiguous=True),
        spells.gradients() if plan.backward else None,
    )


class _Spelled:
    """Build the tensors of one plan."""

    def __init__(self, plan: ChunkOutputPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.K, self.V, self.BT = plan.spec.head_dim.qk, plan.spec.head_dim.v, plan.spec.chunk_size
        self.padded = plan.spec.v_layout == "chunk_padded"

    def of_tokens(
        self,
        name: str,
        heads: str,
        width: int,
        said: str = "",
        *,
        contiguous: bool = False,
        stride: str = "",
    ) -> Argument:
        """Return the sizes [B, T, heads, width], or the sizes of padded values."""
        padded = self.padded and name in ("v", "dv")
        length: Code = row("mul", Name("NT"), fixed(self.BT)) if padded else Name("T")
        sizes = (Name("B"), length, Name(heads), fixed(width))
        shape = f"[B, {length}, {heads}, {width}]"
        return _argument(
            name, sizes, self.spec.dtype, shape, said, contiguous=contiguous, stride=stride
        )

    def states(self, name: str, said: str, *, contiguous: bool = False) -> Argument:
        """Return the sizes [B, NT, HV, K, V] or [B, NT, HV, V, K]."""
        sides = {"k": self.K, "v": self.V}
        state = [sides[side] for side in self.spec.state_layout]
        sizes = (*_named("B", "NT", "HV"), *map(fixed, state))
        shape = f"[B, NT, HV, {', '.join(map(str, state))}]"
        return _argument(
            name, sizes, self.spec.state, shape, said, contiguous=contiguous, stride="stride_hb"
        )

    def inputs(self) -> tuple[Argument, ...]:
        """Return the floating-point tensors that both passes read."""
        padding = (
            "padded to whole chunks; what is in the padding does not matter" if self.padded else ""
        )
        return (
            self.of_tokens("q", "H", self.K, stride="stride_qb"),
            self.of_tokens("k", "H", self.K, stride="stride_kb"),
            self.of_tokens("v", "HV", self.V, padding, stride="stride_vb"),
            self.states("h", "the state that each chunk begins with"),
            *(self._gate(gate) for gate in self.plan.gates),
        )

    def _gate(self, gate: str) -> Argument:
        dtype = self.spec.gate_dtype
        if gate == "g_gamma":
            return _argument(gate, _named("HV"), dtype, "[HV]", stride="stride_gamma")
        sizes, said = _named("B", "T", "HV"), "summed up inside each chunk"
        # Kernels compute offsets of heads in 64 bits.
        return _argument(
            gate, sizes, dtype, "[B, T, HV]", said, widest="INT32_MAX", stride="stride_gb"
        )

    def packing(self) -> Packing:
        """Return the tensors of packed sequences."""
        ends = (
            "where each sequence begins, from 0 on, and the last one ends; B is 1; tokens "
            "after it give zeros"
        )
        chunks = "(sequence, chunk inside it) of each chunk; NULL where the call is to find them"
        return Packing(
            _argument("cu_seqlens", (ENDS,), "int32", "[N + 1]", ends, contiguous=True),
            _argument(
                "chunk_indices", (Name("NT"), fixed(2)), "int32", "[NT, 2]", chunks, contiguous=True
            ),
        )

    def gradients(self) -> Gradients:
        """Return the tensors that only backward uses.

        Strides in its kernels have the names of gradients here.
        """
        of_keys = tuple(
            self.of_tokens(name, "H", self.K, "written", contiguous=True, stride=stride)
            for name, stride in (("dq", "stride_xb"), ("dk", "stride_yb"))
        )
        dv = self.of_tokens("dv", "HV", self.V, "written", contiguous=True, stride="stride_vb")
        parts = max(self.K // tile.BLOCK_K for tile in tile_tables(self.spec).dqdk.values())
        dg = () if self.plan.slope is None else (self._dg(parts),)
        # If values are padded to chunks, v has no rows for tokens after the last sequence.
        of_tokens = (*of_keys, *dg) if self.padded else (*of_keys, dv, *dg)
        return Gradients(
            do=self.of_tokens("do", "HV", self.V),
            of_keys=of_keys,
            of_values=(dv, self.states("dh", "written", contiguous=True)),
            dg=dg,
            of_tokens=of_tokens,
            parts=parts,
        )

    def _dg(self, parts: int) -> Argument:
        sizes = (fixed(parts), *_named("B", "T", "HV"))
        sums = "parts whose sum is " if parts > 1 else ""
        said = f"written, {sums}the gradient of g"
        return _argument("dg", sizes, "fp32", f"[{parts}, B, T, HV]", said, contiguous=True)


def _named(*names: str) -> tuple[Code, ...]:
    return tuple(map(Name, names))


def _argument(
    name: str,
    sizes: tuple[Code, ...],
    dtype: str,
    shape: str,
    said: str = "",
    *,
    contiguous: bool = False,
    widest: str = f"(INT64_C(1) << {FAR_COLUMNS}) - 1",
    stride: str = "",
) -> Argument:
    """Build a tensor. `said` follows its shape and dtype in its description."""
    words = f"{shape} {WORDS.get(dtype, dtype)}"
    words += ", contiguous" if contiguous else ""
    words += f": {said}" if said else ""
    return Argument(name, name, member(name, ()), sizes, dtype, words, contiguous, widest, stride)
