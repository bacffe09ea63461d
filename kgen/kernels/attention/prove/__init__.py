"""Obligations of attention kernels."""
