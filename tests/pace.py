"""How fast this machine is: bounds in seconds are of one that counts to ten million in 0.4."""

from __future__ import annotations

import time


def pace() -> float:
    """How many times as long this machine takes, by what it took just now; 1 for a faster one."""
    start, total = time.process_time(), 0
    for i in range(2_000_000):
        total += i
    return max(1.0, (time.process_time() - start) / 0.08)
