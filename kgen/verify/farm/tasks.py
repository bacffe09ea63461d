"""A verb says its tasks once; hands do them, here or on many machines, and give back the rows of each.

A task runs where it is done from its first row to its last, with the workers that it begins there: what is compared in
it was measured on one device. It writes nothing that others read; ledgers, tables and reports are the verb's.
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
"""`kgen.verify.processes.messages`, or what stands in for it."""


@dataclass(frozen=True)
class Task:
    """Something to do, once.

    `key` tells it from the others. `work` is a function of a module, or a `partial` of one, that yields the rows of a
    `job`; as a second argument it takes what stands in for `messages`. A `job` is pickled: paths in it that lie in one
    of the `folders` go along with all that is there. `device` is `cuda` or `cpu`.
    """

    key: tuple[str, ...]
    work: Callable[..., Iterator[Row]]
    job: Any
    folders: tuple[Path, ...] = ()
    device: str = "cpu"


@dataclass(frozen=True)
class Done:
    """A task, and all of its rows."""

    task: Task
    rows: list[Row]


NODE: list[str] = []
"""The node of a cluster that this process does tasks on; empty where that is this machine."""


Heard = Callable[[Task, Row], None]


def nobody(task: Task, row: Row) -> None:
    """Who hears of no row before all are there."""


class Hands(Protocol):
    """Who does tasks."""

    far: bool
    """Whether they are other machines, of which nothing is known here: neither their devices nor their packages."""
    beside: int
    """How many tasks a machine does side by side."""

    def device(self, asked: str) -> str:
        """`cuda` or `cpu` for `auto`, `cuda` or `cpu`. Raises `MissingError` where there is no such device."""

    def run(self, tasks: Sequence[Task], heard: Heard = nobody, alone: bool = False) -> list[Done]:
        """Do all tasks and give their rows, in the order of the tasks, each task's once.

        `heard` is called with each row, in one thread at a time. Of tasks that are to be `alone` a device does one at
        a time. What interrupts the caller ends the tasks.
        """


class Here:
    """Processes of this machine, some at a time."""

    far = False

    def __init__(self, jobs: int = 1) -> None:
        self.beside = max(1, jobs)

    def device(self, asked: str) -> str:
        """What this machine has."""
        return pick_device(asked)

    def run(self, tasks: Sequence[Task], heard: Heard = nobody, alone: bool = False) -> list[Done]:
        """In threads, each of which waits for the workers of one task."""
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
    """In place of `messages`: the worker never came back. What a verb says of that, it says of a lost node, too."""

    def messages(*_: object, **__: object) -> NoReturn:
        raise WorkerError(why)

    return messages
