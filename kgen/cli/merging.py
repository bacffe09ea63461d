"""The verb `ledger merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from kgen.cli import terminal
from kgen.cli.options import Form
from kgen.cli.terminal import Format
from kgen.cli.verbs import app, verb
from kgen.settings import settings

ledger = typer.Typer(no_args_is_help=True, help="Merge the records of several machines.")
app.add_typer(ledger, name="ledger")


@verb("merge", ledger)
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Ledgers, as verified.json.")],
    into: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--into",
            metavar="FILE",
            help="The ledger to merge them into. Default: verified.json of generated/.",
        ),
    ] = None,
    form: Form = Format.TEXT,
) -> int:
    """Merge ledgers, as those of the parts of a run. Of two records for one place the one that claims less stays."""
    from kgen.verify.ledger import FILENAME
    from kgen.verify.merging import merge as merged

    into = into or settings().generated / FILENAME
    count, records = merged(files, into)
    terminal.data({"files": count, "records": records}) if form is Format.JSON else None
    terminal.summary(f"{len(files)} merged, {records} records of {count} files in {into}", form)
    return 0
