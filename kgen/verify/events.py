"""Events of a run, for the one listener of `verify_specs`, `bench_specs`, `compile_specs` and their like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.verify.emitted import Emitted


@dataclass(frozen=True)
class Progressed:
    """More of the work is done: `done` of `total`, in cases, tasks or expected seconds. `doing` names what ended."""

    done: float
    total: float
    doing: str


@dataclass(frozen=True)
class LeftOut:
    """A file does not run here, or is not built, and why."""

    file: Emitted
    why: str


@dataclass(frozen=True)
class Judged:
    """A case or a call ended: the `row` of it says in `ok` whether it is right."""

    row: dict[str, Any]


@dataclass(frozen=True)
class Ran:
    """Cases of files of one name that ran in one way: "cases on NVIDIA H200"."""

    file: str
    cases: int
    how: str


@dataclass(frozen=True)
class Ended:
    """The run ended, with what there is to say of it beside its rows."""

    ran: tuple[Ran, ...]
    recorded: Path | None
    """The ledger that the run was entered in."""
    recordable: bool
    """True if `record` was left out and would have entered it."""


Event = Progressed | LeftOut | Judged | Ended
Listener = Callable[[Event], None]
"""Called in one thread at a time, in the order of the events."""


def ignore(event: Event) -> None:
    """Hear nothing of a run."""
