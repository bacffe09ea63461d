"""The size of a chunk_output benchmark and its peers. It does not need torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError

PEERS = ("fla", "eager")
DEFAULT_PEERS = ("fla",)


@dataclass(frozen=True)
class Shape:
    """Rows, tokens per row, and heads if the spec leaves them open.

    Packed specs are also measured with `ragged` sequences.
    """

    batch: int = 1
    tokens: tuple[int, ...] = (8192, 32768, 131072)
    heads: int = 16
    heads_v: int = 32
    ragged: int = 64

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse `32768` or `1x32768x16x32`. Raise `KgenError` for other text."""
        match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*)x([1-9]\d*)x([1-9]\d*))?", text)
        if match is None or (match[2] and int(match[4]) % int(match[3])):
            hint = "TOKENS or BATCHxTOKENSxHEADSxVALUE_HEADS, for example 1x32768x16x32"
            raise KgenError(Diagnostic("bad-shape", f"`{text}` is not a shape", hint=hint))
        if match[2] is None:
            return cls(tokens=(int(text),))
        batch, tokens, heads, heads_v = (int(number) for number in match.groups())
        return cls(batch, (tokens,), heads, heads_v)

    def parts(self, _widths: tuple[int, ...] = ()) -> list[Shape]:
        """Return the shape itself: one worker measures all of it."""
        return [self]


NEUTRAL_SPECS = "specs of the other families"
"""Specs with neutral shapes."""


def neutral(_problem: Any) -> dict[str, Shape]:
    """Return nothing: other projects have no benchmarks of this kernel alone."""
    return {}
