"""The lowered kernels, as the kernels for Hopper import them."""

from kgen.kernels.attention.lowered.kernels import KernelFields, accumulators, scaled

__all__ = ["KernelFields", "accumulators", "scaled"]
