"""The targets of attention: each converts a plan to the names that its templates use."""
