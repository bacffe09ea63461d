"""The verb `explain`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from kgen.cli import terminal
from kgen.cli.options import Generated, Spec
from kgen.cli.proofs import proofs
from kgen.cli.verbs import load_specs, verb
from kgen.diagnostics import Diagnostic, KgenError, shown
from kgen.files import write_new
from kgen.settings import settings

if TYPE_CHECKING:
    from kgen.pages.model import Drawing, Page
    from kgen.spec.load import Loaded


class As(str, Enum):
    """Values of `--format`."""

    TEXT = "text"
    MD = "md"
    HTML = "html"
    SVG = "svg"
    JSON = "json"


PAGES = (As.MD, As.HTML, As.SVG)
Length = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        min=1,
        max=2**20,
        metavar="N",
        help="Draw the tiles that kernels visit at this sequence length.",
    ),
]
Heads = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        min=1,
        max=64,
        metavar="N",
        help="Number of heads to draw, if their masks differ. Default: 1.",
    ),
]
Values = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Value of a run-time parameter, such as window=1024. Repeatable.",
    ),
]
Ranks = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        min=2,
        max=1024,
        metavar="N",
        help="Split each sequence over N GPUs; show the work of each GPU.",
    ),
]


@verb("explain")
def explain(
    spec: Spec,
    length: Length = None,
    heads: Heads = None,
    given: Values = None,
    ranks: Ranks = None,
    generated: Generated = None,
    flex: Annotated[
        bool, typer.Option("--flex", help="Print the spec as FlexAttention code instead.")
    ] = False,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--output", metavar="FILE", help="Output file. Default: stdout."),
    ] = None,
    form: Annotated[
        As,
        typer.Option("--format", help="md and html are pages; svg is the drawing; json is data."),
    ] = As.TEXT,
) -> int:
    """Show how kernels compute a spec, and which tiles they visit."""
    loaded, *others = load_specs([spec])
    if any(other.path != loaded.path for other in others):
        message = f"expected one spec, got a folder of {1 + len(others)}"
        hint = f"name one of them: `kgen explain {loaded.path}`"
        raise KgenError(Diagnostic("usage", message, file=str(spec), hint=hint))
    wanted = _drawing(length, heads, given, ranks)
    if flex:
        if form in PAGES or wanted is not None:
            message = "`--flex` cannot be combined with a drawing or a page"
            hint = "leave out the options that draw, and use `--format text` or `json`"
            raise KgenError(Diagnostic("usage", message, hint=hint))
        from kgen.flex.flexcode import flex_code

        text = flex_code(loaded)
    else:
        text = _explained(loaded, wanted, generated or settings().generated, form)
    if flex and form is As.JSON:
        text = terminal.as_json({"spec": loaded.spec.name, "flex": text})
    if others and form is As.TEXT and not flex:
        text = f"Variant {loaded.variant}, one of {1 + len(others)}.\n\n{text}"
    text = text.rstrip("\n") + "\n"
    if output is not None:
        _write(text, output, spec)
    elif flex or form in PAGES:
        terminal.exact(text)
    else:
        terminal.line(text.rstrip("\n"))
    return 0


def _drawing(
    length: int | None, heads: int | None, given: Sequence[str] | None, ranks: int | None
) -> Drawing | None:
    """Return the options of the drawing, or None if the command line has none."""
    if length is None and heads is None and ranks is None and not given:
        return None
    from kgen.pages.model import Drawing

    pairs = [text.partition("=") for text in given or ()]
    for name, equals, value in pairs:
        if not (name and equals and value):
            message = f"`--set`: expected NAME=VALUE, got {shown(name + equals + value)}"
            raise KgenError(Diagnostic("usage", message, hint="for example `--set window=1024`"))
    return Drawing(length, heads, {name: value for name, _, value in pairs}, ranks)


def _explained(loaded: Loaded, wanted: Drawing | None, generated: Path, form: As) -> str:
    from kgen.pages.markdown import markdown
    from kgen.pages.model import Drawing
    from kgen.pages.svg import grids
    from kgen.pages.text import text
    from kgen.reports.explained import explained, facts, said

    drawing = wanted or (Drawing() if form in PAGES else None)
    page = (
        explained(loaded, drawing, generated) if form in (As.MD, As.HTML) else said(loaded, drawing)
    )
    if wanted is not None or form is As.SVG:
        _check_drawn(page, loaded)
    if form is As.JSON:
        return terminal.as_json(facts(loaded, drawing, generated))
    if form is As.SVG:
        return grids(page.grids(), page.title)
    if form is As.MD:
        return markdown(page)
    if form is As.HTML:
        from kgen.reports.html import html

        return html(page)
    return text(page) + "".join(f"\n{line}\n" for line in proofs(loaded, generated))


def _check_drawn(page: Page, loaded: Loaded) -> None:
    if not page.grids():
        message = f"kernel `{loaded.spec.kernel}` has no tiles to draw: it computes every element"
        hint = "leave out `--length`, `--heads` and `--set`, or use `--format html`"
        raise KgenError(Diagnostic("no-picture", message, file=str(loaded.path), hint=hint))


def _write(text: str, output: Path, spec: Path) -> None:
    if os.path.realpath(output) == os.path.realpath(spec):
        raise KgenError(Diagnostic("usage", "`--output` is the file of the spec", file=str(output)))
    write_new(output, text, "name another file", force=True)
