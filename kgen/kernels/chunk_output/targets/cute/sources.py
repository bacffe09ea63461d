"""The CuTe DSL target of chunk_output: one file for each architecture, and the names that their templates use."""

from __future__ import annotations

from kgen.expr.nodes import variables
from kgen.expr.show import show
from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan, plan_chunk_output
from kgen.kernels.chunk_output.targets.interface import casts
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.arguments import (
    IN_ANOTHER_FILE,
    NOT_ASKED_FOR,
    dense,
    derivatives_of,
    numbers_of,
)
from kgen.targets.code import CUTE, Name, op, printed, row
from kgen.targets.cute.printer import real
from kgen.targets.template import Untyped
from kgen.targets.triton.text import TORCH_DTYPES

FILES = {"sm_90a": "sm90", "sm_100a": "sm100"}
RANKS = {"sm_90a": 2, "sm_100a": 0}
"""Triton's is 1. On an H200 the kernel for sm_90a is faster; that for sm_100a has not run (docs/performance)."""

ELEMENTS = {"fp32": "Float32", "bf16": "BFloat16", "fp16": "Float16"}
WARPGROUPS = 2
"""That multiply on sm_90a, each for another value head."""
STAGES = 2
"""Of queries and keys, and of states and values. On an H200 two reach 95 % of a copy's rate, and three change nothing.

A multiple of the warpgroups: a stage is always read by the same one then, which sees every turn of its barrier.
"""
COLUMNS = 512
"""Of tensor memory. A multiprocessor has no more; it runs one CTA."""


def sources(loaded: Loaded) -> list[Source]:
    """A file for each architecture that the spec asks for."""
    context = printed(_context(plan_chunk_output(loaded)), CUTE)
    return [
        Source(
            f"cute_{FILES[arch]}.py",
            Untyped(f"chunk_output/cute/chunk_output_{FILES[arch]}.j2", context),
            arch,
            rank=RANKS[arch],
            needs="cutlass",
            signature=context["signature"],
            docstring=Untyped("chunk_output/cute/_docstring.j2", context),
        )
        for arch in loaded.spec.targets.cute.arch
    ]


def _context(plan: ChunkOutputPlan) -> dict[str, object]:
    """Every name of the templates."""
    spec = plan.spec
    k, v, bt = spec.head_dim.qk, spec.head_dim.v, spec.chunk_size
    transposed, padded = spec.state_layout == "vk", spec.v_layout == "chunk_padded"
    indices = ["cu_seqlens", "chunk_indices"] if spec.varlen else []
    sizes, tensors = _sizes(plan), _tensors(plan)
    inputs = ["q", "k", "v", "h", *plan.gates]
    given = [*inputs, *indices]
    own = [*("cu_seqlens: Tensor", "chunk_indices: Optional[Tensor]")[: len(indices)], "scale: float"]
    params = [", ".join(f"{name}: Tensor" for name in inputs), ", ".join(own)]
    extras = [*plan.gates, *indices]
    variant = ["given"] if spec.varlen else []
    context: dict[str, object] = {
        "name": spec.name,
        "summary": opening(spec),
        "k": k,
        "v": v,
        "bt": bt,
        "element": ELEMENTS[spec.dtype],
        "warpgroups": WARPGROUPS,
        "qk_stages": STAGES,
        "hv_stages": STAGES,
        # Sums of q @ k^T, of q @ h and of p @ v lie beside each other.
        "qh_column": bt,
        "pv_column": bt + v,
        "columns": COLUMNS,
        "varlen": spec.varlen,
        "state_order": "ROW_MAJOR" if transposed else "COL_MAJOR",
        "state_major": "K" if transposed else "MN",
        "chunk_args": ", ".join(["tokens", *indices]),
        "v_start": "i * BT" if padded else "start",
        "extras": extras,
        "kernel_args": ", ".join(["o", *extras, "tokens"]),
        "tensors": list(tensors.values()),
        "n_sizes": len(sizes),
        "sizes": ", ".join(sizes),
        "given_sizes": ", ".join(sizes.values()),
        "n_numbers": len(sizes) + sum(1 + int(str(t["strides"])) for t in tensors.values()),
        "all_strides": ", ".join(str(t["strides"]) for t in tensors.values()),
        "op_params": (",\n" if spec.varlen else ", ").join(params),
        "op_args": ", ".join(given),
        "passed_tensors": ", ".join(f"_for_tma({name})" if name in "qkvh" else name for name in tensors),
        "default_heads": spec.heads.qk or 16,
        "default_group": spec.heads.ratio or 2,
        "constants": ", ".join(["index", *variant, "H", "GROUP"]),
        "constants_alone": ", ".join(["Int64", *("False" for _ in variant), "H", "GROUP"]),
        "constants_here": ", ".join(["index", *variant, "H", "HV // H"]),
        "constant_words": ["a type of indices", *["given or not"] * spec.varlen],
        "index_type": "Int64 if cu_seqlens.dtype == torch.int64 else Int32" if spec.varlen else "Int32",
        "checked": _checked(plan),
        "casts": casts(plan),
        "wrong_heads": _wrong_heads(plan),
        "heads_words": _heads_words(plan),
        "signature": ", ".join(
            [*inputs, "*", *(["cu_seqlens", "chunk_indices=None"] if spec.varlen else []), "scale=None"]
        ),
        "dense_check": dense([*inputs, *(["cu_seqlens", "chunk_indices"] if spec.varlen else [])]),
        "usage_args": ", ".join([*inputs, *(f"{name}={name}" for name in indices[:1])]),
    }
    refused = dict.fromkeys(inputs, IN_ANOTHER_FILE if "backward" in spec.passes else NOT_ASKED_FOR)
    context |= {"derivatives": derivatives_of(inputs, refused, derived=False), "numbers": numbers_of({})}
    return context | _decay(plan) | _words(plan)


