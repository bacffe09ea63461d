"""The schedules of attention. A call takes the kernels of the first that serves it."""

from __future__ import annotations

from importlib import import_module

from kgen.kernels.attention.schedules.schedule import Schedule

NAMES = (
    "decode",
    "hopper",
    "portable",
)
"""The folders, each with its schedule as `SCHEDULE`."""
SCHEDULES: tuple[Schedule, ...] = tuple(
    import_module(f"{__name__}.{name}").SCHEDULE for name in NAMES
)
CHIP = next((schedule.chip for schedule in SCHEDULES if schedule.chip is not None), None)
"""The chip that some files have kernels of their own for."""
