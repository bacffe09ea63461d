"""Chunk output in the CuTe DSL: a file for each architecture."""
