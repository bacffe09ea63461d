"""Addresses of Ray clusters."""

from __future__ import annotations

import re

AUTO = "auto"
"""The cluster of this machine. If there is none, the command starts one, and ends it."""
ADDRESS = re.compile(r"(ray://)?([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})")


def is_address(text: str) -> bool:
    """Return True if a text is the address of a cluster."""
    return text == AUTO or ADDRESS.fullmatch(text) is not None
