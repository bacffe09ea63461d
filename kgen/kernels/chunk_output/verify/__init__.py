"""Chunk output: references, difficult inputs and checks."""
