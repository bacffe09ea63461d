"""The size of a linear_attention benchmark and its peers. It does not need torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError

PEERS = ("fla", "eager")
DEFAULT_PEERS = ("fla",)


@dataclass(frozen=True)
class Shape:
    """Sequences, tokens of each, and heads if the spec leaves them open.

    Packed specs have all sequences in one row. Decoding steps `states` states by one token.
    """

    batch: int = 1
    tokens: tuple[int, ...] = (8192, 32768)
    heads: int = 16
    heads_v: int = 32
    states: tuple[int, ...] = (64, 256)

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse `BATCHxTOKENSxHEADSxVALUE_HEADS` or its first two numbers.

        Raise `KgenError` for other text.
        """
        numbers = [int(part) for part in text.split("x") if re.fullmatch(r"[1-9]\d*", part)]
        sized = len(numbers) == text.count("x") + 1 and len(numbers) in (2, 4)
        if not sized or (len(numbers) == 4 and numbers[3] % numbers[2]):
            hint = "BATCHxTOKENS or BATCHxTOKENSxHEADSxVALUE_HEADS, for example 4x8192x16x32"
            raise KgenError(Diagnostic("bad-shape", f"`{text}` is not a shape", hint=hint))
        batch, tokens, heads, heads_v = [*numbers, cls.heads, cls.heads_v][:4]
        return cls(batch, (tokens,), heads, heads_v, (batch,))

    def parts(self, _widths: tuple[int, ...] = ()) -> list[Shape]:
        """Return the shape itself: one worker measures all of it."""
        return [self]


NEUTRAL = {
    64: ("8x1024x8x8",),
    128: ("1x8192x96x96", "2x16384x16x16", "4x2048x16x16", "4x4096x64x64"),
    256: ("8x2048x32x32",),
}
"""Shapes of flash-linear-attention by head dim, from Helion's `benchmarks/run_linattn.py`."""

NEUTRAL_SPECS = "heads of 64, 128 or 256, the same for keys and values"
"""Specs with neutral shapes."""


def neutral(problem: Any) -> dict[str, Shape]:
    """Return the shapes of other projects' benchmarks by text, if they have the head dim."""
    texts = NEUTRAL.get(problem.head_qk, ()) if problem.head_qk == problem.head_v else ()
    return {text: Shape.parse(text) for text in texts}
