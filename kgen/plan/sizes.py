"""Sizes that planning goes by."""

ELEMENT_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "int32": 4, "int64": 8, "bool": 1}
"""Bytes of an element in memory, by the name of its dtype in a spec."""

LARGEST_TILE = 128
"""The largest tile of attention: lengths that are promised to be a multiple of it need no bounds checks."""
