"""Tasks of a command, and executors that run them on one or many machines and return their rows.

A task runs on one machine, with its workers, so its measurements come from one device. Only the
command writes ledgers, tables and reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, Protocol

from kgen.verify.processes import WorkerError, threads
from kgen.verify.toolchain import pick_device

Row = dict[str, Any]
Messages = Callable[..., Iterator[Row]]
"""`kgen.verify.processes.messages`, or a replacement."""


@dataclass(frozen=True)
class Task:
    """One unit of work.

    `key` identifies it. `work` is a function of a module, or a `partial` of one, that yields the
    rows of a `job`. Its second argument is a replacement of `messages`. The `job` is pickled. Paths
    in it that lie in one of the `folders` are sent with all files there. `device` is `cuda` or
    `cpu`.
    """

    key: tuple[str, ...]
    work: Callable[..., Iterator[Row]]
    job: Any
    folders: tuple[Path, ...] = ()
    device: str = "cpu"


@dataclass(frozen=True)
class Done:
    """A task with all of its rows."""

    task: Task
    rows: list[Row]


NODE: list[str] = []
"""The cluster node of this process. Empty on this machine."""


Heard = Callable[[Task, Row], None]


def nobody(task: Task, row: Row) -> None:
    """Ignore a row."""


class Hands(Protocol):
    """An executor of tasks."""

    far: bool
    """True for other machines, whose devices and packages are unknown here."""
    beside: int
    """Number of concurrent tasks of a machine."""

    def device(self, asked: str) -> str:
        """Return `cuda` or `cpu` for `auto`, `cuda` or `cpu`.

        Raises `MissingError` without that device.
        """

    def run(self, tasks: Sequence[Task], heard: Heard = nobody, alone: bool = False) -> list[Done]:
        """Run all tasks and return their results in the order of the tasks.

        `heard` is called with each row, by one thread at a time. With `alone`, a device runs one
        task at a time. An interrupt of the caller ends the tasks.
        """


class Here:
    """Executor with processes of this machine."""

    far = False

    def __init__(self, jobs: int = 1) -> None:
        self.beside = max(1, jobs)

    def device(self, asked: str) -> str:
        """Return the device of this machine."""
        return pick_device(asked)

    def run(self, tasks: Sequence[Task], heard: Heard = nobody, alone: bool = False) -> list[Done]:
        """Run tasks in threads, each of which waits for the workers of one task."""
        lock = Lock()

        def do(task: Task) -> Done:
            rows = []
            for row in task.work(task.job):
                rows.append(row)
                with lock:
                    heard(task, row)
            return Done(task, rows)

        with threads(1 if alone else self.beside) as pool:
            return list(pool.map(do, tasks))


def lost(why: str) -> Messages:
    """Return a replacement of `messages` whose worker is lost, for a lost node."""

    def messages(*_: object, **__: object) -> NoReturn:
        raise WorkerError(why)

    return messages
