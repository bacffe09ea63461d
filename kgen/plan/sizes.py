"""Bytes of an element in memory, by the name of its dtype in a spec."""

ELEMENT_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "int32": 4, "int64": 8, "bool": 1}
