"""Norms: their references, hard inputs and checks."""
