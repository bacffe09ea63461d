"""The example of chunk_output from C++: what `templates/chunk_output/c/example.cpp.j2` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kgen.expr.nodes import substitute
from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan, gate_values
from kgen.spec.load import Loaded
from kgen.targets.native_reference import dtype_of, in_cpp, spelled, two_of

Fields = dict[str, Any]
BATCH = 2
ERRORS = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 4e-3}
"""Of the largest number."""
VARYING = ("g", "g_gamma", "i", "h")
"""What a decay is made of, beside numbers of heads."""


def chunk_output_example(
    loaded: Loaded, plan: ChunkOutputPlan, context: Mapping[str, Any], open_sizes: Mapping[str, Sequence[int]]
) -> Fields:
    """Sizes, what is drawn, and the decay as it was written. Raises `KgenError` for a function that C++ has no spelling
    of here."""
    spec = plan.spec
    BT = spec.chunk_size
    # Packed sequences: one of no tokens, and some that end inside a chunk. One sequence has such an end, too.
    lengths = (BT + 6, 0, 2 * BT, 5) if spec.varlen else (2 * BT + 5,)
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    heads = spec.heads.qk or open_sizes["heads"][0]
    group = spec.heads.ratio or two_of(open_sizes["gqa"])
    decay = "0.0"
    if plan.decay is not None:
        with spelled(loaded):
            tree = substitute(loaded.trees["decay"], gate_values())
            decay = in_cpp(tree, {name: f"at.{name}" for name in VARYING} | {"H": "H", "HV": "HV"})
    backward = context["of_backward"]
    tensors = [*context["inputs"], *context["packing"][:1], context["o"]]
    tensors += backward["tensors"] if plan.backward else []
    sizes = {
        "B": 1 if spec.varlen else BATCH,
        "T": ends[-1],
        "H": heads,
        "HV": heads * group,
        "NT": sum(-(-length // BT) for length in lengths),
    }
    members = {t["name"]: t["member"] for t in tensors}
    drawn = {name: "1.0" for name in ("q", "k", "v", "h", "do") if name in members} | {
        # Decays fall inside a chunk.
        name: f"[](int64_t) {{ return {most} * std::fabs(example::random_number()); }}"
        for name, most in (("g", -1.0), ("g_gamma", -1.0 / BT))
        if name in members
    }
    return {
        "sizes": sizes,
        "ends": ends,
        "tensors": [_sized(t) for t in tensors],
        "drawn": [{"member": members[name], "draw": draw} for name, draw in drawn.items()],
        "decay": decay,
        "gates": [{"name": name, "at": _at(name)} for name in plan.gates],
        "v_of_j": "chunk.number * BT + j" if spec.v_layout == "chunk_padded" else "chunk.first + j",
        "v_rows": "NT * BT" if spec.v_layout == "chunk_padded" else "T",
        "state": "x * V + y" if spec.state_layout == "kv" else "y * K + x",
        "log_of_base": "1.0" if plan.natural else "std::log(2.0)",
        "compared": ["dq", "dk", "dv", "dh"] if plan.backward else [],
        "allowed": repr(max(ERRORS[d] for d in (spec.dtype, spec.state, spec.gate_dtype))),
    }


def _at(gate: str) -> str:
    return {"g": "place_of_row(chunk.b, T, chunk.first + i, HV, h)", "g_gamma": "size_t(h)"}[gate]


def _sized(of: Fields) -> Fields:
    """Sizes in C, of the constants of the example."""
    sizes = [size.removeprefix("p->").replace("N + 1", "int64_t(ends.size())") for size in of["sizes"]]
    return {"member": of["member"], "sizes": sizes, "dtype": dtype_of(of)}
