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
from kgen.diagnostics import EXIT_WRONG, counted
from kgen.settings import settings

BUILT = Path("built")
MOST = {"gqa": 1024, "batch": 65536, "width": 262144, "heads": 1024}
"""Upper limits of the sizes that become constants of kernels. The compiler gets example tensors of
these sizes.
"""
Gqa = Annotated[
    Optional[list[int]],  # noqa: UP045
    typer.Option(
        min=1,
        max=MOST["gqa"],
        metavar="N",
        help="Query heads per KV head, for specs with `gqa: any`. "
        "For chunk_output and linear_attention: heads of v per head of q. "
        "Repeatable.",
    ),
]
Batch = Annotated[
    Optional[list[int]],  # noqa: UP045
    typer.Option(
        min=1,
        max=MOST["batch"],
        metavar="N",
        help="Batch size of decode kernels: specs with `decode` in their list `passes`. "
        "Rounded up to a power of two. Default: 1, 2, 4, 8, 16, 32 and 64. Repeatable.",
    ),
]
Width = Annotated[
    Optional[list[int]],  # noqa: UP045
    typer.Option(
        min=1,
        max=MOST["width"],
        metavar="N",
        help="Elements per row, for norms with `width: any`. Repeatable.",
    ),
]
Heads = Annotated[
    Optional[list[int]],  # noqa: UP045
    typer.Option(
        min=1,
        max=MOST["heads"],
        metavar="N",
        help="Number of heads, for norms with an axis of heads (`heads: any`). "
        "For chunk_output and linear_attention: heads of q and k. Repeatable.",
    ),
]


WithC = Annotated[
    bool, typer.Option("--c", help="Add a folder `c` with C and C++ launchers of the kernels.")
]
WithTorch = Annotated[
    bool,
    typer.Option("--torch", help="Add operators of PyTorch in C++, and the folder `c`."),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Overwrite the output even if `kgen build` did not create it."),
]


@verb("build")
def build(
    specs: Specs = None,
    arch: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--arch",
            metavar="ARCH",
            help="Build for this architecture, such as sm_90a. "
            "sm_90 means sm_90a. Repeatable. Default: sm_80 and sm_90a.",
        ),
    ] = None,
    gqa: Gqa = None,
    batch: Batch = None,
    width: Width = None,
    heads: Heads = None,
    c: WithC = False,
    torch: WithTorch = False,
    target: Targets = None,
    output: Annotated[Path, output_to("built/")] = BUILT,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing; list folders that are outdated or incomplete."
        ),
    ] = False,
    force: Force = False,
    jobs: Jobs = JOBS,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Time limit per kernel.")
    ] = 600.0,
    as_is: AsIs = False,
    generated: Generated = None,
    form: Form = Format.TEXT,
) -> int:
    """Compile kernels to machine code that runs without a compiler.

    A spec may leave sizes open, such as `gqa: any`. Machine code needs fixed sizes. Set them with
    `--gqa`, `--batch`, `--width` and `--heads`.
    """
    loaded, generated = load_specs(specs), generated or settings().generated
    asked = {"gqa": gqa, "batch": batch, "width": width, "heads": heads}
    named = {name: numbers for name, numbers in asked.items() if numbers}
    if check:
        from kgen.build.stale import stale

        return _stale(
            stale(loaded, generated, output, arch or (), named, target, c, torch),
            len(loaded),
            form,
        )
    from kgen.build.package import ARCHS, COLUMNS, SIZES, BuildOptions, build_specs
    from kgen.cli.results import listener
    from kgen.render.current import of_the_same_text

    # With and without `--as-is`, `build_specs` refuses files of a different version of the spec.
    require_current(loaded, generated, as_is, form, of_the_same_text)
    options = BuildOptions(arch or ARCHS, {**SIZES} | named, target, c, torch, force, jobs, timeout)
    with terminal.progress_bar() as progress:
        rows = build_specs(loaded, generated, output, options, listener(progress, "not built"))
    return judge(rows, COLUMNS, "built", form)


def _stale(said: Sequence[str], checked: int, form: Format) -> int:
    """Print the stale packages with reasons. Each line begins with the name of the spec."""
    if form is Format.JSON:
        terminal.data(
            [{"spec": spec, "stale": why} for spec, _, why in (s.partition(": ") for s in said)]
        )
    for line in said if form is Format.TEXT else ():
        terminal.line(f"stale: {line}")
    summary = (
        f"{counted(checked, 'spec')} checked, {len({line.partition(':')[0] for line in said})} "
        "stale"
    )
    terminal.line(summary, sys.stderr if form is Format.JSON else sys.stdout)
    return EXIT_WRONG if said else 0
