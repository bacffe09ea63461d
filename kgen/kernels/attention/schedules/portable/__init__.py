"""Kernels in Triton that run on every chip."""
