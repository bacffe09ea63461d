"""Norms in CUDA."""

from kgen.family import Lazy, Target
from kgen.targets.cuda import RUNTIME

TARGET = Target(
    runtime=RUNTIME,
    sources=Lazy(f"{__name__}.sources:sources"),
    emits="`cuda.cu`, and `cuda.py` that loads it.",
)
