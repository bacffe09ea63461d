"""Specs by seed."""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

FAMILIES = {"attention": 6, "norm": 3, "chunk_output": 1}
"""Weights with which the families of most seeds are drawn."""
OF_ITS_OWN = {9: "linear_attention"}
"""Families of all seeds with some last digit. A draw among more families would change all specs."""


def drawn(seed: int) -> dict[str, Any]:
    """Return the spec of a seed."""
    rng = random.Random(seed)
    (family,) = rng.choices([*FAMILIES], [*FAMILIES.values()])
    family = OF_ITS_OWN.get(seed % 10, family)
    found: dict[str, Any] = import_module(f"fuzzing.{family}").draw(rng)
    return found
