"""Output of verbs that run kernels: each result at once, or a table at the end if stdout is a
terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.cli import terminal
from kgen.cli.terminal import EXIT_INTERRUPTED, Format, Row
from kgen.diagnostics import EXIT_WRONG
from kgen.verify.events import Ended, Event, Judged, LeftOut, Listener, Progressed

if TYPE_CHECKING:
    from kgen.spec.load import Loaded
    from kgen.verify.farm.tasks import Hands
    from kgen.verify.found import Interrupted
    from kgen.verify.options import RunOptions, VerifyOptions

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
"""Columns of `kgen verify`, with the minimum width of each for rows that are printed one by one."""
SANITIZED = {"spec": 20, "target": 9, "tool": 9, "ok": 3, "seconds": 7, "message": 0}


def run_verify(
    loaded: Sequence[Loaded],
    generated: Path,
    form: Format,
    jobs: int,
    ray: str | None,
    options: VerifyOptions,
) -> int:
    """Verify emitted files, print the results, and return the exit code."""
    from kgen.verify.verifying import verify_specs

    def verified(hands: Hands, hear: Listener) -> Sequence[Row]:
        return verify_specs(loaded, generated, options, hands, hear)

    return _run(Results(VERIFIED, "right", form, wrong_at_once=True), verified, jobs, ray)


def run_sanitizers(
    loaded: Sequence[Loaded],
    generated: Path,
    form: Format,
    jobs: int,
    ray: str | None,
    tools: Sequence[str],
    options: RunOptions,
) -> int:
    """Run a call of each emitted file under sanitizers, print the results, and return the exit
    code.
    """
    from kgen.verify.sanitizing import sanitize_specs

    def sanitized(hands: Hands, hear: Listener) -> Sequence[Row]:
        return sanitize_specs(loaded, generated, tools, options, hands, hear)

    return _run(Results(SANITIZED, "clean", form), sanitized, jobs, ray)


def _run(
    shown: Results, work: Callable[[Hands, Listener], Sequence[Row]], jobs: int, ray: str | None
) -> int:
    from kgen.verify.farm.opening import hands
    from kgen.verify.found import Interrupted

    try:
        with hands(jobs, ray) as who, terminal.progress_bar() as progress:
            rows = work(who, lambda event: shown.hear(event, progress))
    except Interrupted as run:
        return shown.interrupted(run)
    return shown.judged(rows)


def listener(progress: terminal.Progress, left_out: str = "not run") -> Listener:
    """Return a listener that shows progress and names skipped files on stderr."""

    def hear(event: Event) -> None:
        match event:
            case Progressed():
                progress(event.done, event.total, event.doing)
            case LeftOut():
                terminal.line(f"{left_out}: {event.file.path} {event.why}", sys.stderr)

    return hear


class Results:
    """Rows of a verb with the column `ok`."""

    def __init__(
        self, columns: Mapping[str, int], done: str, form: Format, *, wrong_at_once: bool = False
    ) -> None:
        self._columns, self._done, self._form, self._wrong_at_once = (
            columns,
            done,
            form,
            wrong_at_once,
        )
        self._at_once = form is Format.TEXT and not sys.stdout.isatty()
        self._begun = False
        self._end: Ended | None = None

    def hear(self, event: Event, progress: terminal.Progress) -> None:
        """Print an event of the run, or keep it for the last line."""
        match event:
            case Judged():
                self._result(event.row)
                if self._wrong_at_once and not event.row["ok"]:
                    _wrong(event.row)
            case Ended():
                self._end = event
            case _:
                listener(progress)(event)

    def _result(self, row: Row) -> None:
        """Print and flush a row, unless stdout is a terminal or the format is JSON."""
        if not self._at_once:
            return
        if not self._begun:
            self._begun = True
            self._print({column: column for column in self._columns})
        self._print(row)

    def judged(self, rows: Sequence[Row]) -> int:
        """Print the table and the last line. Return the exit code: 1 if any row failed."""
        wrong = self._table(rows)
        self._last(f"{len(rows) - wrong} {self._done}, {wrong} failed", failed=bool(wrong))
        return EXIT_WRONG if wrong else 0

    def interrupted(self, run: Interrupted) -> int:
        """Print the rows so far and the last line. Return the exit code of an interrupt."""
        wrong = self._table(run.rows)
        said = (
            f"{len(run.rows) - wrong} {self._done}, {wrong} failed, {run.left} not run: interrupted"
        )
        self._last(said, failed=bool(wrong))
        return EXIT_INTERRUPTED

    def _print(self, row: Row) -> None:
        cells = (
            terminal.cell(row.get(column)).ljust(width) for column, width in self._columns.items()
        )
        print("  ".join(cells).rstrip(), flush=True)

    def _table(self, rows: Sequence[Row]) -> int:
        """Print the table unless rows were printed at once. Return the number of failed rows."""
        if not self._at_once:
            terminal.table(rows, [*self._columns], self._form)
        return sum(not row["ok"] for row in rows)

    def _last(self, said: str, *, failed: bool) -> None:
        end = self._end
        for ran in end.ran if end else ():
            terminal.summary(f"{ran.file}: {ran.cases} {ran.how}", self._form)
        if end and end.recorded:
            said += f"; recorded in {end.recorded.as_posix()}"
        elif end and end.recordable and not failed:
            said += "; not recorded: add `--record` to write it to the ledger"
        terminal.summary(said, self._form)


def _wrong(row: Row) -> None:
    """Print a failed case on stderr at once, because a run may end before its table."""
    said = f"wrong: {row['spec']} {row['target']} {row['pass']} {row['case']}: {row['message']}"
    terminal.line(said, sys.stderr)
