"""The versions of Triton with which emitted files run."""

from __future__ import annotations

from dataclasses import dataclass

OLDEST = (3, 4)
"""The oldest Triton with which emitted files can be imported."""

TORCH_OF_OLDEST = "2.8"
"""The torch that depends on `OLDEST`."""

GLUON = ((3, 6), (3, 7), (3, 8), (3, 9))
"""The versions with which kernels in Gluon were verified on a GPU, as `generated/verified.json`
records.

A test compares the two, so that verification never changes an emitted file.
"""


@dataclass(frozen=True)
class OldestTriton:
    """The oldest Triton of a file, for templates."""

    version: str
    """The version as a Python tuple."""
    triton: str
    torch: str


OLDEST_TRITON = OldestTriton(str(OLDEST), ".".join(map(str, OLDEST)), TORCH_OF_OLDEST)
