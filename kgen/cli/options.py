"""Arguments and options that several verbs have: each has one name, and means one thing."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand

from kgen.cli.terminal import Format

JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))


def completed_spec(incomplete: str) -> list[str]:
    """Return the names of specs that begin so, for a shell. Where there are none, the shell completes files."""
    from kgen.diagnostics import KgenError
    from kgen.render.builtin import builtin_specs
    from kgen.settings import settings

    try:
        own = [path.stem for path in settings().specs.glob("*.yaml")]
    except (KgenError, OSError):  # a shell has no place for an error
        own = []
    return sorted(name for name in {*own, *builtin_specs()} if name.startswith(incomplete))


# Typer reads annotations at run time, on the oldest Python too: hence Optional.
Specs = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Argument(
        metavar="SPEC",
        help="Spec files, directories of *.yaml, or names of specs, of the project or of the box. "
        "Default: specs/, or what pyproject.toml says.",
        autocompletion=completed_spec,
    ),
]
Spec = Annotated[
    Path,
    typer.Argument(metavar="SPEC", help="A spec file, or the name of a spec.", autocompletion=completed_spec),
]
Targets = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--target", help="Only the files of this target. Repeatable."),
]
Jobs = Annotated[
    int, typer.Option("-j", "--jobs", min=1, help="Processes at a time; those that measure do in turn.")
]
Ray = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="On the nodes of that Ray cluster, as head:6379; without an address of this machine's.",
    ),
]
PartOf = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--shard", metavar="I/N", help="Only part I of N of the work, as 1/4."),
]
Form = Annotated[Format, typer.Option("--format", help="How data and diagnostics are written.")]
Prove = Annotated[
    bool, typer.Option("--prove/--no-prove", help="Prove the kernels of each spec before they are written.")
]
Generated = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--generated",
        metavar="DIR",
        help="Where the kernels were rendered to. Default: generated/, or what pyproject.toml says.",
    ),
]


class Command(TyperCommand):
    """A verb. Its `--ray` may have no address: what follows then is another argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with the address that stands for none. Refuse an empty word: as a path it would mean this folder."""
        from kgen.verify.farm.address import AUTO, is_address

        given: list[str] = []
        for place, word in enumerate(args):
            given.append(word)
            if word == "--":
                given += args[place + 1 :]
                break
            if word == "--ray" and not (args[place + 1 :] and is_address(args[place + 1])):
                given.append(AUTO)
        if any(word == "" and before != "--against" for before, word in itertools.pairwise(["", *given])):
            ctx.fail("an argument is empty")
        return super().parse_args(ctx, given)


Why = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--why", metavar="FILE", help="All that is recorded of this emitted file instead."),
]


def output_to(default: str) -> Any:
    """The option of a verb that writes files."""
    return typer.Option("-o", "--output", metavar="DIR", help=f"Where to. Default: {default}.")
