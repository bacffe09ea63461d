"""`scripts/repeat`: run the kernels of emitted files a thousand times, and compare the bits of all
runs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional
from unittest import mock

import typer
from support.running import parts

from kgen.cli import terminal
from kgen.cli.terminal import Format
from kgen.diagnostics import Diagnostic, KgenError, did_you_mean
from kgen.spec.load import load
from kgen.verify.families import Subject, family_of, problem_of
from kgen.verify.toolchain import describe, import_file
from on_gpu.by_spec import Report, emitted

ROOT = Path(__file__).resolve().parents[2]
REPORT = Report(Path(__file__).parent / "repeated.json")
OF_A_PASS = 3
"""Cases per pass: the first, a middle one, and the last, which is long on a GPU."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Repeated:
    """Result of the repeated calls of a file. `wrong` lists the failures."""

    spec: str
    cases: int
    wrong: tuple[str, ...]


@app.command()
def repeat(
    specs: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(help="Spec files whose emitted Triton files run. Default: all."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 1000,
    jobs: parts.Jobs = 1,
    case: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="Run only this case, without recording. Repeatable. Default: three per pass."
        ),
    ] = None,
    times: Annotated[
        int,
        typer.Option(min=1, help="Processes per file. With `--jobs`, they run at the same time."),
    ] = 1,
    record: Annotated[
        bool, typer.Option(help="Record correct results in tests/on_gpu/repeated.json.")
    ] = True,
) -> None:
    """Run cases of emitted files repeatedly on a GPU.

    Exit 1 if bits change that must not. Processes that share a GPU take turns, also within kernels.
    """

    def run() -> int:
        import torch

        if not torch.cuda.is_available():
            raise KgenError(
                Diagnostic("missing-device", "there is no GPU: interpreters have no races")
            )
        paths = specs or sorted(ROOT.glob("specs/*.yaml"))
        require_known(case or (), paths)
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            tasks = [
                pool.submit(repeated, path, runs, "cuda", case or ()) for path in paths * times
            ]
            for future in as_completed(tasks):
                found = future.result()
                terminal.line(f"{found.spec}: {'; '.join(found.wrong) or f'{found.cases} cases'}")
                failed.extend(found.wrong)
                if record and not case and times == 1:
                    row = {"device": describe("cuda")["device"], "cases": found.cases, "runs": runs}
                    REPORT.enter(found.spec, None if found.wrong else row)
        return int(bool(failed))

    failed: list[str] = []
    raise SystemExit(terminal.guarded(run, Format.TEXT))


def repeated(path: Path, runs: int, device: str, chosen: Sequence[str] = ()) -> Repeated:
    """Run cases of a spec's Triton file `runs` times each. `chosen` restricts the cases."""
    from kgen.verify import compare

    loaded = load(path)
    problem, file = problem_of(loaded), emitted(loaded.spec.name)
    family = family_of(problem)
    subject = Subject(
        problem, "triton", file, import_file(file, f"kgen_repeated_{problem.name}"), device
    )
    wrong, count = [], 0
    with (
        mock.patch.object(compare, "AGAIN", runs - 1),
        mock.patch.object(compare, "AGAIN_SECONDS", 0.0),
    ):
        for group in family.groups(problem):
            names = family.case_names(problem, group, quick=False)
            for name in [n for n in names if n in chosen] if chosen else some(names):
                found = family.run_case(subject, group, name)
                wrong += [f"{group} {name}: {check.message}" for check in found if not check.ok]
                count += 1
    return Repeated(loaded.spec.name, count, tuple(wrong))


def require_known(cases: Sequence[str], paths: Sequence[Path]) -> None:
    """Raise `KgenError` for a case that none of the specs has."""
    problems = [problem_of(load(path)) for path in paths] if cases else []
    known = {name for problem in problems for name in _all_names(problem)}
    for case in cases:
        if case not in known:
            hint = did_you_mean(case, sorted(known))
            raise KgenError(Diagnostic("unknown-case", f"there is no case `{case}`", hint=hint))


def _all_names(problem: Any) -> Iterator[str]:
    family = family_of(problem)
    for group in family.groups(problem):
        yield from family.case_names(problem, group, quick=False)


def some(names: Sequence[str]) -> list[str]:
    """Return the first, the middle and the last name."""
    last = len(names) - 1
    return [*dict.fromkeys(names[i * last // max(1, OF_A_PASS - 1)] for i in range(OF_A_PASS))]


def rows() -> Iterator[tuple[str, str]]:
    """Yield the rows for the docs: repeated cases of files of the current text."""
    groups: dict[tuple[int, str], list[int]] = {}
    for row in REPORT.current():
        groups.setdefault((row["runs"], row["device"]), []).append(row["cases"])
    for (runs, device), cases in sorted(groups.items()):
        yield (
            f"{sum(cases)} cases of {len(cases)} files, {runs} times each on {device}",
            "the same bits in every run",
        )


if __name__ == "__main__":
    app()
