"""Checks of a spec with the pass `serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kgen.spec.problems import problem

SERVE_ARGUMENTS = (
    *("k_pages", "v_pages", "block_table", "seq_lens", "cu_seqlens_q"),
    *("workspace", "k_scale", "v_scale", "kv_layout", "max_seqlen_q", "slot_mapping"),
)
"""The arguments of the functions for serving, except the arguments of all functions."""


def check_serving(spec: Any) -> None:
    """Raise a problem if a spec has fields that the pass `serve` does not support, or that need
    it.
    """
    if "serve" not in spec.passes:
        for field in ("kv_dtype", "deterministic"):
            if getattr(spec, field) is not None:
                message = f"`{field}` needs the pass `serve`"
                hint = "remove it, or add `serve` to `passes`"
                raise problem("missing-pass", message, hint, at=(field,), key=True)
        return
    if spec.align == "start":
        message = "`serve` counts positions from the end: the last query is the last key"
        raise problem("unsupported-pass", message, "remove `align`", at=("align",), key=True)
    if spec.block_mask == "always":
        message = "`serve` does not support block masks yet"
        raise problem("unsupported-pass", message, "remove it", at=("block_mask",), key=True)
    if spec.paged_kv is not None or spec.lengths.kv.per_batch:
        place = ("paged_kv",) if spec.paged_kv is not None else ("lengths", "kv")
        message = "`serve` has its own arguments for pages and lengths"
        hint = "remove it: each call has `seq_lens`, and pages of any size"
        raise problem("unsupported-pass", message, hint, at=place, key=True)
    if spec.dtype == "fp32":
        message = "`serve` supports bf16 and fp16, not fp32"
        raise problem("unsupported-pass", message, "write `dtype: bf16`", at=("dtype",))
    refuse_lengths({name: buffer.shape for name, buffer in spec.buffers.items()})


def refuse_lengths(shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Raise a problem for a buffer whose size is the length of a packed sequence."""
    for name, shape in shapes.items():
        for at, size in enumerate(shape):
            if size in ("SQ", "SK"):
                message = f"`{name}` cannot have the size {size}, which differs by packed sequence"
                hint = "use a fixed size: an index out of bounds reads zero"
                raise problem("bad-shape", message, hint, at=("buffers", name, "shape", at))
