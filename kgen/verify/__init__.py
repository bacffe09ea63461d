"""Verification of emitted kernels: reference, difficult inputs, comparison, ledger."""
