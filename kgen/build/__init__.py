"""Packages of machine code that need neither a compiler nor Triton (`kgen build`)."""
