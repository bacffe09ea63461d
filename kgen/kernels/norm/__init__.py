"""Norms: rows of tensors divided by what their elements measure, and what is done to them before and after."""

from kgen.family import Bench, Family, Lazy, Verification, dtype_of

FAMILY = Family(
    name="norm",
    model=Lazy("kgen.kernels.norm.spec:NormSpec"),
    explain=Lazy("kgen.kernels.norm.explaining:explain_norm"),
    verification=Verification(
        problem=Lazy("kgen.kernels.norm.verify.problem:problem_of"),
        cases=Lazy("kgen.kernels.norm.verify.cases"),
    ),
    bench=Bench(
        shape=Lazy("kgen.kernels.norm.bench.shape"),
        race=Lazy("kgen.kernels.norm.bench.race:race"),
        plot=Lazy("kgen.kernels.norm.bench.plot:plot"),
    ),
    varies={"dtype": dtype_of("x")},
)
