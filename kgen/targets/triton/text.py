"""Small work on emitted text: wrapped lists, names of types."""

from __future__ import annotations

import textwrap

WIDTH = 112

HELPERS = ("tanh", "tanh_approx", "silu", "floor_mod", "floor_div", "first_at_least")
"""The functions of `_helpers.j2`, each there if an expression needs it."""

TORCH_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "int32": "int32",
    "int64": "int64",
    "bool": "bool",
}


def wrapped(items: list[str], indent: int) -> str:
    """Items with commas, on lines that fit the width."""
    text = textwrap.fill(
        ", ".join(i.replace(" ", "\0") for i in items) + ",",
        WIDTH - indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return textwrap.indent(text.replace("\0", " "), " " * indent)
