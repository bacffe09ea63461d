"""Attention over sequences that are spread over ranks: a plan of who needs what, and what carries it out.

`docs/context-parallel-protocol.md` draws who sends what, when, and what each wait waits for.
"""
