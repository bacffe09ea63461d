"""What verbs that run kernels print: results as they come where nobody has a terminal, else a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.cli import terminal
from kgen.cli.terminal import EXIT_INTERRUPTED, Format, Row
from kgen.diagnostics import EXIT_WRONG

if TYPE_CHECKING:
    from kgen.spec.load import Loaded
    from kgen.verify.emitted import Emitted
    from kgen.verify.found import Interrupted, Told

VERIFIED = {
    "spec": 20,
    "target": 9,
    "pass": 8,
    "case": 18,
    "ok": 3,
    "error": 9,
    "eager": 9,
    "ratio": 9,
    "seconds": 7,
    "message": 0,
}
"""The columns of `kgen verify`, and the least width of each where rows are printed one by one."""
SANITIZED = {"spec": 20, "target": 9, "tool": 9, "ok": 3, "seconds": 7, "message": 0}


def run_verify(
    loaded: Sequence[Loaded], generated: Path, form: Format, jobs: int, ray: str | None, **options: Any
) -> int:
    """Verify emitted files, and print what comes of it."""
    from kgen.verify.verifying import verify_specs

    def verified(shown: Results, **how: Any) -> list[dict[str, Any]]:
        how |= {"wrong": _wrong, "told": shown.told}
        return verify_specs(loaded, generated, **options, **how)

    return _run(Results(VERIFIED, "right", form), verified, jobs, ray)


def run_sanitizers(
    loaded: Sequence[Loaded], generated: Path, form: Format, jobs: int, ray: str | None, **options: Any
) -> int:
    """Run a call of each emitted file under sanitizers, and print what comes of it."""
    from kgen.verify.sanitizing import sanitize_specs

    def sanitized(_: Results, **how: Any) -> list[dict[str, Any]]:
        return sanitize_specs(loaded, generated, **options, **how)

    return _run(Results(SANITIZED, "clean", form), sanitized, jobs, ray)


def _run(shown: Results, work: Callable[..., list[dict[str, Any]]], jobs: int, ray: str | None) -> int:
    from kgen.verify.farm.opening import hands
    from kgen.verify.found import Interrupted

    try:
        with hands(jobs, ray) as who, terminal.progress_bar() as progress:
            rows = work(shown, jobs=jobs, hands=who, progress=progress, skipped=_not_run, result=shown.result)
    except Interrupted as run:
        return shown.interrupted(run)
    return shown.judged(rows)


def _not_run(file: Emitted, why: str) -> None:
    terminal.line(f"not run: {file.path} {why}", sys.stderr)


def _wrong(row: Row) -> None:
    """A case is wrong. This is said at once: a run may end before its table."""
    said = f"wrong: {row['spec']} {row['target']} {row['pass']} {row['case']}: {row['message']}"
    terminal.line(said, sys.stderr)


class Results:
    """The rows of a verb, each right or wrong."""

    def __init__(self, columns: Mapping[str, int], done: str, form: Format) -> None:
        self._columns, self._done, self._form = columns, done, form
        self._at_once = form is Format.TEXT and not sys.stdout.isatty()
        self._begun = False
        self._told: Told | None = None

    def result(self, row: Row) -> None:
        """A row that is there. It is printed and flushed at once unless stdout is a terminal or for JSON."""
        if not self._at_once:
            return
        if not self._begun:
            self._begun = True
            self._print({column: column for column in self._columns})
        self._print(row)

    def told(self, told: Told) -> None:
        """What there is to say of the whole run."""
        self._told = told

    def judged(self, rows: Sequence[Row]) -> int:
        """Print what was not printed, and the last line; a row that is wrong is the verb's failure."""
        wrong = self._table(rows)
        self._last(f"{len(rows) - wrong} {self._done}, {wrong} failed", failed=bool(wrong))
        return EXIT_WRONG if wrong else 0

    def interrupted(self, run: Interrupted) -> int:
        """The same of the rows so far."""
        wrong = self._table(run.rows)
        said = f"{len(run.rows) - wrong} {self._done}, {wrong} failed, {run.left} not run: interrupted"
        self._last(said, failed=bool(wrong))
        return EXIT_INTERRUPTED

    def _print(self, row: Row) -> None:
        cells = (terminal.cell(row.get(column)).ljust(width) for column, width in self._columns.items())
        print("  ".join(cells).rstrip(), flush=True)

    def _table(self, rows: Sequence[Row]) -> int:
        """How many rows are wrong."""
        if not self._at_once:
            terminal.table(rows, [*self._columns], self._form)
        return sum(not row["ok"] for row in rows)

    def _last(self, said: str, *, failed: bool) -> None:
        told = self._told
        for ran in told.ran if told else ():
            terminal.summary(f"{ran.file}: {ran.cases} {ran.how}", self._form)
        if told and told.recorded:
            said += f"; recorded in {told.recorded.as_posix()}"
        elif told and told.recordable and not failed:
            said += "; not recorded: add `--record` to enter this in the ledger"
        terminal.summary(said, self._form)
