"""Lowered attention kernels: dataclasses between the plan and the templates, independent of
language and chip.
"""
