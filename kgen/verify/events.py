"""Events of a run, for the listener of `verify_specs`, `bench_specs`, `compile_specs` and similar
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.verify.emitted import Emitted


@dataclass(frozen=True)
class Progressed:
    """Progress: `done` of `total`, in cases, tasks or expected seconds.

    `doing` names the finished item.
    """

    done: float
    total: float
    doing: str


@dataclass(frozen=True)
class LeftOut:
    """A file that does not run here, or is not built, with the reason."""

    file: Emitted
    why: str


@dataclass(frozen=True)
class Judged:
    """The end of a case or a call. `row["ok"]` is true if the result is right."""

    row: dict[str, Any]


@dataclass(frozen=True)
class Ran:
    """Cases of files of one name that ran in the same way: "cases on NVIDIA H200"."""

    file: str
    cases: int
    how: str


@dataclass(frozen=True)
class Ended:
    """The end of the run, with its summary."""

    ran: tuple[Ran, ...]
    recorded: Path | None
    """The ledger with the result of the run."""
    recordable: bool
    """True if `record` was left out, and would have entered the result."""


Event = Progressed | LeftOut | Judged | Ended
Listener = Callable[[Event], None]
"""Called by one thread at a time, in the order of the events."""


def ignore(event: Event) -> None:
    """Ignore an event."""
