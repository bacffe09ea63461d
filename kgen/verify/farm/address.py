"""How the address of a Ray cluster is written."""

from __future__ import annotations

import re

AUTO = "auto"
"""The cluster that runs on this machine; without one, one begins that ends with the command."""
ADDRESS = re.compile(r"(ray://)?([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})")


def is_address(text: str) -> bool:
    """Whether that is one."""
    return text == AUTO or ADDRESS.fullmatch(text) is not None
