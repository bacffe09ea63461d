"""The family `chunk_output`: the output step of chunked linear attention, retention and gated delta
rules.
"""

from kgen.family import HEAD_DIM, Bench, Family, Lazy, Verification, dtype_of

FAMILY = Family(
    name="chunk_output",
    model=Lazy("kgen.kernels.chunk_output.spec:ChunkOutputSpec"),
    explain=Lazy("kgen.kernels.chunk_output.explaining:explain_chunk_output"),
    verification=Verification(
        problem=Lazy("kgen.kernels.chunk_output.verify.problem:problem_of"),
        cases=Lazy("kgen.kernels.chunk_output.verify.cases"),
    ),
    bench=Bench(
        shape=Lazy("kgen.kernels.chunk_output.bench.shape"),
        race=Lazy("kgen.kernels.chunk_output.bench.race:race"),
        plot=Lazy("kgen.kernels.chunk_output.bench.plot:plot"),
    ),
    varies={"dtype": dtype_of("q"), "head_dim": HEAD_DIM},
)
