"""The size of an attention benchmark, and its peers; nothing here needs torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kgen.diagnostics import Diagnostic, KgenError

PEERS = ("kgen-triton", "flex", "flex-autotune", "flex-flash", "sdpa", "varlen", "eager")
DEFAULT_PEERS = ("kgen-triton", "flex", "sdpa", "varlen")


@dataclass(frozen=True)
class Shape:
    """The size of a benchmark; KV heads follow from the spec's `gqa`."""

    batch: int = 2
    heads: int = 16
    length: int = 8192
    decode: tuple[int, int] = (8, 32)
    """Batch and heads where a spec decodes."""
    caches: tuple[int, ...] = (16384, 65536, 131072)
    """Keys that one query sees there."""

    @classmethod
    def parse(cls, text: str) -> Shape:
        """`2x16x8192`. Raises `KgenError` for anything else."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            hint = "BATCHxHEADSxLENGTH, for example 2x16x8192"
            raise KgenError(Diagnostic("bad-shape", f"`{text}` is not a shape", hint=hint))
        batch, heads, length = (int(number) for number in match.groups())
        return cls(batch, heads, length, (batch, heads), (length,))

    def parts(self, _widths: tuple[int, ...] = ()) -> list[Shape]:
        """One worker measures all of it."""
        return [self]
