"""How each target prints chunk output: a plan becomes the names that its templates use."""
