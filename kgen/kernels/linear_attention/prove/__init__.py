"""Proofs of the kernels of linear attention."""
