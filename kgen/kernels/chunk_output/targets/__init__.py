"""The targets of chunk_output. Each turns a plan into the variables of its templates."""
