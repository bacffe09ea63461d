"""The option `--as-is`, and the check that emitted files match their specs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli import terminal
from kgen.cli.terminal import Format
from kgen.diagnostics import Diagnostic, DriftError, counted, escaped

if TYPE_CHECKING:
    from kgen.render.writer import Change
    from kgen.spec.load import Loaded

AsIs = Annotated[
    bool,
    typer.Option(
        "--as-is",
        help="Use rendered files even if they differ from their specs. "
        "Without `--as-is`, kgen exits with 1 if files differ.",
    ),
]
AsIsStatus = Annotated[
    bool,
    typer.Option("--as-is", help="Files that differ from their specs do not cause exit 1."),
]
STATES = {"new": "missing", "edited": "edited by hand", "pruned": "no spec makes it"}
"""Words for the states of a file, apart from `changed`."""


def difference(
    loaded: Sequence[Loaded],
    generated: Path,
    counts: Callable[[Change], bool] = lambda change: True,
) -> Diagnostic | None:
    """Return one line on the emitted files that do not match their specs, or None if all match.

    Ignore changes that `counts` rejects.
    """
    from kgen.render.current import differing

    differ = differing(loaded, generated)
    found = [
        (spec, change) for spec, changes in differ.items() for change in changes if counts(change)
    ]
    if not found:
        return None
    # A file with kernels is more informative than the `__init__.py` that imports them.
    spec, first = min(found, key=lambda one: one[1].path.name == "__init__.py")
    how = f" ({STATES[first.state]})" if first.state in STATES else ""
    said = f"{first.path.as_posix()} does not match {Path(spec).as_posix()}{how}"
    more = f", and {counted(len(found) - 1, 'more file')}" if len(found) > 1 else ""
    hint = "`kgen render --diff` shows the changes, `--as-is` accepts the files"
    return Diagnostic("differs", f"{said}{more}; {hint}")


def require_current(
    loaded: Sequence[Loaded],
    generated: Path,
    as_is: bool,
    form: Format,
    counts: Callable[[Change], bool] = lambda change: True,
    *,
    record: bool = False,
) -> None:
    """Raise `DriftError` if files do not match their specs. With `as_is`, print the difference
    instead.

    With `record`, raise in both cases. The ledger finds a result by the text of the file. A
    recorded result would therefore count for any other spec that renders to this text.
    """
    if found := difference(loaded, generated, counts):
        if as_is and record:
            said = found.message.partition("; ")[0]
            raise DriftError(
                replace(found, message=f"{said}; leave out `--record`, or run `kgen render`")
            )
        if not as_is:
            raise DriftError(found)
        note(found, form)


def note(found: Diagnostic, form: Format) -> None:
    """Print a difference on stderr, and do not raise."""
    if form is Format.JSON:
        terminal.show_error(DriftError(found), form)
    else:
        terminal.line(f"note: {escaped(found.message)}", sys.stderr)
