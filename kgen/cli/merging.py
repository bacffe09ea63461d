"""The verb `ledger merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from kgen.cli import terminal
from kgen.cli.options import Form
from kgen.cli.terminal import Format
from kgen.cli.verbs import app, verb
from kgen.diagnostics import counted
from kgen.settings import settings

ledger = typer.Typer(
    no_args_is_help=True, help="Merge result files (verified.json) of several machines."
)
app.add_typer(ledger, name="ledger")


@verb("merge", ledger)
def merge(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Files in which `kgen verify` recorded results."),
    ],
    into: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--into",
            metavar="FILE",
            help="Output file. Default: verified.json in the folder of rendered kernels.",
        ),
    ] = None,
    form: Form = Format.TEXT,
) -> int:
    """Merge result files into one.

    For example, the files of runs with `kgen verify --shard`.

    A kernel file may have several results for one device. Full runs then replace quick runs. Of
    several full runs, kgen keeps the one with the largest error.
    """
    from kgen.verify.ledger import FILENAME
    from kgen.verify.merging import merge as merged

    into = into or settings().generated / FILENAME
    count, records = merged(files, into)
    terminal.data({"files": count, "records": records}) if form is Format.JSON else None
    said = f"{counted(records, 'record')} of {counted(count, 'file')} in {into}"
    terminal.summary(f"{counted(len(files), 'ledger')} merged: {said}", form)
    return 0
