"""Kernels of attention as dataclasses that know no language and no chip: a plan is lowered to them, and templates print
them."""
