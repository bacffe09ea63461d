"""Emitted kernels, run in the interpreters."""
