"""The attention family: out = softmax(score_mod(scale * q @ k^T)) @ v, over the keys that
`mask_mod` keeps.
"""

from kgen.family import HEAD_DIM, Bench, Family, Lazy, Verification, dtype_of

FAMILY = Family(
    name="attention",
    model=Lazy("kgen.kernels.attention.spec:AttentionSpec"),
    explain=Lazy("kgen.kernels.attention.explaining:explain"),
    verification=Verification(
        problem=Lazy("kgen.kernels.attention.verify.problem:problem_of"),
        cases=Lazy("kgen.kernels.attention.verify.cases"),
        chips=Lazy("kgen.kernels.attention.schedules:CHIPS"),
    ),
    parts={
        "delta": Verification(
            problem=Lazy("kgen.kernels.attention.verify.delta.problem:problem_of"),
            cases=Lazy("kgen.kernels.attention.verify.delta.cases"),
        )
    },
    bench=Bench(
        shape=Lazy("kgen.kernels.attention.bench.shape"),
        race=Lazy("kgen.kernels.attention.bench.race:race"),
        plot=Lazy("kgen.kernels.attention.bench.plot:plot"),
    ),
    tune=Lazy("kgen.kernels.attention.tune.tuning:tune_specs"),
    varies={"dtype": dtype_of("q"), "head_dim": HEAD_DIM},
    names_give_way=True,
    promises=Lazy("kgen.kernels.attention.plan.promises:searchable"),
    adapters={
        "transformers": Lazy("kgen.kernels.attention.adapt.transformers:adapter"),
        "context_parallel": Lazy("kgen.kernels.attention.adapt.context_parallel:adapter"),
        "hub": Lazy("kgen.kernels.attention.adapt.hub:adapter"),
        "torch": Lazy("kgen.kernels.attention.adapt.flash:torch_adapter"),
        "flash_attn": Lazy("kgen.kernels.attention.adapt.flash:flash_attn_adapter"),
        "torchtitan": Lazy("kgen.kernels.attention.adapt.torchtitan:adapter"),
        "vllm": Lazy("kgen.kernels.attention.adapt.serving:vllm_adapter"),
        "sglang": Lazy("kgen.kernels.attention.adapt.serving:sglang_adapter"),
    },
    packages={
        "torch": Lazy("kgen.kernels.attention.adapt.flash:torch_package"),
        "flash_attn": Lazy("kgen.kernels.attention.adapt.flash:flash_attn_package"),
    },
)
