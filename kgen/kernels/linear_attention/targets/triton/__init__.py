"""Linear attention in Triton."""

from kgen.family import Lazy, Target
from kgen.targets.triton import RUNTIME

TARGET = Target(
    runtime=RUNTIME,
    sources=Lazy(f"{__name__}.sources:sources"),
    native=Lazy(f"{__name__}.native:native"),
    obligations=Lazy("kgen.kernels.linear_attention.prove.obligations:obligations"),
    pairs=Lazy("kgen.kernels.linear_attention.prove.obligations:of_pairs"),
    emits="`triton.py`, and a file for each chip with its own kernels.",
)
