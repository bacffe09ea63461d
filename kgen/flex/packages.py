"""Names of other packages: numbers, or no more than their names."""

from __future__ import annotations

import math
from typing import Any

from kgen.flex.tables import ALIASES
from kgen.flex.values import External

_NUMBERS = {"inf": math.inf, "pi": math.pi, "e": math.e, "nan": math.nan, "tau": math.tau, "newaxis": None}


def constant(path: str) -> Any:
    """A name of another package, or the number that it is."""
    module, _, name = path.rpartition(".")
    if module.split(".")[0] in ("math", "torch", "numpy", "np") and name in _NUMBERS:
        return _NUMBERS[name]
    if path == "sys.maxsize":
        return 2**63 - 1
    if module == "torch" and name in ALIASES:
        return External(f"torch.{ALIASES[name]}")
    return External(path)
