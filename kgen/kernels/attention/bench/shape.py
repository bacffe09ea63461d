"""The size of an attention benchmark and its peers. It does not need torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kgen.diagnostics import Diagnostic, KgenError

PEERS = (
    "kgen-triton",
    "kgen-max",
    "flex",
    "flex-autotune",
    "flex-flash",
    "sdpa",
    "varlen",
    "eager",
)
DEFAULT_PEERS = ("kgen-triton", "kgen-max", "flex", "sdpa", "varlen")


@dataclass(frozen=True)
class Shape:
    """The size of a benchmark. The spec's `gqa` determines the number of KV heads."""

    batch: int = 2
    heads: int = 16
    length: int = 8192
    decode: tuple[int, int] = (8, 32)
    """Batch and heads of decoding."""
    caches: tuple[int, ...] = (16384, 65536, 131072)
    """Cache lengths of decoding, in keys."""

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse `2x16x8192`. Raise `KgenError` for other text."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            hint = "BATCHxHEADSxLENGTH, for example 2x16x8192"
            raise KgenError(Diagnostic("bad-shape", f"`{text}` is not a shape", hint=hint))
        batch, heads, length = (int(number) for number in match.groups())
        return cls(batch, heads, length, (batch, heads), (length,))

    def parts(self, _widths: tuple[int, ...] = ()) -> list[Shape]:
        """Return the shape itself: one worker measures all of it."""
        return [self]
