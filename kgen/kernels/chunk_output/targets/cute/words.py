"""The words in docstrings of chunk_output in CuTe DSL: the formula and the arguments."""

from __future__ import annotations

from kgen.expr.unparse import show
from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan


def formula(plan: ChunkOutputPlan) -> list[str]:
    """Return the lines of the formula."""
    every = f"in every chunk of {plan.spec.chunk_size} tokens"
    if plan.decay is None:
        return [f"o_i = scale * (q_i @ h + sum over j <= i of (q_i . k_j) v_j), {every}"]
    power = "e" if plan.natural else "2"
    within = f"sum over j <= i of {power}**(c_i - c_j) (q_i . k_j) v_j"
    return [
        f"o_i = scale * ({power}**c_i q_i @ h + {within}), {every}",
        f"c_i = {show(plan.decay)}",
    ]


def argument_words(plan: ChunkOutputPlan) -> list[str]:
    """Return sentences on each argument."""
    spec = plan.spec
    k = spec.head_dim.qk
    return [*_tensors(plan), *_gates(plan), *_packing(plan), f"scale: 1 / sqrt({k}) by default."]


def heads(plan: ChunkOutputPlan) -> str:
    """Return the condition on the numbers of heads of a call."""
    own = plan.spec.heads
    if own.qk:
        return f"H = {own.qk}, HV = {own.v}"
    group = own.group or 0
    return f"HV = {group} * H" if group > 1 else "HV = H" if group else "HV a multiple of H"


def _tensors(plan: ChunkOutputPlan) -> list[str]:
    spec = plan.spec
    k, v = spec.head_dim.qk, spec.head_dim.v
    state = f"{v}, {k}" if spec.state_layout == "vk" else f"{k}, {v}"
    v_tokens = f"NT * {spec.chunk_size}" if spec.v_layout == "chunk_padded" else "T"
    chunks = "the NT chunks of all sequences" if spec.varlen else "the NT chunks"
    return [
        f"q, k [B, T, H, {k}], v [B, {v_tokens}, HV, {v}], {spec.dtype}; {heads(plan)}.",
        "Value head h uses head h // (HV / H) of q and k.",
        f"h [B, NT, HV, {state}], {spec.dtype}: the state before each of {chunks}.",
    ]


def _gates(plan: ChunkOutputPlan) -> list[str]:
    dtype = plan.spec.gate_dtype
    words = {
        "g": f"g [B, T, HV], {dtype}: the gate, summed from the start of the chunk.",
        "g_gamma": f"g_gamma [HV], {dtype}: a constant of each head.",
    }
    return [words[gate] for gate in plan.gates]


def _packing(plan: ChunkOutputPlan) -> list[str]:
    words: list[str] = []
    if plan.spec.v_layout == "chunk_padded":
        words.append("The padding of v may have any content, also NaN.")
    if plan.spec.varlen:
        words += [
            (
                "cu_seqlens [N + 1], int32 or int64: the start of each sequence, 0 first, and the "
                "end of the last. B is 1."
            ),
            "Rows of o for tokens after the last sequence are zeros.",
            (
                "chunk_indices [NT, 2]: the sequence of each chunk, and its number there. A kernel "
                "computes the default."
            ),
            (
                "The values of both are not checked. With invalid values, o is meaningless, but "
                "accesses stay in bounds."
            ),
        ]
    return words
