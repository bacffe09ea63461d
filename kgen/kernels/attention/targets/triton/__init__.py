"""Attention in Triton."""
