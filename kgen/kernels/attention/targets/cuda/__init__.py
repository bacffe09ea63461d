"""The delta of attention backward in CUDA."""

from kgen.family import Lazy, Target
from kgen.targets.cuda import RUNTIME

TARGET = Target(
    runtime=RUNTIME,
    sources=Lazy(f"{__name__}.delta:sources"),
    emits="`cuda.cu`, and `cuda.py` that loads it.",
    options=Lazy(f"{__name__}.options:CudaOptions"),
    part="delta",
)
