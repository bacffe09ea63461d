"""`kgen adapt`: packages through which other libraries call kernels."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from kgen.cli import terminal
from kgen.cli.options import Form, Prove, Specs, output_to
from kgen.cli.proofs import proven
from kgen.cli.rendering import drift_line
from kgen.cli.terminal import Format
from kgen.cli.verbs import verb
from kgen.diagnostics import EXIT_WRONG, Diagnostic, KgenError, counted, shown
from kgen.family import known_adapters, packaged_adapters

if TYPE_CHECKING:
    from kgen.render.project import Rendered
    from kgen.render.writer import Change

Kind = Enum("Kind", {name: name for name in known_adapters()}, type=str)  # type: ignore[misc]
ADAPTERS = Path("adapters")


@verb("adapt")
def adapt(
    specs: Specs = None,
    kind: Annotated[
        list[Kind],
        typer.Option(
            "--for",
            help="Kind of adapter. transformers: Hugging Face models call the kernels. "
            "context_parallel: several GPUs share each sequence. "
            "hub: a package for the Hugging Face kernel hub. "
            "torch: PyTorch's scaled_dot_product_attention and varlen_attn call the kernels. "
            "flash_attn: a package with functions of flash-attn 2, such as flash_attn_func. "
            "torchtitan: torchtitan models call the kernels. "
            "vllm, sglang: an attention backend of the serving engine, for specs with `serve`. "
            "fla: a package with functions of flash-linear-attention and mamba-ssm. Repeatable.",
        ),
    ] = ...,  # type: ignore[assignment]
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--name",
            metavar="NAME",
            help="For torch and flash_attn: first part of the package name, as in NAME_torch. "
            "Default: the name of the spec, or `attention` for several specs.",
        ),
    ] = None,
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
    """Write adapters: packages that connect kernels to other libraries."""
    from kgen.render import checking, project, writer

    kinds = [one.value for one in kind]
    _require_name(name, kinds)
    if check:
        adapted = checking.adapt_checked(specs or [], kinds, output, name)
    else:
        adapted = project.adapt_all(project.find_specs(specs or []), kinds, name)
        adapted = proven(adapted, None, output, prove=prove)
    outputs, started = project.together(adapted)
    changes = writer.compute_changes(outputs, output, started, others=False)
    if not check:
        writer.apply(changes, force=force)
    drift = writer.drift(changes)
    _show(drift, adapted, form, check=check)
    states = Counter(change.state for change in drift)
    total, pruned, edited = writer.wanted(changes), states["pruned"], states["edited"]
    said = f"{counted(total, 'file')} checked, {len(drift) - edited} differ, {edited} edited"
    if not check:
        said = f"{counted(total, 'file')} rendered, {len(drift) - pruned} changed, {pruned} deleted"
    terminal.summary(said, form)
    return EXIT_WRONG if check and drift else 0


def _show(
    drift: Sequence[Change], adapted: Sequence[Rendered], form: Format, *, check: bool
) -> None:
    """Print the changes, the callers that can use the kernels, and remarks."""
    fits = [line for one in adapted for line in one.fits]
    remarks = [line for one in adapted for line in one.remarks]
    if form is Format.JSON:
        rows = [{"path": c.path.as_posix(), "state": c.state, "why": c.why or None} for c in drift]
        terminal.data({"changes": rows, "fits": fits, "remarks": remarks})
        return
    stream = sys.stderr if check else sys.stdout
    for line in (*(drift_line(change, dry=check) for change in drift), *fits, *remarks):
        terminal.line(line, stream)


def _require_name(name: str | None, kinds: list[str]) -> None:
    """Raise `KgenError` if packages cannot have a name."""
    allowed = packaged_adapters()
    if name is not None and not {*kinds} <= {*allowed}:
        message = "`--name` names packages that may have the kernels of several specs"
        hint = f"leave it out, or use only `--for` {' and '.join(allowed)}"
        raise KgenError(Diagnostic("usage", message, hint=hint))
    if name is not None and not (name.isascii() and name.isidentifier()):
        message = f"`--name` must be a name of Python, got {shown(name)}"
        raise KgenError(Diagnostic("usage", message, hint="use letters, digits and `_`"))
