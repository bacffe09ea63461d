"""Emitted files that load tiles by TMA on any chip, if the tensors allow it."""

from __future__ import annotations

import re

_LAST_RESORT = re.compile(r"^( +\(\(\), dict\(.*)TMA=False\)\),$", re.MULTILINE)


def by_tma(text: str) -> str:
    """Return the text of a `triton.py` with a TMA row before the last row of each tile table."""
    return _LAST_RESORT.sub(r"\1TMA=True)),\n\g<0>", text)
