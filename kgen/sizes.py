"""Sizes of elements and of shared memory, for planning."""

ELEMENT_SIZE = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8_e4m3": 1,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element, by the name of the dtype in a spec."""

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
"""Maximum bytes of shared memory per block, by compute capability (CUDA programming guide, "Compute
Capabilities").

kgen compiles for these chips.
"""

TILED = (
    100,
    90,
    80,
)
"""The chips with their own rows in the tile tables."""

SHARED_MEMORY = {chip: SHARED_LIMITS[chip] for chip in TILED} | {0: min(SHARED_LIMITS.values())}
"""Maximum bytes of shared memory per tile, by row of a tile table. Row 0 is for every other
chip.
"""
