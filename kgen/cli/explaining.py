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
    """How what is explained is written: as text, a page, its picture, or data."""

    TEXT = "text"
    MD = "md"
    HTML = "html"
    SVG = "svg"
    JSON = "json"


PAGES = (As.MD, As.HTML, As.SVG)


@verb("explain")
def explain(
    spec: Spec,
    length: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=2**20, help="Draw the tiles that are visited for sequences of this length."),
    ] = None,
    heads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=64, help="Draw them for each of so many heads, where heads differ."),
    ] = None,
    given: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Draw them for this run-time parameter. Repeatable."
        ),
    ] = None,
    ranks: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=2, max=1024, help="Say how sequences would be spread over so many GPUs."),
    ] = None,
    generated: Generated = None,
    flex: Annotated[
        bool, typer.Option("--flex", help="Print the spec as FlexAttention code instead.")
    ] = False,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--output", metavar="FILE", help="Where to. Default: stdout."),
    ] = None,
    form: Annotated[
        As, typer.Option("--format", help="A page to show (md, html), the tiles alone (svg), text or data.")
    ] = As.TEXT,
) -> int:
    """Show what becomes of a spec, step by step; draw its tiles."""
    loaded, *others = load_specs([spec])
    if any(other.path != loaded.path for other in others):
        message = f"the directory has {1 + len(others)} specs, and one is explained at a time"
        raise KgenError(Diagnostic("usage", message, file=str(spec), hint=f"kgen explain {loaded.path}"))
    wanted = _drawing(length, heads, given, ranks)
    if flex:
        if form in PAGES or wanted is not None:
            message = "--flex goes with no picture and no page"
            raise KgenError(Diagnostic("usage", message, hint="leave out what draws"))
        from kgen.flex.flexcode import flex_code

        text = flex_code(loaded)
    else:
        text = _explained(loaded, wanted, generated or settings().generated, form)
    if flex and form is As.JSON:
        text = terminal.as_json({"spec": loaded.spec.name, "flex": text})
    if others and form is As.TEXT and not flex:
        text = f"Of {1 + len(others)} variants, {loaded.variant}.\n\n{text}"
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
    """What is to be drawn; None where nothing was asked for."""
    if length is None and heads is None and ranks is None and not given:
        return None
    from kgen.pages.model import Drawing

    pairs = [text.partition("=") for text in given or ()]
    for name, equals, value in pairs:
        if not (name and equals and value):
            message = f"`--set` takes a name and a value, not {shown(name + equals + value)}"
            raise KgenError(Diagnostic("usage", message, hint="write `--set window=1024`"))
    return Drawing(length, heads, {name: value for name, _, value in pairs}, ranks)


def _explained(loaded: Loaded, wanted: Drawing | None, generated: Path, form: As) -> str:
    from kgen.pages.markdown import markdown
    from kgen.pages.model import Drawing
    from kgen.pages.svg import grids
    from kgen.pages.text import text
    from kgen.reports.explained import explained, facts, said

    drawing = wanted or (Drawing() if form in PAGES else None)
    page = explained(loaded, drawing, generated) if form in (As.MD, As.HTML) else said(loaded, drawing)
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
        message = f"kernel `{loaded.spec.kernel}` has no tiles to draw: it visits all there are"
        hint = "leave out `--length`, `--heads` and `--set`, or ask for `--format html`"
        raise KgenError(Diagnostic("no-picture", message, file=str(loaded.path), hint=hint))


def _write(text: str, output: Path, spec: Path) -> None:
    if os.path.realpath(output) == os.path.realpath(spec):
        raise KgenError(Diagnostic("usage", "the output is the spec itself", file=str(output)))
    write_new(output, text, "name another file", force=True)
