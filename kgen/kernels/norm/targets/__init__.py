"""The targets of norms. Each turns a plan into the variables of its templates."""
