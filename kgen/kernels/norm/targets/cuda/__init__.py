"""Norms in CUDA."""

from kgen.family import Lazy, Target
from kgen.targets.cuda import RUNTIME

TARGET = Target(
    runtime=RUNTIME,
    sources=Lazy(f"{__name__}.sources:sources"),
    emits="`cuda.cu`, `cuda.py` that loads it, and `cuda_launch.cu` for C and C++.",
)
