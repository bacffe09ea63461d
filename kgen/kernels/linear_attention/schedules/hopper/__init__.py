"""The forward kernels for Hopper: their conditions, templates and cases."""

from kgen.family import Chip, Lazy
from kgen.kernels.linear_attention.schedules.schedule import Schedule

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
    missing=Lazy(f"{__name__}.conditions:without_kernels"),
    explained=Lazy(f"{__name__}.explained:explained"),
    made=Lazy(f"{__name__}.made:made"),
)
