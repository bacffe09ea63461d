"""The size of an attention benchmark and its peers. It does not need torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError

PEERS = (
    "kgen-triton",
    "kgen-max",
    "flex",
    "flex-autotune",
    "flex-flash",
    "sdpa",
    "varlen",
    "cudnn-flex",
    "fa3",
    "fa4",
    "eager",
)
DEFAULT_PEERS = tuple(name for name in PEERS if name not in ("flex-autotune", "eager"))


@dataclass(frozen=True)
class Shape:
    """The size of a benchmark."""

    batch: int = 2
    heads: int = 16
    length: int = 8192
    decode: tuple[int, int] = (8, 32)
    """Batch and heads of decoding."""
    caches: tuple[int, ...] = (16384, 65536, 131072)
    """Cache lengths of decoding, in keys."""
    kv_heads: int | None = None
    """KV heads of specs with `gqa: any`; None for as many as query heads. Other specs state it."""
    documents: int | None = None
    """Packed sequences in total; None for sequences of about 1024 tokens."""

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse `2x16x8192` or `2x16x4x8192`. Raise `KgenError` for other text."""
        numbers = [int(part) for part in text.split("x") if re.fullmatch(r"[1-9]\d*", part)]
        sized = len(numbers) == text.count("x") + 1 and len(numbers) in (3, 4)
        if not sized or (len(numbers) == 4 and numbers[1] % numbers[2]):
            hint = "BATCHxHEADSxLENGTH, for example 2x16x8192, or BATCHxHEADSxKV_HEADSxLENGTH"
            raise KgenError(Diagnostic("bad-shape", f"`{text}` is not a shape", hint=hint))
        batch, heads, *kv_heads, length = numbers
        own = kv_heads[0] if kv_heads else None
        return cls(batch, heads, length, (batch, heads), (length,), own)

    def parts(self, _widths: tuple[int, ...] = ()) -> list[Shape]:
        """Return the shape itself: one worker measures all of it."""
        return [self]


ATTENTION_GYM = tuple(
    f"4x16x{kv_heads}x{length}"
    for kv_heads in (4, 16)
    for length in (2048, 4096, 8192, 16384, 32768)
)
"""Shapes of attention-gym: `benchmarks/configs/flash_h200.yaml`, for heads of 64 and 128."""
HELION = {
    ("fp16", 64): ("2x32x32x1024", "2x32x32x2048", "2x32x32x4096"),
    ("bf16", 128): ("4x32x32x4096", "8x32x32x8192"),
}
"""Shapes of Helion with at least 1024 keys: `benchmarks/cute/compare_attention_backends.py`."""

NEUTRAL_SPECS = "bf16 with heads of 64 or 128, or fp16 with heads of 64"
"""Specs with neutral shapes."""


def neutral(problem: Any) -> dict[str, Shape]:
    """Return the shapes of other projects' benchmarks by text.

    Packed specs have one sequence per batch entry, of random length, as in attention-gym. Return
    none for a dtype or head dim that these benchmarks do not have.
    """
    kind = (problem.dtype, problem.head_qk)
    own = ATTENTION_GYM if kind in (("bf16", 64), ("bf16", 128)) else ()
    texts = (*own, *HELION.get(kind, ())) if problem.head_qk == problem.head_v else ()
    shapes = {text: Shape.parse(text) for text in texts}
    return {text: replace(one, documents=one.batch) for text, one in shapes.items()}
