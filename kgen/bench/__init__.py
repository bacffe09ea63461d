"""Interleaved timing of emitted kernels and their peers."""
