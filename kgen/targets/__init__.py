"""How each target spells expressions, what it can do, and how it compiles."""
