"""Chunk output in Triton."""
