"""Names of other packages: numbers, or opaque names."""

from __future__ import annotations

import math
from typing import Any

from kgen.flex.tables import ALIASES
from kgen.flex.values import External

PYTHON = frozenset(
    {
        *("abs", "all", "any", "bool", "callable", "dict", "divmod", "enumerate", "float", "int"),
        *("isinstance", "len", "list", "map", "max", "min", "pow", "print", "range", "reversed"),
        *("round", "set", "sorted", "str", "sum", "tuple", "type", "zip"),
        *("classmethod", "object", "property", "staticmethod", "super"),
    }
)
"""Builtin names of Python that are read."""
STARS = {
    "math": tuple(name for name in dir(math) if not name.startswith("_")),
    "torch.nn.attention.flex_attention": (
        *(
            "BlockMask",
            "flex_attention",
            "AuxOutput",
            "AuxRequest",
            "create_block_mask",
            "create_mask",
        ),
        *("create_nested_block_mask", "or_masks", "and_masks", "noop_mask"),
    ),
}
"""The names that `from package import *` binds, for known packages."""

_NUMBERS = {
    "inf": math.inf,
    "pi": math.pi,
    "e": math.e,
    "nan": math.nan,
    "tau": math.tau,
    "newaxis": None,
}


def constant(path: str) -> Any:
    """Return a name of another package, or its numeric value."""
    module, _, name = path.rpartition(".")
    if module.split(".")[0] in ("math", "torch", "numpy", "np") and name in _NUMBERS:
        return _NUMBERS[name]
    if path == "sys.maxsize":
        return 2**63 - 1
    if name == "TYPE_CHECKING" and module in ("typing", "typing_extensions"):
        return False
    if module == "torch" and name in ALIASES:
        return External(f"torch.{ALIASES[name]}")
    return External(path)
