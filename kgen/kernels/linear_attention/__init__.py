"""The family `linear_attention`: recurrent layers with a decaying state, from linear attention to
the gated delta rule.
"""

from kgen.family import HEAD_DIM, Bench, Family, Lazy, Verification, dtype_of

FAMILY = Family(
    name="linear_attention",
    model=Lazy("kgen.kernels.linear_attention.spec:LinearAttentionSpec"),
    explain=Lazy("kgen.kernels.linear_attention.explaining:explain_linear_attention"),
    verification=Verification(
        problem=Lazy("kgen.kernels.linear_attention.verify.problem:problem_of"),
        cases=Lazy("kgen.kernels.linear_attention.verify.cases"),
        chips=Lazy("kgen.kernels.linear_attention.schedules:CHIPS"),
    ),
    bench=Bench(
        shape=Lazy("kgen.kernels.linear_attention.bench.shape"),
        race=Lazy("kgen.kernels.linear_attention.bench.race:race"),
        plot=Lazy("kgen.kernels.linear_attention.bench.plot:plot"),
    ),
    varies={"dtype": dtype_of("q"), "head_dim": HEAD_DIM},
    names_give_way=True,
    adapters={
        "context_parallel": Lazy("kgen.kernels.linear_attention.adapt.context_parallel:adapter"),
        "fla": Lazy("kgen.kernels.linear_attention.adapt.fla:adapter"),
    },
)
