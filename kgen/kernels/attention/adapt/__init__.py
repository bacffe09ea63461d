"""Adapters: packages through which models call attention kernels, with kernels for caches and
padding.
"""
