"""Attention: references, difficult inputs and checks."""
