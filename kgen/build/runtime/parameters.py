"""The bytes of a kernel's parameters."""

from __future__ import annotations

import struct
from collections.abc import Sequence

FORMATS = {
    "i1": "b",
    "u1": "b",
    "i8": "b",
    "u8": "B",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
}
MAP_BYTES = 128
"""Size of a `CUtensorMap`, which must be aligned to 64 bytes."""


def block_of(kind: str) -> list[int]:
    """Return the shape in a kind: tensordesc<bf16[1, 1, 64, 128], ...> -> [1, 1, 64, 128]."""
    return [int(n) for n in kind.partition("[")[2].partition("]")[0].split(",")]


def forms_of(kind: str) -> list[str]:
    """Return the format characters of `struct` of an argument: several for a descriptor."""
    if kind.startswith("tensordesc"):
        rank = len(block_of(kind))
        return [f"{MAP_BYTES}s", *["i"] * rank, *["q"] * rank]
    return ["Q" if kind.startswith("*") else FORMATS[kind]]


def laid_out(forms: Sequence[str]) -> tuple[struct.Struct, list[int]]:
    """Return a struct of these values, and their offsets.

    Each is aligned to its size, at most to 64 bytes.
    """
    form, size, offsets = "<", 0, []
    for one in forms:
        bytes_ = struct.calcsize(f"<{one}")
        pad = -size % min(bytes_, 64)
        offsets.append(size + pad)
        form, size = f"{form}{pad}x{one}", size + pad + bytes_
    return struct.Struct(form), offsets
