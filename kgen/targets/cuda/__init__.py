"""The CUDA target: `cuda.cu`, and `cuda.py`, which compiles and launches it."""

from kgen.family import Runtime

RUNTIME = Runtime(
    imports=("torch", "cuda"),
    tools=("cuda-core", "nvidia-cuda-nvrtc"),
    needs="cuda",
    extra="cuda",
    compiler="kgen.verify.compile_cuda",
)
