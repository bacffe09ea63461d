"""Linear attention in Triton."""

from kgen.family import Lazy, Target
from kgen.targets.triton import RUNTIME

TARGET = Target(
    runtime=RUNTIME,
    sources=Lazy(f"{__name__}.sources:sources"),
    emits="`triton.py`, and a file for each chip with its own kernels.",
)
