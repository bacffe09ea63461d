"""The sizes of a norm benchmark and its peers. It does not need torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError

PEERS = ("torch", "compile", "cudnn", "liger", "quack", "eager", "copy")
DEFAULT_PEERS = ("torch", "compile", "cudnn", "liger", "quack", "copy")
WIDTHS = (256, 512, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 65536, 131072, 262144)
ODD_WIDTHS = (257, 4095, 65544)
"""Widths that are not a multiple of 16 bytes, or just above a power of two."""
ELEMENTS = 2**27
"""Elements per tensor if the number of rows is open. In 16 bits it is five times the L2 of an
H200.
"""
SMALL = (4096, 1024)
"""Rows and width of the case that is timed as a CUDA graph."""


@dataclass(frozen=True)
class Shape:
    """Rows and width. Without them: every width of `WIDTHS` and `ODD_WIDTHS` that the spec allows,
    and the small case."""

    rows: int | None = None
    width: int | None = None

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse `4096x1024`. Raise `KgenError` for other text."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            hint = "ROWSxWIDTH, for example 4096x1024"
            raise KgenError(Diagnostic("bad-shape", f"`{text}` is not a shape", hint=hint))
        return cls(*(int(number) for number in match.groups()))

    def sizes(self, widths: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the (rows, width) to measure. Empty `widths` means any width."""
        if self.rows is not None and self.width is not None:
            return [(self.rows, self.width)]
        large = [(ELEMENTS // width, width) for width in widths or (*WIDTHS, *ODD_WIDTHS)]
        return large if widths else [SMALL, *large]

    def parts(self, widths: tuple[int, ...]) -> list[Shape]:
        """Return one shape per size; each is measured by one worker."""
        return [Shape(*size) for size in self.sizes(widths)]


NEUTRAL: dict[str, tuple[tuple[int, int], ...]] = {
    "rms": (
        *((2048, 1024 * 2**i) for i in range(6)),
        *((2048, n) for n in (48, 96, 127, 768, 1023, 1536, 2047, 3072, 5120, 6144)),
        *((4096, n) for n in (3584, 4096, 5120, 7168, 8192, 12288)),
        *((rows, n) for rows in (8192, 16384) for n in (4096, 8192)),
        *((145956, 384), (380668, 512), (589824, 256), (1179648, 256)),
    ),
    "layer": (
        *((4096, 512 * i) for i in range(2, 32)),
        *((2048, 3584), (8192, 4096), (8192, 5120), (8192, 7168), (2048, 8192)),
        *((4096, 16384), (1024, 36864), (1152, 36864)),
    ),
}
"""Rows and widths of Helion: `rms_norm.py` and `layer_norm.py` in `pretuned_kernels`."""

NEUTRAL_SPECS = "norms of any width, or of a width such as 4096"
"""Specs with neutral shapes."""


def neutral(problem: Any) -> dict[str, Shape]:
    """Return the shapes of Helion's benchmarks of a norm by text, if the spec allows the width."""
    sizes = [one for one in NEUTRAL[problem.norm] if not problem.widths or one[1] in problem.widths]
    return {f"{rows}x{width}": Shape(rows, width) for rows, width in sizes}
