"""Packages of `kgen build`, and C and CUDA code, without a GPU."""
