"""Norms in Triton."""
