"""Where a head's rows lie: tensors [B, H, S, D], or packed sequences [T, H, D] with offsets into the tokens.

Kernels and launcher are the same for both but for these names.
"""

from __future__ import annotations

from typing import Any

from kgen.targets.code import as_type, row


def placement(packed: bool, grouped: bool, head_v: int, kv_sizes: str) -> dict[str, object]:
    """The names by which the templates find tensors: strides, first rows of a sequence, rows of vectors, shapes.

    `kv_sizes` are the heads and the length of tensors that are not packed. Heads of keys that are not `grouped` are as
    many as those of queries.
    """
    out = f"q.new_empty((TQ, HQ, {head_v}))" if packed else f"_empty((B, HQ, SQ, {head_v}), q)"
    names: dict[str, Any] = {"packed": packed, "empty_out": out} | (_PACKED if packed else _DENSE)
    names["programs"] = {
        x: programs(packed, grouped, x, f'tile["{block}"]')
        for x, block in (("q", "BLOCK_M"), ("kv", "BLOCK_N"))
    }
    if packed:
        heads = "TK, HKV, _ = k.shape" if grouped else "TK = k.shape[0]"
        sizes = {"q": "TQ, HQ, _ = q.shape", "others": [heads, "B = len(cu_seqlens_q) - 1"]}
        return names | {"sizes": sizes}
    others = [f"HKV, SK = {kv_sizes}"] if grouped else ["SK = k.shape[2]"]
    return names | {"sizes": {"q": "B, HQ, SQ, _ = q.shape", "others": others}}


def programs(packed: bool, grouped: bool, side: str, block: str) -> str:
    """How many tiles of `block` rows there are of all sequences and heads; `side` is `q` or `kv`."""
    heads, length = "HKV" if grouped and side == "kv" else "HQ", side[0].upper()
    if packed:
        return f"(T{length} // {block} + B + 1) * {heads}"
    return f"_cdiv(S{length}, {block}) * B * {heads}"


def tma_row(packed: bool, side: str, head: str) -> tuple[str, list[str]]:
    """Where a descriptor has the first row of a tile, all indices but the column; and the names in it.

    `side` is `q` or `kv`. For packed sequences see `_descriptors` in `_launcher.j2`.
    """
    if not packed:
        return f"b, {head}, {side}_start", ["b", head]
    end, length = f"{side}_end", f"S{side[0].upper()}"
    return f"FAR, {end}, {head}, FAR - {length} + {side}_start", [end, length, head]


def strides(letters: str, order: str) -> dict[str, str]:
    """Parameters, in the order of a tensor's dimensions; those that addresses are computed from are 64-bit."""
    return {
        x: ", ".join(f"stride_{x}{d}" + ("" if d == "d" else ": tl.int64") for d in order) for x in letters
    }


_DENSE: dict[str, object] = {
    "strides": strides("qkvgow", "bhsd") | strides("l", "bhs"),
    "first": {x: f"b * stride_{x}b" for x in "qkvgo"} | {"dk": "b * stride_ob", "dv": "b * stride_wb"},
    "rows": row("mul", as_type("b_h", "int64"), "SQ"),
    "head_rows": {"q": "(b * HQ + h).to(tl.int64) * SQ", "kv": "(b * HQ + h).to(tl.int64) * SK"},
    "delta": {
        "sizes": "HQ, SQ",
        "args": "HQ, SQ",
        "no_specialize": 'do_not_specialize=["HQ", "SQ"]',
        "first_o": "b * stride_ob",
        "first_g": "b * stride_gb",
        "first_l": "b * stride_lb",
        "no_strides": "(0, 0, 0)",
        "rows": "b_h.to(tl.int64) * SQ",
        "programs": "_cdiv(SQ, 64) * B * HQ",
    },
    "axes": {"names": "[B, H, S, D]", "count": 4, "steps": "b, h, s", "either_step": "b | h | s"},
    "shape": {
        "q": "B, HQ, SQ",
        "lse": "B, HQ, SQ",
    },
    "like": {x: f"_empty({x}.shape, {x})" for x in "qkv"},
    # Keys and values of four long sequences stay in L2.
    "group": 4,
}

_PACKED: dict[str, object] = {
    "strides": strides("qkvgow", "shd") | strides("l", "hs"),
    "first": {x: f"q_begin * stride_{x}s" for x in "qgo"}
    | {x: f"kv_begin * stride_{x}s" for x in "kv"}
    | {"dk": "kv_begin * stride_os", "dv": "kv_begin * stride_ws"},
    "rows": row("add", row("mul", as_type("h", "int64"), "TQ"), "q_begin"),
    "head_rows": {
        "q": "tl.cast(h, tl.int64) * TQ + q_begin",
        "kv": "tl.cast(h, tl.int64) * TK + kv_begin",
    },
    "delta": {
        "sizes": "cu_seqlens_q_ptr, B, TQ",
        "args": "cu_seqlens_q, B, TQ",
        "no_specialize": 'do_not_specialize=["B", "TQ"]',
        "first_o": None,
        "first_g": None,
        "first_l": None,
        "no_strides": "(0, 0)",
        "rows": "h.to(tl.int64) * TQ",
        "programs": "_cdiv(TQ, 64) * HQ",
    },
    "axes": {"names": "[T, H, D]", "count": 3, "steps": "t, h", "either_step": "t | h"},
    "shape": {
        "q": "TQ, HQ",
        "lse": "HQ, TQ",
    },
    "like": {x: f"{x}.new_empty({x}.shape)" for x in "qkv"},
    # Those of more heads do where sequences are short; what is heavy begins earlier, and the end of a launch is light.
    "group": 16,
}
