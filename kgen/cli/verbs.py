"""The verbs. Each reads its arguments, calls one stage, prints the result and returns an exit
code.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from kgen import __version__
from kgen.cli import terminal
from kgen.cli.current import AsIs, AsIsStatus, difference, note, require_current
from kgen.cli.helping import InOrder
from kgen.cli.options import (
    JOBS,
    BuiltPackages,
    Cases,
    Command,
    Form,
    Generated,
    Jobs,
    PartOf,
    Quick,
    Ray,
    RecordOrNot,
    Sanitizers,
    Specs,
    Targets,
    Why,
)
from kgen.cli.proofs import proof_cell
from kgen.cli.terminal import Format, Row
from kgen.diagnostics import EXIT_USAGE, EXIT_WRONG, Diagnostic, KgenError, counted
from kgen.files import checked_path
from kgen.settings import settings

if TYPE_CHECKING:
    from kgen.spec.load import Loaded

app = typer.Typer(
    cls=InOrder,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Importing rich takes a third of the start-up time. Only `terminal.table` needs it.
    rich_markup_mode=None,
)


class Device(str, Enum):
    """Values of `--device`."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


BENCHMARKS = Path("benchmarks")


def main() -> None:
    """Run the command."""
    terminal.settle()
    form = terminal.asked_format(sys.argv)
    raise SystemExit(terminal.guarded(lambda: _parsed(form), form))


def _parsed(form: Format) -> int:
    """Call the verb through Typer and return the exit code. Print a usage error in the format
    `form`.
    """
    try:
        return int(app(prog_name="kgen", standalone_mode=False) or 0)
    except SystemExit as end:
        return (
            terminal.EXIT_PIPE
            if isinstance(end.__context__, BrokenPipeError)
            else int(end.code or 0)
        )
    except Exception as error:
        # The module of Typer's error class depends on its version; each version has
        # `format_message`.
        if not hasattr(error, "format_message"):
            raise
        if form is Format.TEXT:
            error.show()  # type: ignore[attr-defined]
            return EXIT_USAGE
        usage = Diagnostic(
            "usage", error.format_message(), hint="run the command with `--help` for its options"
        )
        return terminal.show_error(KgenError(usage), form)


def _version(asked: bool) -> None:
    if asked:
        terminal.line(f"kgen {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Turn declarative specs into standalone GPU kernel source."""


def _checked(arguments: dict[str, object]) -> dict[str, object]:
    """Return the arguments of a verb. Raise `KgenError` for a path that kgen cannot print or
    open.
    """
    for value in arguments.values():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path):
                checked_path(path)
    return arguments


def verb(name: str, group: typer.Typer = app) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function as a verb. Its return value, or its error, becomes the exit code."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def run(**arguments: object) -> None:
            form = Format.JSON if arguments["form"] == Format.JSON else Format.TEXT
            raise SystemExit(terminal.guarded(lambda: function(**_checked(arguments)), form))

        group.command(name, cls=Command)(run)
        return function

    return register


@verb("compile")
def compile_(
    specs: Specs = None,
    arch: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--arch",
            metavar="ARCH",
            help="Compile for this architecture, such as sm_90. "
            "Repeatable. Default: sm_80, sm_90 and sm_100.",
        ),
    ] = None,
    target: Targets = None,
    jobs: Jobs = JOBS,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time limit per kernel.")
    ] = 600.0,
    record: Annotated[
        bool, typer.Option("--record", help="Record the result in the ledger (verified.json).")
    ] = False,
    as_is: AsIs = False,
    generated: Generated = None,
    form: Form = Format.TEXT,
) -> int:
    """Compile kernels without a GPU; show registers and spills."""
    from kgen.cli.results import listener
    from kgen.verify.compiling import COLUMNS, DEFAULT_ARCHS, CompileOptions, compile_specs

    options = CompileOptions(arch or DEFAULT_ARCHS, jobs, timeout, record, target)
    loaded, generated = load_specs(specs), generated or settings().generated
    require_current(loaded, generated, as_is, form, record=bool(record))
    with terminal.progress_bar() as progress:
        rows = compile_specs(loaded, generated, options, listener(progress))
    spilling = [row for row in rows if row["spills"]]
    shown = [row | {"ok": "spills"} if row["spills"] and row["ok"] else row for row in rows]
    terminal.table(shown if form is Format.TEXT else rows, COLUMNS, form)
    for row in sorted(spilling, key=lambda row: -row["spills"]):
        where = " ".join(
            filter(None, (row["spec"], row["target"], row["kernel"], row["variant"], row["arch"]))
        )
        terminal.line(f"spills: {where}: {row['spills']} bytes per thread", sys.stderr)
    wrong = sum(not row["ok"] for row in rows)
    spills = f", {len(spilling)} with spills" if spilling else ""
    terminal.summary(f"{len(rows) - wrong} compiled, {wrong} failed{spills}", form)
    return EXIT_WRONG if wrong else 0


