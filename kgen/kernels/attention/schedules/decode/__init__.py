"""Decoding kernels for few queries. Programs process splits of the keys."""

from kgen.family import Lazy
from kgen.kernels.attention.schedules.schedule import Schedule

SCHEDULE = Schedule(
    name="decode",
    made=Lazy(f"{__name__}.made:made"),
    explained=Lazy(f"{__name__}.explained:explained"),
    obligations=Lazy(f"{__name__}.prove:obligations"),
    calls=Lazy(f"{__name__}.native:calls"),
)
