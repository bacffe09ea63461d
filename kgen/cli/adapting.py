"""`kgen adapt`: what others call kernels by."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kgen.cli import terminal
from kgen.cli.options import Form, Specs, output_to
from kgen.cli.terminal import Format
from kgen.cli.verbs import drift_line, verb
from kgen.diagnostics import EXIT_WRONG
from kgen.family import known_adapters
from kgen.files import write_new

Kind = Enum("Kind", {name: name for name in known_adapters()}, type=str)  # type: ignore[misc]
ADAPTERS = Path("adapters")


@verb("adapt")
def adapt(
    specs: Specs = None,
    kind: Annotated[list[Kind], typer.Option("--for", help="Who is to call the kernels. Repeatable.")] = ...,  # type: ignore[assignment]
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 on any drift.")] = False,
    output: Annotated[Path, output_to("adapters/")] = ADAPTERS,
    force: Annotated[bool, typer.Option("--force", help="Overwrite and delete edited files too.")] = False,
    form: Form = Format.TEXT,
) -> int:
    """Write what others call kernels by: a package for models of transformers, a repository for the kernel hub."""
    from kgen.render import project, writer
    from kgen.render.adapters import adapters

    outputs, started = adapters(project.find_specs(specs or []), [one.value for one in kind])
    changes = writer.compute_changes(outputs, output, others=False)
    missing = {output / name: text for name, text in started.items() if not (output / name).exists()}
    if not check:
        writer.apply(changes, force=force)
        for path, text in missing.items():
            write_new(path, text, "move it away")
    drift = writer.drift(changes)
    if form is Format.JSON:
        rows = [{"path": c.path.as_posix(), "state": c.state, "why": c.why or None} for c in drift]
        rows += [{"path": path.as_posix(), "state": "new", "why": None} for path in missing]
        terminal.data({"changes": rows})
    else:
        for change in drift:
            terminal.line(drift_line(change), sys.stderr if check else sys.stdout)
        for path in missing:
            terminal.line(f"new: {path.as_posix()}", sys.stderr if check else sys.stdout)
    total, differ = sum(len(o.files) for o in outputs) + len(started), len(drift) + len(missing)
    terminal.summary(f"{total} {'checked' if check else 'written'}, {differ} differ", form)
    return EXIT_WRONG if check and differ else 0
