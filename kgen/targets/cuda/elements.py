"""Element types as `templates/cuda/_elements.j2` names them."""

from __future__ import annotations

from collections.abc import Collection

ELEMENTS = {"fp32": "float", "bf16": "bf16", "fp16": "fp16", "fp8_e4m3": "fp8_e4m3"}
"""By the name of the dtype in a spec."""


def used(dtypes: Collection[str]) -> dict[str, bool]:
    """Which element types a file has to define."""
    return {name: name in dtypes for name in ELEMENTS}
