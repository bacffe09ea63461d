"""The targets of linear_attention. Each converts a plan to the variables of its templates."""
