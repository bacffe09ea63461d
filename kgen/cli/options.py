"""Arguments and options that several verbs share: one name and one meaning each."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand

from kgen.cli.terminal import Format

JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))
SPECS_FOLDER = "`tool.kgen.specs` in pyproject.toml, else specs/"
GENERATED_FOLDER = "`tool.kgen.generated` in pyproject.toml, else generated/"


def completed_spec(incomplete: str) -> list[str]:
    """Return the spec names that begin with `incomplete`. If there are none, the shell completes
    files.
    """
    from kgen.diagnostics import KgenError
    from kgen.render.builtin import builtin_specs
    from kgen.settings import settings

    try:
        own = [path.stem for path in settings().specs.glob("*.yaml")]
    except (KgenError, OSError):  # a shell cannot show an error here
        own = []
    return sorted(name for name in {*own, *builtin_specs()} if name.startswith(incomplete))


# Typer reads annotations at run time, on the oldest Python too: hence Optional.
Specs = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Argument(
        metavar="SPEC",
        help=f"Spec files, folders or names. Default: {SPECS_FOLDER}.",
        autocompletion=completed_spec,
    ),
]
Spec = Annotated[
    Path,
    typer.Argument(
        metavar="SPEC", help="A spec file or a spec name.", autocompletion=completed_spec
    ),
]
Targets = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--target", metavar="TARGET", help="Use only this target: triton, cuda or cute. Repeatable."
    ),
]


def _jobs(help: str) -> Any:
    return typer.Option("-j", "--jobs", min=1, metavar="N", help=help)


Jobs = Annotated[int, _jobs("Number of worker processes.")]
TimedJobs = Annotated[int, _jobs("Number of worker processes. Timed sections run one at a time.")]
Ray = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Run on a Ray cluster, such as head:6379. Without an address, use the local one.",
    ),
]
PartOf = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--shard", metavar="I/N", help="Run only part I of N of the work, such as 1/4."),
]
Quick = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option(
        "--quick/--full",
        help="Run the small cases or all. Default: all on a GPU, small on a CPU.",
    ),
]
RecordOrNot = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option(
        "--record/--no-record",
        help="Record the result in the ledger (verified.json). "
        "Default: record only runs of all cases on a GPU.",
    ),
]
Cases = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--case",
        metavar="CASE",
        help="Run only this case; record nothing. "
        "Runs without `--case` print the names of cases. Repeatable.",
    ),
]
Sanitizers = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--sanitizer",
        metavar="TOOL",
        help="Instead of cases, run each kernel file once under this compute-sanitizer tool. "
        "Tools: memcheck, racecheck, initcheck, synccheck. Repeatable.",
    ),
]
BuiltPackages = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--built",
        metavar="DIR",
        help="Verify the machine code that `kgen build` wrote to this folder. "
        "Results are recorded only with `--record`.",
    ),
]
Form = Annotated[Format, typer.Option("--format", help="Format of the output and of errors.")]
Prove = Annotated[
    bool,
    typer.Option(
        "--prove/--no-prove", help="Prove the kernels of changed specs before writing them."
    ),
]
Generated = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--generated",
        metavar="DIR",
        help=f"Folder of the rendered kernels. Default: {GENERATED_FOLDER}.",
    ),
]


class Command(TyperCommand):
    """A verb, with a `--ray` that takes an optional address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, with `AUTO` after a `--ray` that has no address.

        Refuse an empty argument, because an empty path means the working directory.
        """
        from kgen.verify.farm.address import AUTO, is_address

        given: list[str] = []
        for place, word in enumerate(args):
            given.append(word)
            if word == "--":
                given += args[place + 1 :]
                break
            if word == "--ray" and not (args[place + 1 :] and is_address(args[place + 1])):
                given.append(AUTO)
        if any(
            word == "" and before != "--against"
            for before, word in itertools.pairwise(["", *given])
        ):
            ctx.fail("expected a value, got an empty argument")
        return super().parse_args(ctx, given)


Why = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--why",
        metavar="FILE",
        help="Show all recorded results of one kernel file. Example: generated/causal/triton.py.",
    ),
]


def output_to(default: str) -> Any:
    """Return the option `--output` of a verb that writes files."""
    return typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        show_default=False,
        help=f"Output folder. Default: {default}.",
    )
