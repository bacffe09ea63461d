"""Proofs of the index work of kernels: obligations from the trees of a plan, decided by z3."""
