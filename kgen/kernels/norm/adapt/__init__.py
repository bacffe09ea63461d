"""Adapters of norms."""
