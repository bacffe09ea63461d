"""The lists of block masks, as the kernels for Hopper import them."""

from kgen.kernels.attention.lowered.ranges import lists_of

__all__ = ["lists_of"]
