"""The delta of attention backward in CUDA."""

from kgen.family import Lazy, Target
from kgen.targets.cuda import RUNTIME

TARGET = Target(
    runtime=RUNTIME,
    sources=Lazy(f"{__name__}.delta:sources"),
    emits="`cuda.cu`, `cuda.py` that loads it, and `cuda_launch.cu` for C and C++.",
    options=Lazy(f"{__name__}.options:CudaOptions"),
    part="delta",
)
