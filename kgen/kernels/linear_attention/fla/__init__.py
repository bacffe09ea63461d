"""Runtime of the adapter for the functions of flash-linear-attention and mamba-ssm, which is
emitted unchanged.
"""
