"""Proof that an emitted kernel is right: reference, hard inputs, compare, ledger."""
