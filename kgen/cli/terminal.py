"""What the command shows, data on stdout and the rest on stderr, and how an error becomes an exit code."""

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
"""Packages that only some verbs need, and the extra that brings each."""

REFUSALS = frozenset(
    {
        *(errno.EACCES, errno.EDQUOT, errno.EIO, errno.ELOOP, errno.EMFILE, errno.ENAMETOOLONG),
        *(errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EPERM, errno.EROFS),
    }
)
"""Errors of the system that no program avoids: no bug of kgen."""

Row = Mapping[str, object]
Progress = Callable[[float, float, str], None]


class Format(str, Enum):
    """How data and diagnostics are written."""

    TEXT = "text"
    JSON = "json"


def guarded(work: Callable[[], int], form: Format) -> int:
    """Run a verb; whatever it raises is shown and becomes its exit code."""
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

    A closed stream becomes the null device; else the next file that kgen opens would get its descriptor. A character
    that the encoding of a stream lacks is written as an escape.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def asked_format(words: Sequence[str]) -> Format:
    """The format that a command line asks for, which may be wrong otherwise."""
    asked = "--format=json" in words or ("--format", "json") in itertools.pairwise(words)
    return Format.JSON if asked else Format.TEXT


def _drop(stream: TextIO) -> None:
    """Send what the stream still holds to the null device: the interpreter flushes once more at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _show_os_error(error: OSError, form: Format) -> int:
    """Show what the system refused; another error is a bug."""
    if error.errno not in REFUSALS:
        return _show_bug(error)
    if error.filename is None:  # a stream: files are opened by their names
        _drop(sys.stdout)
        message, hint = f"cannot write to stdout: {error.strerror}", "send it elsewhere"
        return show_error(KgenError(Diagnostic("cannot-write", message, hint=hint)), form)
    name, message = shortened(os.fsdecode(error.filename)), f"the system refused: {error.strerror}"
    return show_error(
        KgenError(Diagnostic("refused", message, name, hint="check disk and permissions")), form
    )


@contextmanager
def _interrupted_by_others() -> Iterator[None]:
    """Who ends this process from elsewhere interrupts it as Ctrl-C does: workers end, what is half written goes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGTERM", "SIGHUP")  # the second is not there on Windows
    before = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    ours = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def show_error(error: KgenError, form: Format) -> int:
    """Every diagnostic of an error, on stderr."""
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
    line(f"\nthis is a bug in kgen, please report it with the lines above: {why}", sys.stderr)
    return EXIT_BUG


def line(text: str, stream: TextIO | None = None) -> None:
    """Print one line, on stdout by default. A stderr that takes nothing is no error: the exit code still tells."""
    if stream is None or stream is not sys.stderr:
        print(text, file=stream or sys.stdout)
        return
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _drop(stream)


def exact(text: str) -> None:
    """Write the text of a file to stdout, in UTF-8 as a file is, whatever the encoding of the terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    sys.stdout.write(text)


def summary(text: str, form: Format, *, aside: bool = False) -> None:
    """The last line. It keeps out of stdout where stdout is for another program (`aside`, JSON)."""
    line(diagnostics.escaped(text), sys.stderr if aside or form is Format.JSON else sys.stdout)


def data(value: object) -> None:
    """A value as JSON."""
    line(as_json(value))


def as_json(value: object) -> str:
    """The text of that."""
    return json.dumps(_finite(value), indent=2, default=str)


def table(rows: Sequence[Row], columns: Sequence[str], form: Format) -> None:
    """Rows as JSON, as a table on a terminal, or in plain columns that no width cuts off."""
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
    """A function to report progress to: `(done, total, label)`. Silent unless a person is watching."""
    if not sys.stderr.isatty():
        yield lambda done, total, label: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, label: bar.update(task, description=label, completed=done, total=total)


def cell(value: object) -> str:
    """A value in a table."""
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
    """JSON has no infinities and no NaN: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _has_color(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ
