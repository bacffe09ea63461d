"""Linear attention in Triton."""

from kgen.family import Lazy, Target
from kgen.targets.triton import RUNTIME

TARGET = Target(
    runtime=RUNTIME,
    sources=Lazy(f"{__name__}.sources:sources"),
    emits="One `triton.py`.",
    native=Lazy(f"{__name__}.native:native"),
    obligations=Lazy("kgen.kernels.linear_attention.prove.obligations:obligations"),
    pairs=Lazy("kgen.kernels.linear_attention.prove.obligations:of_pairs"),
)
