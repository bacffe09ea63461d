"""The targets of norms. Each converts a plan to the variables of its templates."""
