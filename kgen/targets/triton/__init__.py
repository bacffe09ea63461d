"""The Triton target: portable kernels in Triton, and kernels for one chip in Gluon."""

from kgen.family import Runtime

RUNTIME = Runtime(
    imports=("torch", "triton"),
    tools=("triton",),
    compiler="kgen.verify.compile_triton",
    on_cpu=True,  # in Triton's interpreter
)
