"""Output of the command, data on stdout and the rest on stderr, and exit codes of errors."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TextIO

from kgen import diagnostics
from kgen.diagnostics import EXIT_BUG, Diagnostic, KgenError, MissingError, shortened

EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
EXTRAS = {
    "torch": "verify",
    "triton": "verify",
    "numpy": "verify",
    "matplotlib": "report",
    "z3": "prove",
    "ray": "ray",
}
"""Packages that only some verbs need, with the extra that installs each."""

REFUSALS = frozenset(
    {
        *(errno.EACCES, errno.EDQUOT, errno.EIO, errno.ELOOP, errno.EMFILE, errno.ENAMETOOLONG),
        *(errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EPERM, errno.EROFS),
    }
)
"""Errors of the operating system that are not bugs of kgen."""

Row = Mapping[str, object]
Progress = Callable[[float, float, str], None]


class Format(str, Enum):
    """Values of `--format`."""

    TEXT = "text"
    JSON = "json"


def guarded(work: Callable[[], int], form: Format) -> int:
    """Run a verb. Print any error that it raises, and return the exit code."""
    try:
        with _interrupted_by_others():
            code = work()
        sys.stdout.flush()
        return code
    except KgenError as error:
        return show_error(error, form)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop(sys.stdout)
        return EXIT_PIPE
    except OSError as error:
        return _show_os_error(error, form)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            return _show_bug(error)
        hint = f"pip install 'kgen-kernels[{EXTRAS[package]}]'"
        missing = Diagnostic("missing", f"{package} cannot be imported", hint=hint)
        return show_error(MissingError(missing), form)
    except Exception as error:
        return _show_bug(error)


def settle() -> None:
    """Make the standard streams safe to write to.

    Replace a closed stream by the null device, because the next open file would get its descriptor.
    Write a character that the encoding lacks as an escape.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # `open` returns the lowest free descriptor, `number`
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def asked_format(words: Sequence[str]) -> Format:
    """Return the format of a command line, also if other arguments are wrong."""
    asked = "--format=json" in words or ("--format", "json") in itertools.pairwise(words)
    return Format.JSON if asked else Format.TEXT


def _drop(stream: TextIO) -> None:
    """Redirect the stream to the null device, because the interpreter flushes it again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _show_os_error(error: OSError, form: Format) -> int:
    """Print an error of `REFUSALS`. Treat any other error as a bug."""
    if error.errno not in REFUSALS:
        return _show_bug(error)
    if error.filename is None:  # only streams have no name
        _drop(sys.stdout)
        message, hint = f"cannot write to stdout: {error.strerror}", "redirect stdout"
        return show_error(KgenError(Diagnostic("cannot-write", message, hint=hint)), form)
    name, message = (
        shortened(os.fsdecode(error.filename)),
        f"operating system error: {error.strerror}",
    )
    return show_error(
        KgenError(Diagnostic("refused", message, name, hint="check disk space and permissions")),
        form,
    )


@contextmanager
def _interrupted_by_others() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C: stop the workers and delete half-written files."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    before = {
        number: signal.getsignal(number)
        for name in names
        if (number := getattr(signal, name, None))
    }
    ours = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def show_error(error: KgenError, form: Format) -> int:
    """Print every diagnostic of an error on stderr. Return the exit code."""
    for diagnostic in error.diagnostics:
        if form is Format.JSON:
            line(json.dumps(diagnostics.as_json(diagnostic)), sys.stderr)
        else:
            line(diagnostics.show(diagnostic, color=_has_color(sys.stderr)), sys.stderr)
    return error.exit_code


def _show_bug(error: Exception) -> int:
    for said in "".join(traceback.format_exception(error)).rstrip().split("\n"):
        line(diagnostics.escaped(said), sys.stderr)
    why = diagnostics.escaped(str(error))
    line(f"\nthis is a bug in kgen; please report it with the lines above: {why}", sys.stderr)
    return EXIT_BUG


def line(text: str, stream: TextIO | None = None) -> None:
    """Print one line, on stdout by default. Ignore errors of stderr, because the exit code still
    reports.
    """
    if stream is None or stream is not sys.stderr:
        print(text, file=stream or sys.stdout)
        return
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _drop(stream)


def exact(text: str) -> None:
    """Write the text of a file to stdout in UTF-8, also if the terminal has another encoding."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    sys.stdout.write(text)


def summary(text: str, form: Format, *, aside: bool = False) -> None:
    """Print the last line: on stdout, or on stderr if stdout is data (`aside` or JSON)."""
    line(diagnostics.escaped(text), sys.stderr if aside or form is Format.JSON else sys.stdout)


def data(value: object) -> None:
    """Print a value as JSON."""
    line(as_json(value))


def as_json(value: object) -> str:
    """Return a value as JSON text."""
    return json.dumps(_finite(value), indent=2, default=str)


def table(rows: Sequence[Row], columns: Sequence[str], form: Format) -> None:
    """Print rows as JSON, as a table on a terminal, or else in plain columns that are never cut."""
    if form is Format.JSON:
        data([dict(row) for row in rows])
        return
    if not rows:
        return
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(*columns)
        for row in cells:
            grid.add_row(*map(Text, row))
        Console().print(grid)
        return
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    for row in [list(columns), *cells]:
        line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a function `(done, total, label)` that draws progress if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, label: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, label: bar.update(
            task, description=label, completed=done, total=total
        )


def cell(value: object) -> str:
    """Return the text of a value in a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _finite(value: object) -> object:
    """Replace infinities and NaN by None, because JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _has_color(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ
