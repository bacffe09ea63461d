"""The example of attention from C++: what `templates/attention/c/example.cpp.j2` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kgen.kernels.attention.plan.decode import decodes
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.spec import ANY, KV_LENS
from kgen.kernels.attention.targets.triton.native_learned import learned_example
from kgen.spec.load import Loaded
from kgen.targets.native_reference import in_cpp, spelled, two_of

Fields = dict[str, Any]
SIZES = ("B", "HQ", "HKV", "SQ", "SK")
OPEN, INTEGER, REAL = 5, 3, 0.5
"""Extents and run-time params that the example takes."""
LENGTH, FEW = 200, 5
"""Of the sequences, and how many queries are decoded."""
ERRORS = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 4e-3}
"""Of the largest number: as much as half a percent of it in each step."""


def example_fields(
    loaded: Loaded,
    plan: AttentionPlan,
    buffers: Sequence[Fields],
    params: Sequence[Fields],
    open_sizes: Mapping[str, Sequence[int]],
    learned: Sequence[Fields],
) -> Fields:
    """Sizes, what is drawn, and the spec's expressions as they were written. Raises `KgenError` for a function that
    C++ has no spelling of here."""
    spec = plan.spec
    group = two_of(open_sizes["gqa"]) if spec.gqa == "any" else int(spec.gqa)
    page = spec.paged_kv.page_size if spec.paged_kv is not None else None
    longest = {"q": FEW if decodes(loaded) else LENGTH, "kv": LENGTH}
    lengths = {
        side: _length(most, page if side == "kv" and page else _multiple(getattr(spec.lengths, side)))
        for side, most in longest.items()
    }
    names = {n: f"at.{n}" for n in ("b", "h", "q_idx", "kv_idx", *SIZES)} | {"score": "score"}
    names["h_kv"], names["GQA"] = "(at.h / (at.HQ / at.HKV))", "(at.HQ / at.HKV)"
    for name, param in spec.params.items():
        value = param.value if param.value is not None else INTEGER if param.type == "int" else REAL
        names[name] = f"INT64_C({value})" if param.type == "int" else repr(float(value))
    names |= {b["name"]: f"tensors.{b['member']}" for b in buffers}
    with spelled(loaded):
        trees = {name: in_cpp(tree, names) for name, tree in loaded.trees.items()}
        drawn = [_drawn(b, spec.buffers[b["name"]]) for b in buffers]
        of_learned = learned_example(plan, learned, names, drawn)
    # Of a cache the first keys alone are there.
    known = "at.SK" if not spec.per_batch else f"int64_t(tensors.{_lens(buffers)}({{b}}))"
    return {
        "group": group,
        # Kernels that share out sequences of a cache are made for numbers of them.
        "batch": two_of(open_sizes["batch"]) if decodes(loaded) else 2,
        "lengths": lengths,
        "heads": 2,
        "dtype": spec.dtype.upper(),
        "lse": "FP64" if plan.exact else "FP32",
        "allowed": repr(ERRORS[spec.dtype]),
        "score_mod": trees.get("score_mod", "score"),
        "mask_mod": trees.get("mask_mod", "true"),
        "buffers": drawn,
        **of_learned,
        "params": [{"member": p["member"], "value": REAL if p["real"] else INTEGER} for p in params],
        "page": page,
        "known": known,
        "query_at": f"{known} - at.SQ + i" if spec.aligned_to_end else "i",
    }


def _multiple(length: Any) -> int:
    return getattr(length, "multiple_of", None) or 1


def _length(most: int, multiple: int) -> int:
    return -(-most // multiple) * multiple


def _lens(buffers: Sequence[Fields]) -> str:
    return next(str(b["member"]) for b in buffers if b["name"] == KV_LENS)


def _drawn(of: Fields, buffer: Any) -> Fields:
    """How a buffer is filled."""
    sizes: Mapping[str, str] = {n: f"sizes.{n}" for n in SIZES}
    shape = [str(OPEN) if s == ANY else sizes.get(str(s), str(s)) for s in buffer.shape or (1,)]
    (first, *_) = buffer.dtypes
    dtype = {"int32": "INT32", "int64": "INT64", "uint8": "UINT8", "bool": "BOOL"}.get(first, first.upper())
    if of["name"] == KV_LENS:
        drawn = "[](int64_t b) { return double(std::max(sizes.SK - 50 * b, sizes.SQ)); }"
    elif buffer.sorted:
        last = shape[-1]
        drawn = f"[](int64_t i) {{ return double(i % ({last}) * 3 / ({last})); }}"
    elif dtype == "BOOL":
        drawn = "[](int64_t i) { return double(i % 3 != 0); }"
    elif dtype in ("INT32", "INT64", "UINT8"):
        drawn = "[](int64_t i) { return double(i % 3); }"
    else:
        drawn = "0.5"
    return {"member": of["member"], "sizes": shape, "dtype": dtype, "draw": drawn}
