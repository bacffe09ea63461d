"""The targets of chunk_output. Each converts a plan to the variables of its templates."""
