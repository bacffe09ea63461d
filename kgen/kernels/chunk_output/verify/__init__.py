"""Chunk output: its references, hard inputs and checks."""
