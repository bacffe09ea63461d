"""The kernels for Hopper: when there are some, with what tiles, what they are made of, and what is proved of them."""

from kgen.family import Lazy
from kgen.kernels.attention.schedules.schedule import Schedule

SCHEDULE = Schedule(
    name="hopper",
    made=Lazy(f"{__name__}.made:made"),
    explained=Lazy(f"{__name__}.explained:explained"),
    obligations=Lazy(f"{__name__}.prove:obligations"),
)
