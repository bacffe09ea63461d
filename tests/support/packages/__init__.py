"""Packages as `kgen build` makes them, and C and CUDA, without a GPU."""
