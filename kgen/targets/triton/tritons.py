"""Which Tritons emitted files run with, and which of them have the kernels for Hopper."""

from __future__ import annotations

OLDEST = (3, 4)
"""The oldest Triton that emitted files import with."""

TORCH_OF_OLDEST = "2.8"
"""The torch that brings it."""

GLUON = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Those with which the kernels for Hopper were verified on one. `generated/verified.json` holds the proof, and a test
compares the two, so that verifying does not change a file."""

FIELDS: dict[str, object] = {
    "oldest": {"version": OLDEST, "triton": ".".join(map(str, OLDEST)), "torch": TORCH_OF_OLDEST},
    "gluon_tritons": GLUON,
}
"""What templates of Triton files name of these."""
