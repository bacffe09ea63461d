"""The versions of Triton that emitted files run with, and those with kernels in Gluon."""

from __future__ import annotations

from dataclasses import dataclass

OLDEST = (3, 4)
"""The oldest Triton that emitted files import with."""

TORCH_OF_OLDEST = "2.8"
"""The torch that brings it."""

GLUON = ((3, 6), (3, 7), (3, 8), (3, 9))
"""The versions with which kernels in Gluon were verified on a GPU. `generated/verified.json` holds the proof. A test
compares the two, so that verifying does not change a file."""


@dataclass(frozen=True)
class OldestTriton:
    """The oldest Triton of a file, as templates name it."""

    version: str
    """A tuple in Python."""
    triton: str
    torch: str


OLDEST_TRITON = OldestTriton(str(OLDEST), ".".join(map(str, OLDEST)), TORCH_OF_OLDEST)
