"""Attention over sequences that are sharded over ranks: plans, and the runtime that executes them.

`docs/context-parallel-protocol.md` describes the messages between ranks and all waits.
"""
