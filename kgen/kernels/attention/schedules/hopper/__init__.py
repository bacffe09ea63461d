"""The Hopper kernels: their conditions, tiles, parts and obligations."""

from kgen.family import Chip, Lazy
from kgen.kernels.attention.schedules.schedule import Schedule

CHIP = Chip(
    file="hopper.py",
    arch="sm_90a",
    module="_hopper",
    choice="_on_hopper",
    interpreter="the Gluon interpreter",
    cases=Lazy(f"{__name__}.verify"),
)
SCHEDULE = Schedule(
    name="hopper",
    chip=CHIP,
    made=Lazy(f"{__name__}.made:made"),
    explained=Lazy(f"{__name__}.explained:explained"),
    obligations=Lazy(f"{__name__}.prove:obligations"),
    calls=Lazy(f"{__name__}.native:calls"),
)
