"""The schedules of attention. A call uses the kernels of the first schedule that serves it."""

from __future__ import annotations

from importlib import import_module

from kgen.family import Chip
from kgen.kernels.attention.schedules.schedule import Schedule

NAMES = (
    "serve",
    "decode",
    "hopper",
    "portable",
)
"""The folders of the schedules. Each defines `SCHEDULE`."""
SCHEDULES: tuple[Schedule, ...] = tuple(
    import_module(f"{__name__}.{name}").SCHEDULE for name in NAMES
)
CHIPS: tuple[Chip, ...] = tuple(
    schedule.chip for schedule in SCHEDULES if schedule.chip is not None
)
"""The chips that have their own kernels in some files."""
