"""Adapters of linear attention."""
