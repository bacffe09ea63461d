"""GPU runs of the mutants that the report marks for a GPU: `scripts/mutate --gpu`."""

from __future__ import annotations

import functools
import multiprocessing
import queue
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from mutating.mutants import NOTHING
from mutating.operators import Mutant, mutants
from mutating.reasons import converts_to_int64
from mutating.running import FIRST, File, module_of, written

SECONDS = 150
"""Time limit of one case of a mutant, including compilation, in seconds. Unchanged files take
less.
"""
RIGHT = ""
LOST = "lost: "
"""Prefix of outcomes that contain no information about the mutant."""
IMPORT = "its import"
LARGE = "more than 2**31 elements"
OUT_OF_MEMORY = "out of memory"


def marked(file: File, row: Mapping[str, Any]) -> list[Mutant]:
    """Return the mutants of a file that the report marks for a GPU and that have no GPU result.

    Raise `KgenError` if the report is of another text of the file.
    """
    wanted = {one["mutant"] for one in row["survivors"] if one["what"] == "gpu" and "on" not in one}
    found = [one for one in mutants(file.path.read_text()) if str(one) in wanted]
    if {str(one) for one in found} != wanted:
        raise KgenError(
            Diagnostic(
                "stale-report",
                f"the report is of another text of {file.called}",
                hint=f"scripts/mutate specs/{file.spec}.yaml",
            )
        )
    return found


def found_wrong(
    wanted: Sequence[tuple[File, Mutant]], jobs: int, gpus: int, tried: Tried | None = None
) -> Iterator[tuple[File, Mutant, str]]:
    """Yield each mutant with its failure, or "" if nothing failed, in the order in which they
    finish.

    `jobs` run at a time on `gpus` devices. Large calls run one at a time per device. If the
    unchanged file fails in the same place, the outcome is `lost`.
    """
    tried = _once_as_it_is(tried or _apart)
    large = [one for one in wanted if converts_to_int64(one[1])]
    yield from _side_by_side([one for one in wanted if one not in large], jobs, gpus, tried)
    yield from _side_by_side(large, gpus, gpus, tried)


Tried = Callable[[File, Mutant, int, str], tuple[str, str]]
"""Function that runs a mutant on the numbered GPU, in one place or in all.

It returns the last place and the failure there.
"""


def _once_as_it_is(tried: Tried) -> Tried:
    """Wrap `tried` so that it also runs the unchanged file, once, in each place where a mutant
    fails.
    """
    asked: dict[tuple[str, str], Future[str]] = {}
    lock = threading.Lock()

    def both(file: File, mutant: Mutant, gpu: int, only: str = "") -> tuple[str, str]:
        place, by = tried(file, mutant, gpu, only)
        if not by or by.startswith(LOST):
            return place, by
        with lock:
            first = (file.called, place) not in asked
            right = asked.setdefault((file.called, place), Future())
        if first:
            try:
                right.set_result(tried(file, NOTHING, gpu, place)[1])
            except Exception as error:
                right.set_exception(error)
        return (
            place,
            f"{LOST}the file is wrong as it is: {right.result()}" if right.result() else by,
        )

    return both


def _side_by_side(
    wanted: Sequence[tuple[File, Mutant]], jobs: int, gpus: int, tried: Tried
) -> Iterator[tuple[File, Mutant, str]]:
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(max(jobs, gpus)):
        free.put(number % gpus)

    def on_one(file: File, mutant: Mutant) -> str:
        gpu = free.get()
        try:
            return tried(file, mutant, gpu, "")[1]
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(jobs) as pool:
        tasks = {pool.submit(on_one, file, mutant): (file, mutant) for file, mutant in wanted}
        for task in as_completed(tasks):
            yield *tasks[task], task.result()


def _apart(file: File, mutant: Mutant, gpu: int, only: str) -> tuple[str, str]:
    return last_word(_told, (file, mutant, gpu, only), SECONDS)


def last_word(told: Callable[..., None], about: tuple[Any, ...], seconds: float) -> tuple[str, str]:
    """Run `told` in a separate process, because a faulty kernel ends its process. Return the last
    place and the last word.

    `told` receives a pipe and then `about`. It sends the pair `(place, None)` for each place, and
    finally `("", word)`. If it sends nothing for `seconds`, the process is killed.
    """
    apart = multiprocessing.get_context("spawn")
    ear, mouth = apart.Pipe(duplex=False)
    process = apart.Process(target=told, args=(mouth, *about), daemon=True)
    process.start()
    mouth.close()
    place = ""
    try:
        while ear.poll(seconds):
            came_to, word = ear.recv()
            if word is not None:
                return place, word
            place = came_to
        return place, f"no end of {place}" if place else f"{LOST}it does not start"
    except EOFError:
        return place, f"{LOST}its process ended in {place}"
    finally:
        process.kill()
        process.join()


def _told(mouth: Connection, file: File, mutant: Mutant, gpu: int, only: str) -> None:
    mouth.send(("", wrong(file, mutant, gpu, only, lambda place: mouth.send((place, None)))))


def wrong(file: File, mutant: Mutant, gpu: int, only: str, comes_to: Callable[[str], None]) -> str:
    """Return the first failure of the large calls (if relevant), the cases and the integration
    checks.

    If `only` names a place, run only this place.
    """
    import torch

    torch.set_num_threads(1)
    torch.cuda.set_device(gpu)
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), file, mutant).with_name("triton.py")
        comes_to(IMPORT)
        met = only in ("", IMPORT)
        try:
            for place, said in _places(file, mutant, path):
                if only in ("", place):
                    met = True
                    comes_to(place)
                    if by := said():
                        return by
        except Exception as error:
            if OUT_OF_MEMORY in str(error):
                return f"{LOST}others have the memory"
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} in {frame.name}"
    return RIGHT if met else f"{LOST}there is no {only}"


def _places(file: File, mutant: Mutant, path: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the places where a mutant can fail: their names, and functions that return the failure.

    The places that find most mutants come first.
    """
    from kgen.verify import integration
    from kgen.verify.families import Subject, family_of, problem_of

    problem = problem_of(file.loaded())
    subject = Subject(problem, "triton", path, module_of(path), "cuda")
    family: Any = family_of(problem)
    if converts_to_int64(mutant) or mutant == NOTHING:
        yield LARGE, lambda: _of_large(problem, subject)
    names = [
        (group, name)
        for group in family.groups(problem)
        for name in family.case_names(problem, group, False)
    ]
    for group, name in sorted(
        names, key=lambda one: FIRST.index(one[1]) if one[1] in FIRST else len(FIRST)
    ):
        yield f"{group} {name}", functools.partial(_of_case, family, subject, group, name)
    checks = integration.named(family)
    for name in integration.checks(family, "cuda"):
        yield name, functools.partial(_of_check, checks[name], subject)


def _of_large(problem: Any, subject: Any) -> str:
    from on_gpu.large import LIMIT, repeated, small_calls

    for example in small_calls(problem):
        _, messages = repeated(problem, subject.function, example, "cuda", LIMIT)
        for message in messages:
            return LOST + message if OUT_OF_MEMORY in message else f"{LARGE}: {message}"
    return RIGHT


def _of_case(family: Any, subject: Any, group: str, name: str) -> str:
    failed = [check for check in family.run_case(subject, group, name) if not check.ok]
    if any(OUT_OF_MEMORY in check.message for check in failed):
        return f"{LOST}others have the memory"
    return f"{group} {name}" if failed else RIGHT


def _of_check(check: Callable[[Any], object], subject: Any) -> str:
    check(subject)
    return RIGHT
