"""How each target prints norms: a plan becomes the names that its templates use."""