def _sizes(plan: ChunkOutputPlan) -> dict[str, str]:
    """The sizes of a launch: what the kernel calls each, and what the caller does."""
    sizes = {"batches": "B", "tokens": "T", "n_chunks": "B * NT", "ctas": "ctas"}
    return sizes | ({"sequences": "cu_seqlens.shape[0] - 1"} if plan.spec.varlen else {})


def _tensors(plan: ChunkOutputPlan) -> dict[str, dict[str, object]]:
    """By name: the layout that kernels see, and where they find its address and its strides.

    The strides of the caller's first dims follow the address, in their order.
    """
    spec = plan.spec
    v_tokens = "n_chunks // batches * BT" if spec.v_layout == "chunk_padded" else "tokens"
    layouts: dict[str, tuple[list[str], tuple[int, ...]]] = {
        "q": (["tokens", "K", "H", "batches"], (2, 0, 3, 1)),
        "k": (["tokens", "K", "H", "batches"], (2, 0, 3, 1)),
        "v": (["V", v_tokens, "H * GROUP", "batches"], (0, 2, 3, 1)),
        "h": (
            ["V", "K", "H * GROUP", "n_chunks // batches", "batches"],
            (4, 0, 3, 2, 1) if spec.state_layout == "vk" else (0, 4, 3, 2, 1),
        ),
        "o": (["tokens", "V", "H * GROUP", "batches"], (2, 0, 3, 1)),
    }
    elements = dict.fromkeys(layouts, ELEMENTS[spec.dtype])
    if "g" in plan.gates:
        layouts["g"] = (["tokens", "H * GROUP", "batches"], (2, 3, 1))
    if "g_gamma" in plan.gates:
        layouts["g_gamma"] = (["H * GROUP"], (1,))
    elements |= dict.fromkeys(plan.gates, ELEMENTS[spec.gate_dtype])
    if spec.varlen:
        layouts |= {"cu_seqlens": (["sequences + 1"], (0,)), "chunk_indices": (["n_chunks", "2"], (1, 0))}
    found: dict[str, dict[str, object]] = {}
    at = len(_sizes(plan))
    for name, (shape, behind) in layouts.items():
        strides = max(behind)
        found[name] = {
            "name": name,
            "shape": shape,
            "behind": [str(place) for place in behind],
            "at": at,
            "strides": strides,
            "element": elements.get(name, "index"),
            # What TMA moves, and what is stored in its place, goes by 16 bytes.
            "vector": 8 if name in ("q", "k", "v", "h", "o") else 1,
        }
        at += 1 + strides
    return found


