"""The Triton target: kernels for every chip, and in Gluon those that a chip has of its own."""

from kgen.family import Runtime

RUNTIME = Runtime(
    imports=("torch", "triton"),
    tools=("triton",),
    compiler="kgen.verify.compile_triton",
    on_cpu=True,  # in Triton's interpreter
)
