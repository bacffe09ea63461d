"""The launcher of chunk_output in Triton: what `_launcher.j2` names, from argument checks to gradients."""

from __future__ import annotations

from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan
from kgen.kernels.chunk_output.spec import ChunkOutputSpec
from kgen.targets.arguments import (
    NO_DERIVATIVE,
    NOT_ASKED_FOR,
    cast_lines,
    dense,
    derivative_fields,
    number_fields,
)
from kgen.targets.triton.text import TORCH_DTYPES


def layouts(spec: ChunkOutputSpec) -> dict[str, object]:
    """How states and values lie in memory."""
    sides = [f"stride_h{side}: tl.constexpr" for side in spec.state_layout]
    state = "K, V" if spec.state_layout == "kv" else "V, K"
    padded = spec.v_layout == "chunk_padded"
    length = f"NT * {spec.chunk_size}" if padded else "T"
    return {
        "state_strides": {"h": ", ".join(sides)},
        "h_shape": f"[B, NT, HV, {state}]",
        "v_shape": f"[B, {length}, HV, V]",
        "v_first": "number.to(tl.int64) * BT" if padded else "first",
        "dv_mask": None if padded else "live[:, None]",
        # Values that are padded to chunks have no row for a token of no chunk.
        "values_follow": spec.varlen and not padded,
        "v_words": ["padded to whole chunks; what is in the padding does not matter"] if padded else [],
    }


def launcher_fields(plan: ChunkOutputPlan) -> dict[str, object]:
    """Every name that the launcher uses beside those of the kernels."""
    spec = plan.spec
    varlen = ["cu_seqlens", "chunk_indices"] if spec.varlen else []
    tensors = ["q", "k", "v", "h", *plan.gates, *varlen]
    sequences = ["len(cu_seqlens) - 1"] if spec.varlen else []
    keywords = ["cu_seqlens", "chunk_indices=None", "scale=None"] if spec.varlen else ["scale=None"]
    has_dg = plan.slope is not None
    gate, state = TORCH_DTYPES[spec.gate_dtype], TORCH_DTYPES[spec.state]
    arguments = ["g", "*g.stride()"] * ("g" in plan.gates)
    arguments += ["g_gamma", "*g_gamma.stride()"] * ("g_gamma" in plan.gates)
    gradients = ["dq", "dk", "dv", "dh", *(f"d{t}" if has_dg and t == "g" else "None" for t in tensors[4:])]
    fakes = ["q", "k", "v", "h", *(["g"] if has_dg else [])]
    words = {"g": f"g: [B, T, HV] {gate}, summed up inside each chunk.", "g_gamma": f"g_gamma: [HV] {gate}."}
    return {
        "torch_dtype": TORCH_DTYPES[spec.dtype],
        "torch_state": state,
        "usage": ", ".join(["q, k, v, h", *plan.gates, *(["cu_seqlens=cu_seqlens"] if spec.varlen else [])]),
        "signature": ", ".join(["q, k, v, h", *plan.gates, "*", *keywords]),
        "op_params": ", ".join([*(f"{t}: {_type(t)}" for t in tensors), "scale: float"]),
        "op_names": ", ".join([*tensors, "scale"]),
        "tensor_names": ", ".join(tensors),
        "problem_args": ", ".join([*arguments, *varlen, *sequences, "T", "NT", "scale", "H=H", "HV=HV"]),
        "sizes": '["N", "T", "NT"]' if spec.varlen else '["T", "NT"]',
        "gate_shapes": [{"g": "g [B, T, HV]", "g_gamma": "g_gamma [HV]"}[gate] for gate in plan.gates],
        "gate_words": [words[g] for g in plan.gates],
        "gate_checks": [f'("{g}", {g}, {3 if g == "g" else 1}, torch.{gate})' for g in plan.gates],
        "head_words": _head_words(spec),
        "grad_words": (
            f"Differentiable in q, k, v, h{' and g' if has_dg else ''}." if plan.backward else None
        ),
        **_derivatives(plan),
        **number_fields({}),
        "dense_check": dense(tensors),
        "casts": chunk_casts(plan),
        "checks": _checks(plan),
        "varlen_lines": _varlen_lines() if spec.varlen else [],
        "gradient_types": f"tuple[{', '.join(['Tensor'] * len(fakes))}]",
        "gradient_fakes": ", ".join(f"{x}.new_empty({x}.shape)" for x in fakes),
        "gradient_returns": ", ".join([*gradients, "None"]),
        "dg_name": ["dg"] * has_dg,
        "dg_params": ["dg_ptr", "stride_dg: tl.int64"] if has_dg else [],
        "dg_args": ["dg", "dg.stride(0)"] if has_dg else [],
        "dg_words": "dg has a share for each block of columns." if has_dg else None,
    }


