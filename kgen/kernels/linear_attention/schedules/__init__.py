"""The kernels for one chip. A call runs them if the device and the tensors fit, and otherwise the
portable kernels. Each is a folder that defines `SCHEDULE`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from kgen.family import Chip
from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.schedules.schedule import Schedule

SCHEDULES: tuple[Schedule, ...] = tuple(
    import_module(f"{__name__}.{path.parent.name}").SCHEDULE
    for path in sorted(Path(__file__).parent.glob("*/__init__.py"))
)
CHIPS: tuple[Chip, ...] = tuple(schedule.chip for schedule in SCHEDULES)
"""The chips that have their own kernels in some files."""
CHOICES: tuple[str, ...] = tuple(chip.choice for chip in CHIPS)
"""The functions in emitted files that choose these kernels."""


def schedule_of(plan: LinearAttentionPlan) -> Schedule | None:
    """Return the schedule that supports a spec, or None."""
    return next((one for one in SCHEDULES if one.missing(plan) is None), None)


def keeps(plan: LinearAttentionPlan) -> bool:
    """True if the operator of forward has the flag `keep`: tensors for backward are optional."""
    return schedule_of(plan) is not None and plan.backward and plan.spec.saves_states
