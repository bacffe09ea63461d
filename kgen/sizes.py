"""Sizes that planning goes by."""

ELEMENT_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "int32": 4, "int64": 8, "uint8": 1, "bool": 1}
"""Bytes of an element in memory, by the name of its dtype in a spec."""

KIB = 1024

SHARED_LIMITS = {
    80: 163 * KIB,
    86: 99 * KIB,
    89: 99 * KIB,
    90: 227 * KIB,
    100: 227 * KIB,
    103: 227 * KIB,
    120: 99 * KIB,
    121: 99 * KIB,
}
"""Bytes of shared memory that one block may have, by compute capability (CUDA programming guide, "Compute
Capabilities"): the chips that files are compiled for."""

TILED = (
    100,
    90,
    80,
)
"""The chips that have rows of their own in tables of tiles."""

SHARED_MEMORY = {chip: SHARED_LIMITS[chip] for chip in TILED} | {0: min(SHARED_LIMITS.values())}
"""What a tile may take, by the row of a table; row 0 is for every other chip."""