def chunk_casts(plan: ChunkOutputPlan) -> list[str]:
    """The lines that cast arguments under autocast."""
    spec = plan.spec
    dtypes = dict.fromkeys(("q", "k", "v"), spec.dtype) | {"h": spec.state}
    dtypes |= dict.fromkeys(plan.gates, spec.gate_dtype)
    return cast_lines({name: f"torch.{TORCH_DTYPES[dtype]}" for name, dtype in dtypes.items()})


def _type(tensor: str) -> str:
    return "Optional[Tensor]" if tensor == "chunk_indices" else "Tensor"


def _derivatives(plan: ChunkOutputPlan) -> dict[str, object]:
    real = ["q", "k", "v", "h", *plan.gates]
    if plan.backward:
        derived = ["q", "k", "v", "h", *["g"] * (plan.slope is not None)]
        refused = {n: NO_DERIVATIVE for n in real if n not in derived}
    else:
        refused = dict.fromkeys(real, NOT_ASKED_FOR)
    return derivative_fields(real, refused, derived=plan.backward) | {"transformed": bool(refused)}


def _head_words(spec: ChunkOutputSpec) -> str:
    heads = spec.heads
    if heads.qk:
        return f"H is {heads.qk}, HV {heads.v}"
    return f"HV is {heads.group} * H" if heads.group else "HV is a multiple of H"


def _checks(plan: ChunkOutputPlan) -> list[dict[str, str]]:
    spec, heads = plan.spec, plan.spec.heads
    k, v, BT = spec.head_dim.qk, spec.head_dim.v, spec.chunk_size
    checks: list[dict[str, str]] = []

    def check(wrong: str, message: str) -> None:
        checks.append({"wrong": wrong, "message": message})

    if heads.qk:
        check(
            f"(H, HV) != ({heads.qk}, {heads.v})",
            f"expects {heads.qk} and {heads.v} heads, got {{H}} and {{HV}}",
        )
    elif heads.group:
        check(
            f"HV != {heads.group} * H",
            f"expects {heads.group} value heads for each head of q, got {{HV}} and {{H}}",
        )
    else:
        check("H == 0 or HV % H", "the {HV} value heads are not a multiple of the {H} heads of q")
    length = f"NT * {BT}" if spec.v_layout == "chunk_padded" else "T"
    state = f"{k}, {v}" if spec.state_layout == "kv" else f"{v}, {k}"
    shapes = {"q": f"(B, T, H, {k})", "k": f"(B, T, H, {k})", "v": f"(B, {length}, HV, {v})"}
    shapes |= {"h": f"(B, NT, HV, {state})", "g": "(B, T, HV)", "g_gamma": "(HV,)"}
    for name in ("q", "k", "v", "h", *plan.gates):
        check(
            f"{name}.shape != {shapes[name]}",
            f"{name} must be {{{shapes[name]}}}, got {{tuple({name}.shape)}}",
        )
    rows = ", ".join(["q", "k", "v", *(["g"] if "g" in plan.gates else [])])
    check(f"max(x.stride(1) for x in ({rows})) >= 2**24", "tokens may not lie 2**24 elements apart")
    columns = "*(x.stride(3) for x in (q, k, v, h)), h.stride(4)" + ", g_gamma.stride(0)" * (
        "g_gamma" in plan.gates
    )
    check(f"max({columns}) >= 2**23", "elements of a row may not lie 2**23 apart")
    if spec.varlen:
        check("B != 1", "packed sequences are one row, B = 1, got {B}")
    else:
        check(
            f"NT != -(-T // {BT})", f"{{T}} tokens are {{-(-T // {BT})}} chunks of {BT}, h has {{NT}} states"
        )
    return checks


def _varlen_lines() -> list[str]:
    return [
        'for label, x in (("cu_seqlens", cu_seqlens), ("chunk_indices", chunk_indices)):\n'
        "    integers = isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64)\n"
        '    if not integers and (x is not None or label == "cu_seqlens"):\n'
        '        raise TypeError(f"{label} must be a tensor of int32 or int64")\n'
        "    if integers and x.device != q.device:\n"
        '        raise ValueError(f"{label} is on {x.device}, q on {q.device}")',
        "if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:\n"
        '    raise ValueError(f"cu_seqlens must be [N + 1], got {list(cu_seqlens.shape)}")',
        "if chunk_indices is not None and tuple(chunk_indices.shape) != (NT, 2):\n"
        '    raise ValueError(f"chunk_indices must be [{NT}, 2], got {list(chunk_indices.shape)}")',
        "cu_seqlens = cu_seqlens.contiguous()",
        "chunk_indices = None if chunk_indices is None else chunk_indices.contiguous()",
    ]
