"""The spec of a seed."""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

FAMILIES = {"attention": 6, "norm": 3, "chunk_output": 1}
"""How often each is drawn."""


def drawn(seed: int) -> dict[str, Any]:
    """The spec of a seed."""
    rng = random.Random(seed)
    (family,) = rng.choices([*FAMILIES], [*FAMILIES.values()])
    found: dict[str, Any] = import_module(f"fuzzing.{family}").draw(rng)
    return found
