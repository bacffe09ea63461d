"""Lines of branches in Python."""

from __future__ import annotations

from collections.abc import Sequence


def elif_of(lines: Sequence[str]) -> list[str]:
    """Return the lines of an `if` as an `elif`."""
    return [f"el{lines[0]}", *lines[1:]]
