"""Names in emitted Triton: helpers, types of torch."""

from __future__ import annotations

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
