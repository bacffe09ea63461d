"""Masks that are lists of blocks, from C: tensors of the caller's that a call of its own fills.

They hold for as long as sizes, buffers and params stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kgen.kernels.attention.lowered.ranges import lists_of
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE, BlockMask
from kgen.targets.native import tensor

Fields = dict[str, Any]
PASS = "block_mask"
"""What the call that fills them is called, behind the spec's name."""
GROUP, CHUNK = 8, 256
"""Of the kernels that make them, as from Python."""


def list_inputs(mask: BlockMask | None, backward: bool, name: str) -> list[Fields]:
    """The lists of each block of queries and, for backward, of each block of keys."""
    if mask is None:
        return []
    found = []
    planes = ["p->B" if mask.by_batch else "1", "p->HQ" if mask.by_head else "1"]
    shape = ["B" if mask.by_batch else "1", "HQ" if mask.by_head else "1"]
    for inner in ("kv", "q")[: 1 + backward]:
        rows, columns = ("SQ", "SK") if inner == "kv" else ("SK", "SQ")
        for list_ in lists_of(inner):
            lengths = [rows, columns][: 1 + list_.endswith("indices")]
            sizes = [*planes, *(f"kgen_cdiv(p->{n}, {BLOCK_SIZE})" for n in lengths)]
            words = ", ".join([*shape, *(f"ceil({n} / {BLOCK_SIZE})" for n in lengths)])
            said = f"[{words}] int32, contiguous: written by {name}_{PASS}, read by the passes"
            found.append(tensor(list_, sizes, "int32", said, contiguous=True))
    return found


def list_fields(mask: BlockMask | None, inputs: Sequence[Fields], backward: bool) -> Fields:
    """What templates name of the call that fills them."""
    if mask is None:
        return {"lists": [], "block_mask": None}
    planes = {
        (False, False): "1",
        (True, False): "p->B",
        (False, True): "p->HQ",
        (True, True): "p->B * p->HQ",
    }
    return {
        "lists": list(inputs),
        "block_mask": {
            "planes": planes[mask.by_batch, mask.by_head],
            "size": BLOCK_SIZE,
            "group": GROUP,
            "chunk": CHUNK,
            "rows": "q_blocks + kv_blocks" if backward else "q_blocks",
        },
    }


def list_names(inputs: Sequence[Fields]) -> list[str]:
    """What kernels call their arguments."""
    return [*(f"{t['label']}_ptr" for t in inputs), "kinds_ptr", "planes", "q_blocks", "kv_blocks", "CHUNK"]


def list_example(inputs: Sequence[Fields]) -> list[Fields]:
    """The same tensors in the example."""
    return [
        {"member": t["member"], "sizes": [_of_example(size) for size in t["sizes"]], "dtype": "INT32"}
        for t in inputs
    ]


def _of_example(size: str) -> str:
    names = {
        f"kgen_cdiv(p->{n}, {BLOCK_SIZE})": f"(sizes.{n} + {BLOCK_SIZE - 1}) / {BLOCK_SIZE}"
        for n in ("SQ", "SK")
    }
    return (names | {"1": "1", "p->B": "sizes.B", "p->HQ": "sizes.HQ"})[size]
