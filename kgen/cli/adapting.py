"""`kgen adapt`: packages through which other libraries call kernels."""

from __future__ import annotations

import sys
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kgen.cli import terminal
from kgen.cli.options import Form, Prove, Specs, output_to
from kgen.cli.proofs import proven
from kgen.cli.rendering import drift_line
from kgen.cli.terminal import Format
from kgen.cli.verbs import verb
from kgen.diagnostics import EXIT_WRONG, counted
from kgen.family import known_adapters

Kind = Enum("Kind", {name: name for name in known_adapters()}, type=str)  # type: ignore[misc]
ADAPTERS = Path("adapters")


@verb("adapt")
def adapt(
    specs: Specs = None,
    kind: Annotated[
        list[Kind],
        typer.Option(
            "--for",
            help="Kind of adapter. transformers: for models of Hugging Face. "
            "context_parallel: to split each sequence over several GPUs. "
            "hub: for the Hugging Face kernel hub. "
            "torchtitan: for models of torchtitan. Repeatable.",
        ),
    ] = ...,  # type: ignore[assignment]
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if any file differs.")
    ] = False,
    output: Annotated[Path, output_to("adapters/")] = ADAPTERS,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite or delete files that were edited by hand.")
    ] = False,
    prove: Prove = True,
    form: Form = Format.TEXT,
) -> int:
    """Write adapters: Python packages for other software to call kernels."""
    from kgen.render import checking, project, writer

    kinds = [one.value for one in kind]
    if check:
        adapted = checking.adapt_checked(specs or [], kinds, output)
    else:
        adapted = project.adapt_all(project.find_specs(specs or []), kinds)
        adapted = proven(adapted, None, output, prove=prove)
    outputs, started = project.together(adapted)
    fits = [line for one in adapted for line in one.fits]
    remarks = [line for one in adapted for line in one.remarks]
    changes = writer.compute_changes(outputs, output, started, others=False)
    if not check:
        writer.apply(changes, force=force)
    drift = writer.drift(changes)
    if form is Format.JSON:
        rows = [{"path": c.path.as_posix(), "state": c.state, "why": c.why or None} for c in drift]
        terminal.data({"changes": rows, "fits": fits, "remarks": remarks})
    else:
        for change in drift:
            terminal.line(drift_line(change, dry=check), sys.stderr if check else sys.stdout)
        for line in (*fits, *remarks):
            terminal.line(line, sys.stderr if check else sys.stdout)
    states = Counter(change.state for change in drift)
    total, pruned, edited = writer.wanted(changes), states["pruned"], states["edited"]
    said = f"{counted(total, 'file')} checked, {len(drift) - edited} differ, {edited} edited"
    if not check:
        said = f"{counted(total, 'file')} rendered, {len(drift) - pruned} changed, {pruned} deleted"
    terminal.summary(said, form)
    return EXIT_WRONG if check and drift else 0