@verb("verify")
def verify(
    specs: Specs = None,
    device: Annotated[
        Device,
        typer.Option(help="Run on a GPU (cuda) or in Triton's interpreter (cpu)."),
    ] = Device.AUTO,
    jobs: Jobs = JOBS,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit per case.")] = 300.0,
    quick: Quick = None,
    record: RecordOrNot = None,
    case: Cases = None,
    target: Targets = None,
    sanitizer: Sanitizers = None,
    built: BuiltPackages = None,
    ray: Ray = None,
    shard: PartOf = None,
    as_is: AsIs = False,
    generated: Generated = None,
    form: Form = Format.TEXT,
) -> int:
    """Run kernels on many inputs; compare with a float64 reference."""
    from kgen.cli.results import run_sanitizers, run_verify
    from kgen.verify.farm.sharding import Shard
    from kgen.verify.options import RunOptions, VerifyOptions

    part, generated = Shard.parse(shard), generated or settings().generated
    loaded = load_specs(specs)
    if sanitizer and (case or quick is not None or built):
        message = "`--sanitizer` cannot be combined with `--case`, `--quick`, `--full` or `--built`"
        raise KgenError(
            Diagnostic(
                "usage",
                message,
                hint="run `kgen verify` twice: once with `--sanitizer`, once without",
            )
        )
    require_current(loaded, generated, as_is, form, record=bool(record))
    common = RunOptions(device.value, timeout, record, target, part)
    if sanitizer:
        return run_sanitizers(loaded, generated, form, jobs, ray, sanitizer, common)
    options = VerifyOptions(**vars(common), quick=quick, cases=case or None, built=built)
    return run_verify(loaded, generated, form, jobs, ray, options)


def elsewhere(rows: Sequence[Row]) -> list[str]:
    """Return the columns that name the machine of each row, if rows come from other machines."""
    return [column for column in ("device", "node") if any(column in row for row in rows)]


@verb("list")
def list_(
    specs: Specs = None,
    builtin: Annotated[
        bool, typer.Option("--builtin", help="List the specs that come with kgen instead.")
    ] = False,
    form: Form = Format.TEXT,
) -> int:
    """List the specs of the project."""
    from kgen.render.builtin import builtin_specs
    from kgen.targets import asked_targets

    if builtin and specs:
        raise KgenError(
            Diagnostic(
                "usage", "`--builtin` cannot be combined with specs", hint="leave out the specs"
            )
        )
    rows: list[Row] = [
        {
            "name": each.folder,
            "kernel": each.spec.kernel,
            "targets": asked_targets(each),
            "summary": each.spec.summary.on_terminal(),
        }
        for each in load_specs([*builtin_specs().values()] if builtin else specs)
    ]
    terminal.table(rows, ("name", "kernel", "targets", "summary"), form)
    terminal.summary(counted(len(rows), "spec"), form)
    return 0


@verb("schema")
def schema(form: Form = Format.TEXT) -> int:
    """Print the JSON schema of a spec, for editors."""
    from kgen.spec.schema import json_schema

    terminal.data(json_schema())
    return 0


@verb("status")
def status(
    specs: Specs = None,
    why: Why = None,
    as_is: AsIsStatus = False,
    generated: Generated = None,
    form: Form = Format.TEXT,
) -> int:
    """Show the last result of `kgen verify` for each rendered file.

    Exit 1 if a file has no result since its last change. Exit 1 also if a file differs from its
    spec.
    """
    if why:
        from kgen.cli.why import why as say

        return say(why, generated or settings().generated, form)
    from kgen.verify.ledger import STATES, WITHOUT_RESULT
    from kgen.verify.ledger import status as ledger_status

    loaded, generated = load_specs(specs), generated or settings().generated
    differs = difference(loaded, generated)
    if differs and as_is:
        note(differs, form)
    elif differs:
        terminal.show_error(KgenError(differs), form)
    rows = ledger_status(loaded, generated)
    # The names of devices and toolchains are too long for column heads.
    places = sorted({place for row in rows for place in row["verified"]})
    heads = [f"error ({number})" for number, _ in enumerate(places, 1)]
    if form is Format.TEXT:
        rows = [
            row | {h: row["verified"].get(place) for h, place in zip(heads, places, strict=True)}
            for row in rows
        ]
        rows = [row | {"proof": proof_cell(row["proof"])} for row in rows]
    there = ["proof"] * any(row["proof"] is not None for row in rows)
    terminal.table(rows, ("spec", "file", "state", *there, *heads), form)
    if form is Format.TEXT:
        for head, place in zip(heads, places, strict=True):
            terminal.line(f"{head}: worst error on {place}")
        for place, count in sorted(
            Counter(place for row in rows for place in row["earlier"]).items()
        ):
            terminal.line(f"{counted(count, 'file')}: only an earlier version ran on {place}")
    states = Counter(row["state"] for row in rows)
    last = ", ".join(f"{states[state]} {state}" for state in STATES)
    terminal.summary(last, form)
    if states["unrecorded"]:
        told = "`unrecorded` files have no result in the ledger: run `kgen verify --record`"
        terminal.line(told, sys.stderr)
    failed = any(states[state] for state in WITHOUT_RESULT) or (differs and not as_is)
    return EXIT_WRONG if failed else 0


@verb("doctor")
def doctor(form: Form = Format.TEXT) -> int:
    """Show which tools and packages are installed."""
    from kgen.cli.doctor import examine

    rows = examine()
    terminal.table(rows, ("name", "found", "version"), form)
    found = sum(bool(row["found"]) for row in rows)
    terminal.summary(f"{found} found, {len(rows) - found} missing", form)
    return 0


def load_specs(specs: Sequence[Path] | None) -> list[Loaded]:
    """Load the named specs, or all specs of the project if none is named."""
    from kgen.render.project import find_specs, load_all

    return load_all(find_specs(specs or []))


def judge(rows: Sequence[Row], columns: Sequence[str], done: str, form: Format) -> int:
    """Print rows with the column `ok` and return the exit code: 1 if any row failed."""
    terminal.table(rows, columns, form)
    wrong = sum(not row["ok"] for row in rows)
    terminal.summary(f"{len(rows) - wrong} {done}, {wrong} failed", form)
    return EXIT_WRONG if wrong else 0
