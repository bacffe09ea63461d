"""Kernels for the batches of a serving engine: packed queries over paged keys."""

from kgen.family import Lazy
from kgen.kernels.attention.schedules.schedule import Schedule

SCHEDULE = Schedule(
    name="serve",
    made=Lazy(f"{__name__}.made:made"),
    explained=Lazy(f"{__name__}.explained:explained"),
    obligations=Lazy(f"{__name__}.prove:obligations"),
    calls=Lazy(f"{__name__}.native:calls"),
)
