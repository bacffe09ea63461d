"""Render a page as one HTML file without scripts or external resources.

Specs, and therefore pages, contain text of users. jinja escapes all of it, and a content security
policy forbids loading or running anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, singledispatch
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kgen.pages import model, svg
from kgen.pages.model import Block, Code, Page, Words
from kgen.render.environment import template_root


@dataclass(frozen=True)
class Part:
    """A piece of a line, as the template reads it."""

    text: str
    is_code: bool


@dataclass(frozen=True)
class Titled:
    """A section, as the template reads it."""

    title: str
    anchor: str
    blocks: tuple[Markup, ...]


def html(page: Page) -> str:
    """Return the HTML of a page."""
    anchors = [anchor(section.title) for section in page.sections]
    sections = tuple(
        Titled(section.title, _unlike(anchors, i), tuple(map(_block, section.blocks)))
        for i, section in enumerate(page.sections)
    )
    # The colours are constant text, so they need no escaping.
    fields = {"page": page, "sections": sections, "colours": Markup(svg.STYLE)}
    rendered = _environment().get_template("pages/page.html.j2").render(fields)
    return "\n".join(line.rstrip() for line in rendered.split("\n")).strip("\n") + "\n"


def anchor(title: str) -> str:
    """Return the link target of a section."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _unlike(anchors: Sequence[str], i: int) -> str:
    """Return an anchor, with a number if an earlier one is equal."""
    before = anchors[:i].count(anchors[i])
    return f"{anchors[i]}-{before + 1}" if before else anchors[i]


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(template_root()),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        newline_sequence="\n",
    )


def _macro(name: str) -> Callable[[dict[str, object]], Markup]:
    found: Any = getattr(_environment().get_template("pages/_blocks.html.j2").module, name)
    return found  # type: ignore[no-any-return]


def _said(words: Words) -> tuple[Part, ...]:
    return tuple(
        Part(part.text, True) if isinstance(part, Code) else Part(part.replace("\n", " "), False)
        for part in words
    )


@singledispatch
def _block(block: Block) -> Markup:
    raise TypeError(block)


@_block.register
def _prose(block: model.Prose) -> Markup:
    return _macro("prose")({"said": _said(block.said)})


@_block.register
def _lines(block: model.Lines) -> Markup:
    lines = [
        {"code": line.code, "note": line.note, "below": [*map(_said, line.below)]}
        for line in block.lines
    ]
    return _macro("lines")({"heading": _said(block.heading), "lines": lines})


@_block.register
def _formula(block: model.Formula) -> Markup:
    return _macro("formula")({"lines": block.lines})


@_block.register
def _remarks(block: model.Remarks) -> Markup:
    said = [part for words in block.said for part in (*_said(words), Part(" ", False))]
    return _macro("remarks")({"of": block.of.text, "said": said})


@_block.register
def _table(block: model.Table) -> Markup:
    rows = [[*map(_said, row)] for row in block.rows]
    return _macro("table")({"columns": block.columns, "rows": rows})


@_block.register
def _listing(block: model.Listing) -> Markup:
    return _macro("listing")({"file": block.file, "text": block.text})


@_block.register
def _grid(block: model.Grid) -> Markup:
    return _picture(svg.grid(block))


@_block.register
def _bars(block: model.Bars) -> Markup:
    return _picture(svg.bars(block))


def _picture(drawn: svg.Element) -> Markup:
    # svg elements escape their content.
    return _macro("picture")({"drawn": Markup(str(drawn))})
