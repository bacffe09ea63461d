"""The CuTe DSL target: kernels for one architecture each, which use its TMA and tensor cores."""

from kgen.family import Runtime

RUNTIME = Runtime(
    imports=("torch", "cuda", "cutlass"),
    tools=("nvidia-cutlass-dsl",),
    needs="cutlass",
    extra="cute",
    compiler="kgen.verify.compile_cute",
)
