"""The kernels that list blocks, and their functions in the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.nodes import buffers_of, variables
from kgen.kernels.attention.lowered.block_mask import BlockMaskKernel, block_mask_kernel
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import KernelParams, Param
from kgen.kernels.attention.lowered.ranges import lists_of
from kgen.kernels.attention.plan.block_mask import BlockMask
from kgen.kernels.attention.targets.triton.interface import Check, Interface
from kgen.kernels.attention.targets.triton.shared import not_specialized
from kgen.targets.arguments import Numbers, dense, number_lines
from kgen.targets.template import Template, filled

SIZES = ("B", "HQ", "HKV", "SQ", "SK")
_TYPES = {"int": "int", "float": "float"}


@dataclass(frozen=True)
class BlockMaskKernels(BlockMaskKernel, KernelParams, Template):
    """The kernels that list the non-empty blocks of a mask."""

    template: ClassVar[str] = "attention/triton/_block_mask.j2"

    no_specialize: str
    lists: list[str]
    backward: bool

    @property
    def last_query(self) -> list[str]:
        """The statement that finds the last query of a block, if the kernel uses it."""
        line = "q_last = tl.minimum(q_start + BLOCK_SIZE, SQ) - 1"
        return [line] if "q_last" in self.names else []


@dataclass(frozen=True)
class BlockMaskLauncher(KernelParams, Template):
    """The function that builds the block mask of a spec, and its operator."""

    template: ClassVar[str] = "attention/triton/_block_mask_launcher.j2"

    name: str
    backward: bool
    lists: list[str]
    list_sizes: str
    """Number of batches and heads with separate lists."""
    planes: str
    """Number of (batch, head) planes."""
    given: list[str]
    """The arguments of the operator, except the device."""
    typed: list[str]
    signature: list[str]
    """The parameters of the function after the sizes."""
    device: str
    argument_words: list[str]
    device_words: list[str]
    sharing: list[str]
    """The batches or heads that share a list, in words."""
    dense_check: list[str]
    numbers: Numbers
    casts: list[str]
    checks: list[Check]

    def launch_functions(self) -> Iterator[str]:
        yield from ("_cdiv", "_operator")
        yield from self.numbers.launch_functions()
        if self.dense_check:
            yield "_dense"
        if self.casts:
            yield "_cast"
        if any(check.shows_dtype for check in self.checks):
            yield "_dtype"

    @property
    def own_name(self) -> str:
        """The name of the emitted function."""
        return f"{self.name}_block_mask"

    @property
    def directions(self) -> list[str]:
        """The rows and columns of the lists."""
        both = ["(q_blocks, kv_blocks)", "(kv_blocks, q_blocks)"]
        return both if self.backward else both[:1]

    @property
    def op_type(self) -> str:
        """The type of the operator's result."""
        return f"tuple[{', '.join(['Tensor'] * len(self.lists))}]"


def block_mask_kernels(mask: BlockMask, lowering: Lowering, backward: bool) -> BlockMaskKernels:
    """Return the kernels that list the blocks of a mask."""
    kernel = block_mask_kernel(mask, lowering)
    buffers = list(buffers_of(mask.condition))
    scalars = [n for n in lowering.runtime if n in variables(mask.condition)]
    used = kernel.names | {"SQ", "SK"}
    sizes = [n for n in (*lowering.sizes, *scalars) if n in used]
    given = [p for b in buffers for p in lowering.of_buffer(b)]
    given += [lowering.problem[name] for name in (*sizes, *(("GQA",) if "GQA" in used else ()))]
    open_sizes = [size for b in buffers for size in lowering.open[b].values()]
    sides = ("kv", "q") if backward else ("kv",)
    return filled(
        BlockMaskKernels,
        kernel,
        KernelParams((Param("kinds_ptr", "block_kinds"),), (), tuple(given)),
        no_specialize=not_specialized([*sizes, *open_sizes]),
        lists=[f"{name}_ptr" for side in sides for name in lists_of(side)],
        backward=backward,
    )


def block_mask_launcher(
    mask: BlockMask, interface: Interface, kernels: BlockMaskKernels
) -> BlockMaskLauncher:
    """Return the function that builds a block mask with these kernels."""
    buffers = list(buffers_of(mask.condition))
    scalars = [n for n in interface.runtime if n in variables(mask.condition)]
    batches, heads = "B" if mask.by_batch else "1", "HQ" if mask.by_head else "1"
    sharing = [w for w, own in (("batches", mask.by_batch), ("heads", mask.by_head)) if not own]
    device = f"{buffers[0]}.device" if buffers else "device"
    typed = [f"{b}: Tensor" for b in buffers] + [f"{n}: int" for n in SIZES]
    typed += [f"{n}: {_TYPES[interface.runtime[n].type]}" for n in scalars]
    names = [*buffers, *scalars]
    own, params = interface.spec.name, {n: interface.runtime[n] for n in scalars}
    lines = number_lines(own, params, interface.plan.called, names)
    kinds = {p.type for p in params.values()}
    numbers = Numbers("float" in kinds, "int" in kinds, (*lines, *interface.divisor_lines(scalars)))
    checks = [*interface.length_checks(), *interface.scalar_checks(scalars)]
    return filled(
        BlockMaskLauncher,
        KernelParams(kernels.tensors, kernels.strides, kernels.problem),
        name=own,
        backward=kernels.backward,
        lists=[
            name
            for side in (("kv", "q") if kernels.backward else ("kv",))
            for name in lists_of(side)
        ],
        list_sizes=f"{batches}, {heads}",
        planes=" * ".join(n for n in (batches, heads) if n != "1") or "1",
        given=[*buffers, *SIZES, *scalars],
        typed=[*typed, "device: torch.device"],
        signature=["*", *map(interface.called, names), *([] if buffers else ['device="cuda"'])],
        device=device,
        argument_words=interface.argument_words(buffers, scalars),
        device_words=[] if buffers else ["device: of the tensors that it will be used with."],
        sharing=[f"which {' and '.join(sharing)} share"] if sharing else [],
        dense_check=[dense(own, map(interface.called, buffers))] if buffers else [],
        numbers=numbers,
        casts=interface.casts(buffers),
        checks=[*checks, *interface.buffer_checks(buffers, device, scalars)],
    )
