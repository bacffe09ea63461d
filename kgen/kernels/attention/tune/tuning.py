"""`kgen tune`: find the fastest tile by trying candidates.

The candidates come from the plan (`plan.tiles.candidates`). They are first compiled in parallel
without a GPU. Candidates that fail to compile or exceed the shared memory are dropped. The others
are timed one by one, and the fastest is written to the table that `kgen render` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kgen.kernels.attention.bench.shape import Shape
from kgen.kernels.attention.plan import tuned
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.tiles import candidates
from kgen.kernels.attention.plan.tuned import Class, Tile
from kgen.kernels.attention.schedules.portable.conditions import takes_many_queries
from kgen.kernels.attention.tune.job import TuneJob
from kgen.sizes import SHARED_LIMITS
from kgen.tuning import DEFAULT, TuneOptions, untuned
from kgen.verify.emitted import require_emitted
from kgen.verify.events import Listener, Progressed, ignore
from kgen.verify.families import problem_of
from kgen.verify.farm.tasks import NODE, Hands, Here, Messages, Row, Task
from kgen.verify.processes import WorkerError, messages
from kgen.verify.toolchain import describe

CHIP = 90
"""Compute capability of the compiled kernels. The timing device must have the same."""

NOISE = 0.01
"""A tile replaces the one in the table only if it is faster by more than this share."""

PARTS = 8
"""Number of parts in which machines of a cluster compile the trials of a spec."""

Tried = Callable[[TuneJob], Iterator[dict[str, Any]]]


@dataclass(frozen=True)
class Trial:
    """One tile for one kernel of one spec, with its `milliseconds` or `error`."""

    spec: str
    kernel: str
    known_as: Class
    tile: Tile
    milliseconds: float | None = None
    error: str | None = None
    where: tuple[tuple[str, str], ...] = ()
    """Device and node, if another machine timed the trial."""


def tune_specs(
    loaded: Sequence[Any],
    generated: Path,
    options: TuneOptions = DEFAULT,
    hands: Hands | None = None,
    hear: Listener = ignore,
    *,
    table: Path = tuned.PATH,
    tried: Tried | None = None,
) -> list[dict[str, Any]]:
    """Time the candidates of every kernel of some attention specs, and write the winners to the
    table.

    Return rows of spec, kernel, tile, milliseconds, chosen and error, the fastest of each kernel
    first. A spec that only decodes gives a row with an error.

    Specs of one class (`plan.tuned.Class`) share a row of the table. The winner has the lowest
    product of its times, each divided by the best time of its spec.

    `tried` replaces the worker process. `hands` run the trials; the default is one process on this
    machine. One device times all trials of a spec. Rows from other machines have `device` and
    `node`.

    Raise `KgenError` for a spec that is not rendered, and `MissingError` without torch, Triton or a
    GPU.
    """
    found = _tried(
        [one for one in loaded if _has_table(one)], generated, options, hands or Here(), hear, tried
    )
    before = tuned.read(table) if options.write and table.exists() else {}
    winners = choose(found, before)
    if options.write:
        tuned.write(before | winners, table)
    found.sort(
        key=lambda t: (t.spec, t.kernel, t.milliseconds if t.milliseconds is not None else math.inf)
    )
    rows = [_row(trial, chosen=winners.get(trial.known_as) == trial.tile) for trial in found]
    return rows + [untuned(one.folder) for one in loaded if not _has_table(one)]


def _row(trial: Trial, *, chosen: bool) -> dict[str, Any]:
    return {
        "spec": trial.spec,
        "kernel": trial.kernel,
        "tile": _words(trial.tile),
        "milliseconds": trial.milliseconds,
        "chosen": chosen,
        "error": trial.error,
        **dict(trial.where),
    }


def _tried(
    loaded: Sequence[Any],
    generated: Path,
    options: TuneOptions,
    hands: Hands,
    hear: Listener,
    tried: Tried | None,
) -> list[Trial]:
    """Return all trials with their results. Trials that do not compile or fit come first."""
    device = hands.device("cuda") if tried is None else "cpu"
    size = Shape.parse(options.shape) if options.shape else Shape()
    do = partial(run_trials, timeout=options.timeout, tried=tried)
    work = [_Work(one, generated) for one in loaded]
    # All compilation ends before the first timing, so that it does not disturb it.
    parts = max(1, hands.beside // 2) if not hands.far else PARTS
    compiled = hands.run([task for w in work for task in w.compile(do, parts)])
    for w in work:
        w.unfit = [
            t for one in compiled if one.task.key[0] == w.name for t in _trials(one.rows) if t.error
        ]
    timed = 0

    def heard(task: Task, row: Row) -> None:
        nonlocal timed
        if "last" in row:
            timed += 1
            hear(Progressed(timed, len(work), task.key[0]))

    found = [t for w in work for t in w.unfit]
    for one in hands.run([w.time(do, size, device) for w in work], heard, alone=True):
        found += _trials(one.rows)
    return found


def _has_table(one: Any) -> bool:
    """Return True if the spec has kernels with a tile table. Specs that only decode have none."""
    return takes_many_queries(one.spec)


def choose(trials: Sequence[Trial], before: dict[Class, Tile]) -> dict[Class, Tile]:
    """Return the winner of each timed class. The tile `before` stays unless another is faster by
    more than `NOISE`."""
    chosen = {}
    by_pointers = [
        replace(t, known_as=replace(t.known_as, loads="pointers")) for t in trials if not t.tile.TMA
    ]
    trials = [*trials, *(t for t in by_pointers if t not in trials)]
    for known_as in dict.fromkeys(t.known_as for t in trials if t.milliseconds is not None):
        times: dict[Tile, dict[str, float]] = {}
        for t in trials:
            if t.known_as == known_as and t.milliseconds is not None:
                times.setdefault(t.tile, {})[t.spec] = t.milliseconds
        specs = {spec for of_tile in times.values() for spec in of_tile}
        best = {
            spec: min(of_tile[spec] for of_tile in times.values() if spec in of_tile)
            for spec in specs
        }
        # A tile that failed for one spec cannot serve the class.
        slower = {
            tile: math.exp(
                sum(math.log(ms / best[spec]) for spec, ms in of_tile.items()) / len(specs)
            )
            for tile, of_tile in times.items()
            if len(of_tile) == len(specs)
        }
        if not slower:
            continue
        winner = min(slower, key=lambda tile: slower[tile])
        old = before.get(known_as)
        keeps = old in slower and slower[old] <= slower[winner] * (1 + NOISE)
        chosen[known_as] = old if keeps and old is not None else winner
    return chosen


class _Work:
    """The trials of one spec, and those that do not compile or fit."""

    def __init__(self, one: Any, generated: Path) -> None:
        self.name, self.problem = one.folder, problem_of(one)
        files = require_emitted(generated, one)
        self.path = next(file.path for file in files if file.target == "triton").resolve()
        self.unfit: list[Trial] = []
        plan = plan_attention(one)
        self.trials = [
            Trial(self.name, kernel, plan.problem.timed_as(CHIP, kernel), tile)
            for kernel in (("forward", "dq", "dkdv") if plan.backward else ("forward",))
            for tile in candidates(plan.problem, kernel, CHIP)
        ]

    def compile(self, do: Callable[..., Iterator[Row]], parts: int) -> list[Task]:
        """Return tasks that compile all trials, in parts, on small inputs."""
        size = Shape(1, 2, 256)
        jobs = [
            _Trials(self.problem, self.path, tuple(self.trials[i::parts]), size, CHIP)
            for i in range(parts)
        ]
        folders = (self.path.parent,)
        return [
            Task((self.name, f"compile {i}"), do, job, folders)
            for i, job in enumerate(jobs)
            if job.trials
        ]

    def time(self, do: Callable[..., Iterator[Row]], size: Shape, device: str) -> Task:
        """Return the task that times the trials that compile and fit."""
        unfit = {(t.kernel, t.tile) for t in self.unfit}
        fitting = tuple(t for t in self.trials if (t.kernel, t.tile) not in unfit)
        job = _Trials(self.problem, self.path, fitting, size, None)
        return Task((self.name, "time"), do, job, (self.path.parent,), device)


@dataclass(frozen=True)
class _Trials:
    """Trials of one spec for one worker: compiled for a `capability`, or timed without one."""

    problem: Any
    path: Path
    trials: tuple[Trial, ...]
    shape: Shape
    capability: int | None


def run_trials(
    job: _Trials, instead: Messages | None = None, *, timeout: float, tried: Tried | None = None
) -> Iterator[Row]:
    """Yield a row with each `trial`, then a row `last`."""
    tried = tried or _worker(timeout, instead or messages)
    for trial in _run(job.problem, job.path, list(job.trials), job.shape, job.capability, tried):
        timed = NODE and trial.milliseconds is not None
        where = (("device", describe("cuda")["device"]), ("node", NODE[0])) if timed else ()
        yield {"trial": replace(trial, where=where)}
    yield {"last": True}


def _trials(rows: Sequence[Row]) -> list[Trial]:
    return [row["trial"] for row in rows if "trial" in row]


def _run(
    problem: Any,
    path: Path,
    trials: list[Trial],
    shape: Shape,
    capability: int | None,
    tried: Tried,
) -> Iterator[Trial]:
    """Yield each trial with its result. A trial that kills or blocks the worker is an error, and
    the next ones go on."""
    while trials:
        job = TuneJob(problem, path, shape, tuple((t.kernel, t.tile) for t in trials), capability)
        current = done = -1
        try:
            for line in tried(job):
                current = line.get("start", current)
                if "trial" in line:
                    done = line["trial"]
                    yield replace(
                        trials[done], milliseconds=line.get("milliseconds"), error=_error(line)
                    )
            return
        except WorkerError as error:
            # A worker that did not reach its first trial will not reach another.
            lost = trials if current < 0 else trials[done + 1 : current + 1]
            yield from (replace(trial, error=str(error)[:300]) for trial in lost)
            trials = [] if current < 0 else trials[current + 1 :]


def _error(line: dict[str, Any]) -> str | None:
    if line["error"] is None and line.get("shared", 0) > SHARED_LIMITS[CHIP]:
        return f"needs {line['shared']} bytes of shared memory, the chip has {SHARED_LIMITS[CHIP]}"
    error: str | None = line["error"]
    return error


def _worker(timeout: float, messages: Messages) -> Tried:
    return lambda job: messages(
        "kgen.kernels.attention.tune.worker", job, timeout, {"TRITON_INTERPRET": None}
    )


def _words(tile: Tile) -> str:
    by = "TMA" if tile.TMA else "pointers"
    return f"{tile.BLOCK_M}x{tile.BLOCK_N}, {tile.num_warps} warps, {tile.num_stages} stages, {by}"
