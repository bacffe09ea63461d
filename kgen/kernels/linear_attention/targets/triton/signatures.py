"""Parameters of the kernels of linear attention, and the launch arguments for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan

CONSTANT = "tckv"
"""The axes whose strides are compile-time constants.

Tokens, columns, and both axes of a state. Constant strides become offsets in load instructions,
and Triton sees which elements are contiguous. As launch arguments, each row address would take two
registers. Loads of a state would read 4 bytes of each sector of 32.
"""
AXES = {"T": "bt", "HV": "h", "K": "c", "V": "c"}
"""The axes of each dimension of a buffer. A dimension of tokens follows the batch."""


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads or writes, and the axes whose strides the kernel takes.

    A tensor without axes has the memory layout that the launcher gives it.
    """

    name: str
    axes: str = ""
    optional: bool = False
    """True if the tensor may be None. The launcher then has its strides in `stride_NAME`."""

    @property
    def strides(self) -> dict[str, str]:
        """Launch arguments by the names of the strides."""
        of = f"stride_{self.name}[{{}}]" if self.optional else f"{self.name}.stride({{}})"
        return {
            f"stride_{self.name}_{axis}": of.format(number) for number, axis in enumerate(self.axes)
        }


@dataclass(frozen=True)
class KernelSignature:
    """The parameters of one kernel.

    Pointers and sizes are positional in a launch. Compile-time constants are keywords.
    """

    name: str
    operands: tuple[Operand, ...]
    numbers: tuple[str, ...]
    """Sizes and other numbers."""
    constants: tuple[str, ...]
    """Numbers of heads, flags and numbers of parts."""
    tile: tuple[str, ...]
    """The fields of a tile that the kernel reads."""
    specialized: tuple[str, ...] = ("scale",)
    """Numbers that are not integers."""

    @property
    def unspecialized(self) -> list[str]:
        """The integers on which Triton does not specialize."""
        return [number for number in self.numbers if number not in self.specialized]

    @property
    def parameters(self) -> list[list[str]]:
        """The declarations, by lines."""
        strides = [(name, name[-1] in CONSTANT) for o in self.operands for name in o.strides]
        fixed = [name for name, constant in strides if constant]
        lines = [
            [f"{operand.name}_ptr" for operand in self.operands],
            [f"{name}: tl.int64" for name, constant in strides if not constant],
            list(self.numbers),
            [f"{name}: tl.constexpr" for name in (*fixed, *self.constants, *self.tile)],
        ]
        return [line for line in lines if line]

    @property
    def arguments(self) -> list[str]:
        """The launch arguments, apart from the fields of a tile."""
        return self.arguments_with({})

    def arguments_with(self, given: Mapping[str, str]) -> list[str]:
        """Return the launch arguments with these values of operands and constants."""
        values = {**VALUES, **given}
        strides = {n: x for o in self.operands for n, x in o.strides.items()}
        moving = [x for name, x in strides.items() if name[-1] not in CONSTANT]
        fixed = [f"{name}={x}" for name, x in strides.items() if name[-1] in CONSTANT]
        named = [f"{name}={values.get(name, name)}" for name in self.constants]
        operands = [given.get(operand.name, operand.name) for operand in self.operands]
        return [*operands, *moving, *self.numbers, *fixed, *named]


VALUES = {
    "INITIAL": "initial",
    "FINAL": "final",
    "STATES": "stepped",
    "ENDS": "within",
    "VALUES": "True",
    "PARTS": "dG.shape[0]",
    "BETA_PARTS": "dbetas.shape[0]",
}
"""Launch arguments of compile-time constants that have another name in the launcher."""
TOKENS = "bthc"
Q, K, V = Operand("q", TOKENS), Operand("k", TOKENS), Operand("v", TOKENS)


def buffer_operand(plan: LinearAttentionPlan, name: str) -> Operand:
    """Return a buffer as an operand with all of its strides."""
    return Operand(name, "".join(AXES[size] for size in plan.spec.buffers[name].shape))


def chunk_signature(
    plan: LinearAttentionPlan,
    name: str,
    operands: list[Operand],
    *,
    numbers: tuple[str, ...] = (),
    constants: tuple[str, ...] = ("H", "HV"),
    tile: tuple[str, ...] = (),
) -> KernelSignature:
    """Return the parameters of a kernel whose programs find a chunk by its number."""
    varlen = plan.spec.varlen
    packing = [Operand("seqs"), Operand("cu_seqlens")] if varlen else []
    sizes = ("N", "T", "NT") if varlen else ("T", "NT")
    return KernelSignature(
        name, (*operands, *packing), (*sizes, *numbers), tuple(constants), tuple(tile)
    )


def sequence_signature(
    plan: LinearAttentionPlan,
    name: str,
    operands: list[Operand],
    *,
    numbers: tuple[str, ...] = (),
    constants: tuple[str, ...] = ("H", "HV"),
    tile: tuple[str, ...] = (),
) -> KernelSignature:
    """Return the parameters of a kernel whose programs process whole sequences."""
    packing = [Operand("cu_seqlens")] if plan.spec.varlen else []
    sizes = ("T",) if plan.spec.varlen else ("T", "NT")
    return KernelSignature(name, (*operands, *packing), (*sizes, *numbers), constants, tile)
