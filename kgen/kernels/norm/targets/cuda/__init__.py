"""Norms in CUDA."""
