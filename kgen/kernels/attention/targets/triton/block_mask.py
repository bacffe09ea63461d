"""Block masks in Triton: what `_block_mask.j2` and `_block_mask_launcher.j2` name."""

from __future__ import annotations

import json

from kgen.expr.nodes import reads, variables
from kgen.kernels.attention.lowered.block_mask import block_mask_kernel
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import arguments, declared
from kgen.kernels.attention.lowered.ranges import lists_of
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE, BlockMask
from kgen.kernels.attention.targets.triton.launcher import LauncherFields
from kgen.targets.arguments import dense, number_lines

SIZES = ("B", "HQ", "HKV", "SQ", "SK")
_TYPES = {"int": "int", "float": "float"}


def block_mask_fields(mask: BlockMask, kernels: Lowering, launcher: LauncherFields) -> dict[str, object]:
    """The names of the kernels that list blocks, and of the functions around them."""
    kernel = block_mask_kernel(mask, kernels)
    buffers = list(dict.fromkeys(r.buffer for r in reads(mask.condition)))
    scalars = [n for n in kernels.runtime if n in variables(mask.condition)]
    words = kernel.names | {"SQ", "SK"}
    sizes = [n for n in (*kernels.sizes, *scalars) if n in words]
    grouped = "GQA" in words
    open_sizes = [size for b in buffers for size in kernels.open[b].values()]
    params = [p for b in buffers for p in kernels.of_buffer(b)]
    params += [kernels.problem[name] for name in (*sizes, *(("GQA",) if grouped else ()))]
    lists = [n for inner in ("kv", "q")[: 1 + kernels.plan.backward] for n in lists_of(inner)]
    batches, heads = "B" if mask.by_batch else "1", "HQ" if mask.by_head else "1"
    sharing = [w for w, own in (("batches", mask.by_batch), ("heads", mask.by_head)) if not own]
    device = f"{buffers[0]}.device" if buffers else "device"
    directions = ["(q_blocks, kv_blocks)", "(kv_blocks, q_blocks)"][: 1 + kernels.plan.backward]
    op_params = [f"{b}: Tensor" for b in buffers] + [f"{n}: int" for n in SIZES]
    op_params += [f"{n}: {_TYPES[kernels.runtime[n].type]}" for n in scalars]
    return {
        "kernel": kernel,
        "name": f"{kernels.spec.name}_block_mask",
        "size": BLOCK_SIZE,
        "no_specialize": f"do_not_specialize={json.dumps([*sizes, *open_sizes])}",
        "kernel_params": declared(params),
        "kernel_args": ", ".join(arguments(params)),
        "q_last": "q_last" in words,
        "planes": " * ".join(n for n in (batches, heads) if n != "1") or "1",
        "list_sizes": f"{batches}, {heads}",
        "lists": ", ".join(lists),
        "list_params": ", ".join(f"{n}_ptr" for n in lists),
        "directions": directions,
        "op_params": ", ".join([*op_params, "device: torch.device"]),
        "op_type": f"tuple[{', '.join(['Tensor'] * len(lists))}]",
        "op_names": ", ".join([*buffers, *SIZES, *scalars]),
        "signature": ["*", *map(launcher.called, [*buffers, *scalars]), *['device="cuda"'] * (not buffers)],
        "device": device,
        "device_words": [] if buffers else ["device: of the tensors that it will be used with."],
        "argument_words": launcher.argument_words(buffers, scalars),
        "dense_check": [dense(map(launcher.called, buffers))] if buffers else [],
        "numbers": [
            *number_lines(
                {n: kernels.runtime[n] for n in scalars}, kernels.plan.called, [*buffers, *scalars]
            ),
            *launcher.divisor_lines(scalars),
        ],
        "casts": launcher.casts(buffers),
        "checks": launcher.length_checks()
        + launcher.scalar_checks(scalars)
        + launcher.buffer_checks(buffers, device),
        "sharing": [f"which {' and '.join(sharing)} share"] if sharing else [],
    }
