"""The schedules of attention. A call takes the kernels of the first that serves it."""

from __future__ import annotations

from kgen.kernels.attention.schedules import decode, hopper, portable
from kgen.kernels.attention.schedules.schedule import Schedule

SCHEDULES: tuple[Schedule, ...] = (
    decode.SCHEDULE,
    hopper.SCHEDULE,
    portable.SCHEDULE,
)
