"""Emitted files whose tiles are loaded by TMA wherever tensors allow it, as only some chips have them."""

from __future__ import annotations

import re

_LAST_RESORT = re.compile(r"^( +\(\(\), dict\(.*)TMA=False\)\),$", re.MULTILINE)


def by_tma(text: str) -> str:
    """The text of a `triton.py`, with a row for TMA ahead of the last of each tile table, which is for every chip."""
    return _LAST_RESORT.sub(r"\1TMA=True)),\n\g<0>", text)
