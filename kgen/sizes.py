"""Sizes that planning goes by."""

ELEMENT_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "int32": 4, "int64": 8, "bool": 1}
"""Bytes of an element in memory, by the name of its dtype in a spec."""

KIB = 1024

SHARED_MEMORY = {100: 227 * KIB, 90: 227 * KIB, 80: 163 * KIB, 0: 99 * KIB}
"""Bytes of shared memory that one block may have, by compute capability (CUDA programming guide, "Compute
Capabilities")."""
