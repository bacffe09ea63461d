"""Attention: its references, hard inputs and checks."""
