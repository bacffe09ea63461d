"""How each target prints attention: a plan becomes the names that its templates use."""
