"""The option `--as-is`, and what verbs say of files that are not what their specs render to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli import terminal
from kgen.cli.terminal import Format
from kgen.diagnostics import Diagnostic, DriftError, escaped

if TYPE_CHECKING:
    from kgen.render.writer import Change
    from kgen.spec.load import Loaded

AsIs = Annotated[
    bool, typer.Option("--as-is", help="Accept files that differ from what their specs render to.")
]
STATES = {"new": "missing", "edited": "edited by hand", "pruned": "no longer made"}
"""How a file differs, where it is not just another text."""


def difference(
    loaded: Sequence[Loaded], generated: Path, counts: Callable[[Change], bool] = lambda change: True
) -> Diagnostic | None:
    """How emitted files differ from what their specs render to, in one line; None if they do not. Only changes that
    `counts` accepts count."""
    from kgen.render.current import differing

    differ = differing(loaded, generated)
    found = [(spec, change) for spec, changes in differ.items() for change in changes if counts(change)]
    if not found:
        return None
    # The kernels say more than what imports them.
    spec, first = min(found, key=lambda one: one[1].path.name == "__init__.py")
    how = f" ({STATES[first.state]})" if first.state in STATES else ""
    said = f"{first.path.as_posix()} differs from what {Path(spec).as_posix()} renders to{how}"
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
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
    """Raise `DriftError` if files differ from what their specs render to; with `as_is` print that instead.

    A result of such files is never recorded: it would count for the same text under another spec.
    """
    if found := difference(loaded, generated, counts):
        if as_is and record:
            said = found.message.partition("; ")[0]
            raise DriftError(replace(found, message=f"{said}; leave out `--record`, or render the files"))
        if not as_is:
            raise DriftError(found)
        note(found, form)


def note(found: Diagnostic, form: Format) -> None:
    """Print a difference on stderr without failing."""
    if form is Format.JSON:
        terminal.show_error(DriftError(found), form)
    else:
        terminal.line(f"note: {escaped(found.message)}", sys.stderr)
