"""Kernels for few queries, whose keys are split over programs."""
