"""Runs of emitted kernels in the interpreters."""
