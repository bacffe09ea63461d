"""Scalar mathematics: parse, types, one function table, and one pass per file."""
