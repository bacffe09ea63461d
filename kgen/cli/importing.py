"""`kgen import`: write a spec from FlexAttention functions."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from kgen.cli import terminal
from kgen.cli.options import SPECS_FOLDER, Form, output_to
from kgen.cli.terminal import Format
from kgen.cli.verbs import verb
from kgen.diagnostics import Diagnostic, KgenError, shown
from kgen.files import checked_path, write_new
from kgen.settings import settings


class Dtype(str, Enum):
    """Values of `--dtype`."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@verb("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A Python file or a module name.")
    ],
    score: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--score",
            metavar="EXPR",
            help="The score_mod: a function, or a call that returns a function.",
        ),
    ] = None,
    mask: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--mask",
            metavar="EXPR",
            help="The mask_mod: a function, or a call such as `window(1024)`.",
        ),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the spec and of the emitted function. "
            "Default: names of the mods, joined by `_`.",
        ),
    ] = None,
    head_dim: Annotated[
        int, typer.Option("--head-dim", min=1, max=1024, metavar="N", help="Elements per head.")
    ] = 128,
    gqa: Annotated[
        str, typer.Option("--gqa", metavar="N", help="Query heads per KV head, or `any`.")
    ] = "1",
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="Dtype of q, k, v and the output.")
    ] = Dtype.BF16,
    output: Annotated[Optional[Path], output_to(SPECS_FOLDER)] = None,  # noqa: UP045
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing spec.")] = False,
    form: Form = Format.TEXT,
) -> int:
    """Write a spec from a FlexAttention score_mod and mask_mod.

    kgen reads the Python source and does not run it.
    """
    from kgen.flex.importing import Options, imported
    from kgen.flex.writing import settled

    checked_path(Path(source))
    options = Options(name, head_dim, _gqa(gqa), dtype.value)
    spec = imported(source, {"score_mod": score, "mask_mod": mask}, options)
    path = (output or settings().specs) / f"{spec.name}.yaml"
    text, loaded = settled(spec, path.as_posix())
    write_new(path, text, "choose another name with `--name`, or add `--force`", force=force)
    if form is Format.JSON:
        terminal.data({"spec": path.as_posix(), "name": loaded.spec.name})
    terminal.summary(f"{path.as_posix()} written; next: kgen render {path.as_posix()}", form)
    return 0


def _gqa(text: str) -> int | str:
    if text == "any":
        return text
    if text.isascii() and text.isdigit() and 0 < int(text[:10]) < 2**31:
        return int(text[:10])
    hint = "write the number of query heads per KV head, or `any`"
    raise KgenError(
        Diagnostic("usage", f"`--gqa`: expected a number or `any`, got {shown(text)}", hint=hint)
    )
