"""What becomes on a GPU of mutants that the report marks for one: `scripts/mutate --gpu`."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from mutating.mutants import NOTHING
from mutating.operators import Mutant, mutants
from mutating.reasons import converts_to_int64
from mutating.running import File, module_of, written

SECONDS = 300
"""That a mutant may take, with what is compiled for it: longer than what is right takes."""
RIGHT = ""
LOST = "lost: "
"""What begins with it says nothing about a mutant."""


def marked(file: File, row: Mapping[str, Any]) -> list[Mutant]:
    """The mutants of a file that its row of the report marks for a GPU.

    Raises `KgenError` if the report is of another text.
    """
    wanted = {one["mutant"] for one in row["survivors"] if one["what"] == "gpu"}
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
    """What was wrong with each mutant, or nothing, as they end.

    `jobs` run at a time, on so many `gpus`; of large calls one on each. Raises `KgenError` if a file is wrong as it is.
    """
    tried = tried or _apart
    files = {file.called: file for file, _ in wanted}
    as_they_are = [(file, NOTHING) for file in files.values()]
    for file, _, by in _side_by_side(as_they_are, jobs, gpus, tried):
        if by:
            raise KgenError(Diagnostic("wrong-as-it-is", f"{file.called} is wrong as it is: {by}"))
    large = [one for one in wanted if converts_to_int64(one[1])]
    yield from _side_by_side([one for one in wanted if one not in large], jobs, gpus, tried)
    yield from _side_by_side(large, gpus, gpus, tried)


Tried = Callable[[File, Mutant, int], str]
"""What is wrong with a mutant on the GPU of a number."""


def _side_by_side(
    wanted: Sequence[tuple[File, Mutant]], jobs: int, gpus: int, tried: Tried
) -> Iterator[tuple[File, Mutant, str]]:
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(max(jobs, gpus)):
        free.put(number % gpus)

    def on_one(file: File, mutant: Mutant) -> str:
        gpu = free.get()
        try:
            return tried(file, mutant, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(jobs) as pool:
        tasks = {pool.submit(on_one, file, mutant): (file, mutant) for file, mutant in wanted}
        for task in as_completed(tasks):
            yield *tasks[task], task.result()


def _apart(file: File, mutant: Mutant, gpu: int) -> str:
    """In a process of its own, which has what a kernel that goes astray leaves of its GPU."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(wrong, (file, mutant, gpu)).get(SECONDS)
        except multiprocessing.TimeoutError:
            return "no end"


def wrong(file: File, mutant: Mutant, gpu: int) -> str:
    """The first that is wrong of large calls, where they tell, of all cases, and of what is checked beside."""
    import torch

    torch.cuda.set_device(gpu)
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), file, mutant).with_name("triton.py")
        try:
            return next(_wrong(file, mutant, path), RIGHT)
        except Exception as error:
            if "out of memory" in str(error):
                return f"{LOST}others have the memory"
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} in {frame.name}"


def _wrong(file: File, mutant: Mutant, path: Path) -> Iterator[str]:
    from large import LIMIT, repeated, small_calls

    from kgen.verify import integration
    from kgen.verify.families import Subject, family_of, problem_of

    problem = problem_of(file.loaded())
    module = module_of(path)
    subject = Subject(problem, "triton", path, module, "cuda")
    if converts_to_int64(mutant):
        for example in small_calls(problem):
            _, messages = repeated(problem, subject.function, example, "cuda", LIMIT)
            yield from (
                LOST + m if "out of memory" in m else f"more than 2**31 elements: {m}" for m in messages
            )
    family: Any = family_of(problem)
    for group in family.groups(problem):
        for name in family.case_names(problem, group, False):
            failed = [check for check in family.run_case(subject, group, name) if not check.ok]
            if any("out of memory" in check.message for check in failed):
                yield f"{LOST}others have the memory"
            if failed:
                yield f"{group} {name}"
    checks = integration.named(family)
    for name in integration.checks(family, "cuda"):
        checks[name](subject)
