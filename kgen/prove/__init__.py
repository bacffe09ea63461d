"""Proofs of index arithmetic of kernels with z3: obligations compare a kernel with its spec."""
