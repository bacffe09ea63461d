"""A norm becomes a frozen NormPlan, with the shapes of its launches."""
