"""Seeds that fail for a reason that is no error of kgen's, each with the reason."""

EXPLAINED: dict[int, str] = {}
"""Of the generator that tests/fuzzing/seeds.json names."""
