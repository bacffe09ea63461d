"""Names that proofs have for themselves, and that a spec may have, too."""

from __future__ import annotations

from kgen.spec.load import Loaded
from kgen.spec.names import named_apart

_OF_PROOFS = "tile row lane number other position consumer block pages size column kind count list inf"


def apart(loaded: Loaded) -> Loaded:
    """The spec with other names for those that have a meaning in proofs, and for those that give way in its files."""
    return named_apart(loaded, frozenset(_OF_PROOFS.split()))
