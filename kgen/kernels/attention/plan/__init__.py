"""A spec and its expressions become a frozen KernelPlan for each pass."""
