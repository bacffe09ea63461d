"""The verb `build`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from kgen.cli import terminal
from kgen.cli.current import AsIs, require_current
from kgen.cli.options import JOBS, Form, Generated, Jobs, Specs, Targets, output_to
from kgen.cli.terminal import Format
from kgen.cli.verbs import judge, load_specs, verb
from kgen.diagnostics import EXIT_WRONG
from kgen.settings import settings

BUILT = Path("built")
MOST = {"gqa": 1024, "batch": 65536, "width": 262144, "heads": 1024}
"""Of numbers that constants of kernels are made of: rows of norms have at most so many elements, and tensors of the
others are drawn to compile for."""
Gqa = Annotated[
    Optional[list[int]],  # noqa: UP045
    typer.Option(
        min=1,
        max=MOST["gqa"],
        help="Query heads for each KV head, or of chunk_output value heads for each of q and k, "
        "where a spec allows any. Repeatable.",
    ),
]
Batch = Annotated[
    Optional[list[int]],  # noqa: UP045
    typer.Option(
        min=1,
        max=MOST["batch"],
        help="Sequences that decode at a time, where a spec decodes. Repeatable.",
    ),
]
Width = Annotated[
    Optional[list[int]],  # noqa: UP045
    typer.Option(min=1, max=MOST["width"], help="Of a norm, where a spec allows any. Repeatable."),
]
Heads = Annotated[
    Optional[list[int]],  # noqa: UP045
    typer.Option(
        min=1,
        max=MOST["heads"],
        help="Of a norm, or of q and k of chunk_output, where a spec allows any. Repeatable.",
    ),
]


@verb("build")
def build(
    specs: Specs = None,
    arch: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--arch", help="An architecture, as sm_90a. Repeatable. Default: sm_80 and sm_90a."),
    ] = None,
    gqa: Gqa = None,
    batch: Batch = None,
    width: Width = None,
    heads: Heads = None,
    c: Annotated[
        bool, typer.Option("--c", help="With C and C++ that launch the kernels, in the package's folder `c`.")
    ] = False,
    target: Targets = None,
    output: Annotated[Path, output_to("built/")] = BUILT,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing; say what is not of what is rendered now, or lacks what is named."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what `kgen build` did not put where a package goes, too.")
    ] = False,
    jobs: Jobs = JOBS,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that one kernel may take.")] = 600.0,
    as_is: AsIs = False,
    generated: Generated = None,
    form: Form = Format.TEXT,
) -> int:
    """Compile kernels to machine code that needs no compiler."""
    loaded, generated = load_specs(specs), generated or settings().generated
    asked = {"gqa": gqa, "batch": batch, "width": width, "heads": heads}
    named = {name: numbers for name, numbers in asked.items() if numbers}
    if check:
        from kgen.build.stale import stale

        return _stale(stale(loaded, generated, output, arch or (), named, target, c), len(loaded), form)
    from kgen.build.package import ARCHS, COLUMNS, SIZES, BuildOptions, build_specs
    from kgen.cli.results import listener
    from kgen.render.current import of_the_same_text

    # `build_specs` refuses files of another text of the spec, with or without `--as-is`.
    require_current(loaded, generated, as_is, form, of_the_same_text)
    options = BuildOptions(arch or ARCHS, {**SIZES} | named, target, c, force, jobs, timeout)
    with terminal.progress_bar() as progress:
        rows = build_specs(loaded, generated, output, options, listener(progress, "not built"))
    return judge(rows, COLUMNS, "built", form)


def _stale(said: Sequence[str], checked: int, form: Format) -> int:
    """Show which packages are stale, and why; each line begins with the spec's name."""
    if form is Format.JSON:
        terminal.data([{"spec": spec, "stale": why} for spec, _, why in (s.partition(": ") for s in said)])
    for line in said if form is Format.TEXT else ():
        terminal.line(f"stale: {line}")
    summary = f"{checked} checked, {len({line.partition(':')[0] for line in said})} stale"
    terminal.line(summary, sys.stderr if form is Format.JSON else sys.stdout)
    return EXIT_WRONG if said else 0
