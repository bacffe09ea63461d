"""Scalar expressions: parser, types, the function table, and one pass per file."""
