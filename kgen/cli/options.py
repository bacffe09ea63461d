"""Arguments and options that several verbs have: each has one name, and means one thing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from kgen.cli.terminal import Format

JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))

# Typer reads annotations at run time, on the oldest Python too: hence Optional.
Specs = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Argument(
        metavar="SPEC",
        help="Spec files, directories of *.yaml, or names of specs, of the project or of the box. "
        "Default: specs/, or what pyproject.toml says.",
    ),
]
Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="A spec file, or the name of a spec.")]
Targets = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--target", help="Only the files of this target. Repeatable."),
]
Jobs = Annotated[
    int, typer.Option("-j", "--jobs", min=1, help="Processes at a time; those that measure do in turn.")
]
Form = Annotated[Format, typer.Option("--format", help="How data and diagnostics are written.")]
Generated = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--generated",
        metavar="DIR",
        help="Where the kernels were rendered to. Default: generated/, or what pyproject.toml says.",
    ),
]


Why = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--why", metavar="FILE", help="All that is recorded of this emitted file instead."),
]


def output_to(default: str) -> Any:
    """The option of a verb that writes files."""
    return typer.Option("-o", "--output", metavar="DIR", help=f"Where to. Default: {default}.")