def _decay(plan: ChunkOutputPlan) -> dict[str, object]:
    """The exponent of the decay at a row and at a column of the chunk, and what base 2 takes of it.

    Exponents are subtracted before they are scaled: the difference of neighbours is exact, however large they are.
    """
    exponent = plan.exponent
    fields: dict[str, object] = {
        "decayed": exponent is not None,
        "gated": "g" in plan.gates,
        "natural": exponent is not None and plan.natural,
        "hv_arrivals": "1 + 32" if "g" in plan.gates else "1",
        "exponent_lines": ["gamma = Float32(g_gamma[v_head])"] if "g_gamma" in plan.gates else [],
    }
    if exponent is None:
        return fields | {"head_needed": False}
    used = variables(exponent)
    names = {"h": Name("v_head"), "H": Name("H"), "HV": row("mul", "H", "GROUP"), "g_gamma": Name("gamma")}
    for place, index in (("exponent_of_row", "row"), ("exponent_of_col", "col")):
        fields[place] = real(exponent, names | {"i": Name(index), "g": op("sg[{0}, stage]", index)})
    difference = row("sub", op("c_row[e // 2 % 2]"), "c_col")
    return fields | {
        "difference": row("mul", difference, "LOG2E") if plan.natural else difference,
        "to_base_2": Name("LOG2E") if plan.natural else None,
        "head_needed": bool(used & {"h", "g_gamma"}),
    }


def _wrong_heads(plan: ChunkOutputPlan) -> str:
    heads = plan.spec.heads
    if heads.qk:
        return f"(H, HV) != ({heads.qk}, {heads.v})"
    return f"HV != {heads.group} * H" if heads.group else "H == 0 or HV % H"


def _heads_words(plan: ChunkOutputPlan) -> str:
    heads = plan.spec.heads
    if heads.qk:
        return f"H = {heads.qk}, HV = {heads.v}"
    return f"HV = {heads.group} * H" if heads.group else "HV a multiple of H"


def _checked(plan: ChunkOutputPlan) -> list[dict[str, object]]:
    """What each tensor must be."""
    spec = plan.spec
    dims = {
        "q": ["B", "T", "H", "K"],
        "k": ["B", "T", "H", "K"],
        "v": ["B", "NT * BT" if spec.v_layout == "chunk_padded" else "T", "HV", "V"],
        "h": ["B", "NT", "HV", *(("V", "K") if spec.state_layout == "vk" else ("K", "V"))],
        "g": ["B", "T", "HV"],
        "g_gamma": ["HV"],
    }
    return [
        {
            "name": name,
            "shape": dims[name],
            "dims": len(dims[name]),
            "dtype": TORCH_DTYPES[spec.gate_dtype if name in plan.gates else spec.dtype],
        }
        for name in ("q", "k", "v", "h", *plan.gates)
    ]


def _words(plan: ChunkOutputPlan) -> dict[str, object]:
    """The formula, and what is said of each argument."""
    spec = plan.spec
    k, v, bt = spec.head_dim.qk, spec.head_dim.v, spec.chunk_size
    state = f"{v}, {k}" if spec.state_layout == "vk" else f"{k}, {v}"
    v_tokens = f"NT * {bt}" if spec.v_layout == "chunk_padded" else "T"
    power = "2" if spec.gate_base == 2 else "e"
    within = "sum over j <= i of (q_i . k_j) v_j"
    formula = [f"o_i = scale * (q_i @ h + {within}), in every chunk of {bt} tokens"]
    if plan.decay is not None:
        within = f"sum over j <= i of {power}**(c_i - c_j) (q_i . k_j) v_j"
        formula = [
            f"o_i = scale * ({power}**c_i q_i @ h + {within}), in every chunk of {bt} tokens",
            f"c_i = {show(plan.decay)}",
        ]
    arguments = [
        f"q, k [B, T, H, {k}], v [B, {v_tokens}, HV, {v}], {spec.dtype}; {_heads_words(plan)}.",
        "Value head h goes with head h // (HV / H) of q and k.",
        f"h [B, NT, HV, {state}], {spec.dtype}: the state before each of the NT chunks"
        f"{', those of all sequences' if spec.varlen else ''}.",
    ]
    if "g" in plan.gates:
        arguments.append(f"g [B, T, HV], {spec.gate_dtype}: the gate, summed from the start of the chunk.")
    if "g_gamma" in plan.gates:
        arguments.append(f"g_gamma [HV], {spec.gate_dtype}: a constant of each head.")
    if spec.v_layout == "chunk_padded":
        arguments.append("What lies in the padding of v does not count, NaN neither.")
    if spec.varlen:
        arguments += [
            "cu_seqlens [N + 1], int32 or int64: where each sequence begins, 0 first, and the last one ends. B is 1.",
            "Tokens after the last sequence give zeros.",
            "chunk_indices [NT, 2]: the sequence of each chunk, and its place in it; computed if left out.",
            "Both are on the device, and not checked: others give results that mean nothing, in their own memory.",
        ]
    arguments.append(f"scale: 1 / sqrt({k}) by default.")
    return {"formula": formula, "argument_words": arguments}
