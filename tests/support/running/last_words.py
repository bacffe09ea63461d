"""What a process may say last, for tests of who waits for it: it imports nothing that takes time."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection


def says(mouth: Connection, *places: str) -> None:
    """Each place, and a word at the end of some."""
    for place in places:
        mouth.send((place, None))
    match places:
        case (*_, "spins"):
            time.sleep(600)
        case (*_, "right"):
            mouth.send(("", ""))
        case (*_, "wrong"):
            mouth.send(("", "dq"))
