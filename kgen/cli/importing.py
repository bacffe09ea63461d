"""`kgen import`: FlexAttention's functions become a spec."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from kgen.cli import terminal
from kgen.cli.options import Form, output_to
from kgen.cli.terminal import Format
from kgen.cli.verbs import verb
from kgen.diagnostics import Diagnostic, KgenError
from kgen.files import checked_path, write_new
from kgen.settings import settings


class Dtype(str, Enum):
    """Of q, k, v and the output."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@verb("import")
def import_(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A Python file, or the name of a module.")],
    score: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--score", metavar="EXPR", help="A score_mod of it, or a call that returns one."),
    ] = None,
    mask: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--mask", metavar="EXPR", help="A mask_mod of it, or a call, as `window(1024)`."),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--name", help="Name of the spec and of its function. Default: that of the mods."),
    ] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, max=1024, help="Elements per head.")] = 128,
    gqa: Annotated[str, typer.Option("--gqa", help="Query heads for each key-value head, or `any`.")] = "1",
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of q, k, v and the output.")] = Dtype.BF16,
    output: Annotated[Optional[Path], output_to("specs/, or what pyproject.toml says")] = None,  # noqa: UP045
    force: Annotated[bool, typer.Option("--force", help="Overwrite a spec that is there.")] = False,
    form: Form = Format.TEXT,
) -> int:
    """Write a spec from FlexAttention's score_mod and mask_mod.

    Their source is read; nothing is run.
    """
    from kgen.flex.importing import Options, imported
    from kgen.flex.writing import settled

    checked_path(Path(source))
    options = Options(name, head_dim, _gqa(gqa), dtype.value)
    spec = imported(source, {"score_mod": score, "mask_mod": mask}, options)
    path = (output or settings().specs) / f"{spec.name}.yaml"
    text, loaded = settled(spec, path.as_posix())
    write_new(path, text, "give another name, or `--force`", force=force)
    if form is Format.JSON:
        terminal.data({"spec": path.as_posix(), "name": loaded.spec.name})
    terminal.summary(f"{path.as_posix()} written; next: kgen render {path.as_posix()}", form)
    return 0


def _gqa(text: str) -> int | str:
    if text == "any":
        return text
    if text.isascii() and text.isdigit() and 0 < int(text[:10]) < 2**31:
        return int(text[:10])
    hint = "write how many query heads share a key-value head, or `any`"
    raise KgenError(Diagnostic("usage", "`--gqa` is a number or `any`", hint=hint))
