"""Rename names of a spec that proofs use for their own unknowns."""

from __future__ import annotations

from kgen.spec.load import Loaded
from kgen.spec.names import named_apart

_OF_PROOFS = (
    "tile row lane number other position consumer block pages size column kind count list inf"
)


def apart(loaded: Loaded) -> Loaded:
    """Return the spec with other names for the names of proofs, and for names that its files
    rename.
    """
    return named_apart(loaded, frozenset(_OF_PROOFS.split()))
