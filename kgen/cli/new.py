"""`kgen new`: write a commented spec to start from."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from kgen.cli import terminal
from kgen.cli.options import SPECS_FOLDER, Form, completed_spec, output_to
from kgen.cli.terminal import Format
from kgen.cli.verbs import verb
from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import NAMES
from kgen.files import write_new
from kgen.settings import settings

Kernel = Enum("Kernel", {name: name for name in NAMES}, type=str)  # type: ignore[misc]


@verb("new")
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the spec and of the emitted function.")
    ],
    source: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--from",
            metavar="SPEC",
            help="Copy this spec (a file or a name).",
            autocompletion=completed_spec,
        ),
    ] = None,
    kernel: Annotated[
        Optional[Kernel],  # noqa: UP045
        typer.Option(
            "--kernel",
            help="Kernel family. linear_attention is whole layers. "
            "chunk_output is only the last kernel of such a layer. "
            f"Default: {NAMES[0]}.",
        ),
    ] = None,
    output: Annotated[Optional[Path], output_to(SPECS_FOLDER)] = None,  # noqa: UP045
    form: Form = Format.TEXT,
) -> int:
    """Write a commented spec to start from, and its JSON schema."""
    from kgen.render.project import find_specs
    from kgen.render.rendering import render_variants
    from kgen.spec import schema, starting
    from kgen.spec.load import loads_variants

    if source and kernel:
        hint = "leave out `--kernel`: a copy keeps its family"
        raise KgenError(
            Diagnostic("usage", "`--from` cannot be combined with `--kernel`", hint=hint)
        )
    folder = output or settings().specs
    path = folder / f"{name}.yaml"
    if source:
        found, *others = find_specs([source])
        if others:
            message = f"`--from`: expected one spec, got {1 + len(others)}"
            raise KgenError(
                Diagnostic("usage", message, str(source), hint=f"name one of them: {found}")
            )
        text = starting.copied(found, name)
    else:
        text = starting.starter(kernel.value if kernel else NAMES[0], name)
    render_variants(loads_variants(text, path))
    write_new(path, text, "choose another name")
    if beside := starting.schema_beside(folder):
        write_new(beside, schema.shipped(), "move it away", force=True)
    if form is Format.JSON:
        terminal.data({"spec": path.as_posix(), "name": name})
    known = os.path.realpath(folder) == os.path.realpath(settings().specs)
    terminal.summary(
        f"{path.as_posix()} written; next: kgen explain {name if known else path.as_posix()}", form
    )
    return 0
