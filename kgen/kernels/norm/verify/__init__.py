"""Norms: references, difficult inputs and checks."""
