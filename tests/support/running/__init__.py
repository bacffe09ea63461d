"""Helpers that run tests and their processes."""
