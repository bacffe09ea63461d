"""Seeds that fail although kgen has no bug, each with the reason."""

EXPLAINED: dict[int, str] = {}
"""Reasons by seed, for the generator that `tests/fuzzing/seeds.json` names."""
