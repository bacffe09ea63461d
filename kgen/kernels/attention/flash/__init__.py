"""Runtime of the adapters for PyTorch and for FlashAttention's functions, which is emitted
unchanged.
"""
