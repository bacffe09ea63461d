"""The dtypes of torch in emitted Triton files."""

from __future__ import annotations

from collections.abc import Sequence

TORCH_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
    "bool": "bool",
}


def dtype_words(dtypes: Sequence[str]) -> str:
    """List dtypes in words: `float32, bfloat16 or float16`."""
    *first, last = (TORCH_DTYPES[d] for d in dtypes)
    return f"{', '.join(first)} or {last}" if first else last


def other_dtype(name: str, dtypes: Sequence[str]) -> str:
    """Return the Python condition that an argument is not a tensor of one of these dtypes."""
    allowed = [f"torch.{TORCH_DTYPES[d]}" for d in dtypes]
    differs = f"!= {allowed[0]}" if len(allowed) == 1 else f"not in ({', '.join(allowed)})"
    return f"not isinstance({name}, Tensor) or {name}.dtype {differs}"
