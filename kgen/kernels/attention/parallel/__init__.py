"""Attention over sequences that are spread over ranks: a plan of who needs what, and what carries it out."""
