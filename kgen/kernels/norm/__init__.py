"""The family `norm`: layer norm and RMS norm of rows, with expressions before and after the
norm.
"""

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
    adapters={"hub": Lazy("kgen.kernels.norm.adapt.hub:adapter")},
)
