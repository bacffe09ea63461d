"""Block masks in Triton: what `_block_mask.j2` and `_block_mask_launcher.j2` name."""

from __future__ import annotations

import re

from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import reads, variables
from kgen.plan.block_mask import BLOCK_SIZE, BlockMask
from kgen.targets.triton.kernels import KernelFields, lists_of
from kgen.targets.triton.launcher import LauncherFields
from kgen.targets.triton.printer import Printer
from kgen.targets.triton.text import wrapped

SIZES = ("B", "HQ", "HKV", "SQ", "SK")


def block_mask_fields(mask: BlockMask, kernels: KernelFields, launcher: LauncherFields) -> dict[str, object]:
    """The names of the kernels that list blocks, and of the functions around them."""
    spec, program = kernels.spec, mask.program
    printer = Printer(
        program,
        "q",
        kernels.layouts,
        kernels.plan.index_ranges,
        kernels.constants,
        spec.fast_math,
        kernels.helpers,
    )
    prologue = [f"{b.name} = {printer.over(b.node, b.place.axes)}" for b in program.before_loop()]
    shared = program.in_loop(needed_by=("some",))
    of_blocks, of_pairs = (
        [f"{b.name} = {printer.over(b.node, b.place.axes)}" for b in bindings]
        for bindings in (shared, [b for b in program.in_loop() if b not in shared])
    )
    some, plane = printer.own(program.results["some"]), _plane(mask)
    result = printer.tile(program.results["mask"])
    buffers = list(dict.fromkeys(r.buffer for r in reads(mask.condition)))
    scalars = [n for n in kernels.runtime if n in variables(mask.condition)]
    words = set(re.findall(r"\w+", "\n".join([*prologue, *of_blocks, some, *of_pairs, result, *plane]))) | {"SQ", "SK"}
    sizes = [n for n in (*kernels.sizes, *scalars) if n in words]
    grouped = "GQA" in words
    strides = [p for b in buffers for p in kernels.problem if p == f"{b}_ptr" or p.startswith(f"stride_{b}_")]
    params = [f"{p}{kernels.problem[p]}" for p in (*strides, *sizes, *["GQA"] * grouped)]
    args = [a for b in buffers for a in (b, f"*{b}.stride()")] + sizes + ["GQA=HQ // HKV"] * grouped
    lists = [n for inner in ("kv", "q")[: 1 + kernels.plan.backward] for n in lists_of(inner)]
    types = {"int": "int", "float": "float"}
    batches, heads = "B" if mask.by_batch else "1", "HQ" if mask.by_head else "1"
    sharing = [w for w, own in (("batches", mask.by_batch), ("heads", mask.by_head)) if not own]
    device = f"{buffers[0]}.device" if buffers else "device"
    directions = ["(q_blocks, kv_blocks)", "(kv_blocks, q_blocks)"][: 1 + kernels.plan.backward]
    return {
        "size": BLOCK_SIZE,
        "no_specialize": f"do_not_specialize={sizes!r}".replace("'", '"'),
        "kernel_params": wrapped(params, 4),
        "kernel_args": ", ".join(args),
        "plane": plane,
        "prologue": prologue,
        "of_blocks": of_blocks,
        "some": "" if program.results["some"] == TRUE else some,
        "of_pairs": of_pairs,
        "q_last": "q_last" in words,
        "mask": result,
        "planes": " * ".join(n for n in (batches, heads) if n != "1") or "1",
        "list_sizes": f"{batches}, {heads}",
        "lists": ", ".join(lists),
        "directions": ", ".join(directions) + "," * (len(directions) == 1),
        "op_params": ", ".join(
            [
                *(f"{b}: Tensor" for b in buffers),
                *(f"{n}: int" for n in SIZES),
                *(f"{n}: {types[kernels.runtime[n].type]}" for n in scalars),
                "device: torch.device",
            ]
        ),
        "op_type": f"tuple[{', '.join(['Tensor'] * len(lists))}]",
        "op_names": ", ".join([*buffers, *SIZES, *scalars]),
        "signature": ", ".join(["", "*", *buffers, *scalars, *['device="cuda"'] * (not buffers)]),
        "device": device,
        "device_words": [] if buffers else ["device: of the tensors that it will be used with."],
        "argument_words": launcher.argument_words(buffers, scalars),
        "checks": launcher.length_checks()
        + launcher.scalar_checks(scalars)
        + launcher.buffer_checks(buffers, device),
        "sharing": f", which {' and '.join(sharing)} share" if sharing else "",
    }


def _plane(mask: BlockMask) -> list[str]:
    """Whose rows a program makes."""
    if mask.by_batch and mask.by_head:
        return ["b, h = row // q_blocks // HQ, row // q_blocks % HQ"]
    return [f"{'b' if mask.by_batch else 'h'} = row // q_blocks"] * (mask.by_batch or mask.by_head)
