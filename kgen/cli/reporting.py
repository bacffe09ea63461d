"""The verb `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kgen.cli import terminal
from kgen.cli.options import Form, Generated, Specs
from kgen.cli.terminal import Format
from kgen.cli.verbs import BENCHMARKS, load_specs, verb
from kgen.files import write_new
from kgen.settings import settings

REPORT = Path("report.html")


@verb("report")
def report(
    specs: Specs = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Output file.")
    ] = REPORT,
    benchmarks: Annotated[
        Path,
        typer.Option("--benchmarks", metavar="DIR", help="Folder of the reports of `kgen bench`."),
    ] = BENCHMARKS,
    generated: Generated = None,
    form: Form = Format.TEXT,
) -> int:
    """Write an HTML report of verification and benchmark results."""
    from kgen.reports.html import html
    from kgen.reports.record import record

    page = record(load_specs(specs), generated or settings().generated, benchmarks)
    write_new(output, html(page), "name another file", force=True)
    if form is Format.JSON:
        terminal.data(
            {"report": output.as_posix(), "sections": [section.title for section in page.sections]}
        )
    terminal.summary(f"{output.as_posix()} written: {page.summary}", form)
    return 0
