"""Print a page as plain text, for terminals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

from kgen.pages import model
from kgen.pages.model import KINDS, Block, Page, Words, plain


def text(page: Page) -> str:
    """Return the page without the sections for other formats."""
    sections = [
        "\n".join(
            [f"{section.title}\n", *(line for block in section.blocks for line in printed(block))]
        )
        for section in page.sections
        if not section.for_pages
    ]
    return "\n\n".join([f"{page.title}: {page.summary}".rstrip(": "), *sections]) + "\n"


@singledispatch
def printed(block: Block) -> Iterator[str]:
    """Yield the lines of a block."""
    raise TypeError(block)


@printed.register
def _prose(block: model.Prose) -> Iterator[str]:
    yield from _set_in(block.said, 2)


@printed.register
def _lines(block: model.Lines) -> Iterator[str]:
    if block.heading:
        yield from _set_in(block.heading, 2)
    indent = " " * (6 if block.heading else 2)
    for line in block.lines:
        note = f", {line.note}" if line.code and line.note else line.note
        yield f"{indent}{line.code}{note}"
        for said in line.below:
            yield from _set_in(said, len(indent) + 4)


@printed.register
def _formula(block: model.Formula) -> Iterator[str]:
    yield ""
    yield from (f"      {line}" for line in block.lines)
    yield ""


@printed.register
def _remarks(block: model.Remarks) -> Iterator[str]:
    yield ""
    yield f"  {block.of.text}"
    for said in block.said:
        yield from _set_in(said, 6)


@printed.register
def _table(block: model.Table) -> Iterator[str]:
    rows = [[plain(cell) for cell in row] for row in block.rows]
    if block.plain_head:
        rows.insert(0, list(block.columns))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


@printed.register
def _listing(block: model.Listing) -> Iterator[str]:
    yield f"  {block.file}"
    yield ""
    yield from (f"      {line}".rstrip() for line in block.text.splitlines())
    yield ""


@printed.register
def _grid(block: model.Grid) -> Iterator[str]:
    queries, keys = block.tile
    yield f"  {block.title}; one character is {queries} queries by {keys} keys"
    yield f"  {legend()}"
    yield ""
    yield from (f"      {row}" for row in block.rows)
    yield ""
    yield f"  {shares(block)}"


def legend() -> str:
    """Return the legend of a grid."""
    return "   ".join(f"{kind} {name}" for kind, name in KINDS.items())


def shares(grid: model.Grid) -> str:
    """Describe the fraction of tiles of each kind."""
    named = zip(grid.shares().values(), ("skipped", "masked", "unmasked"), strict=True)
    return ", ".join(f"{share:.0%} {name}" for share, name in named)


@printed.register
def _bars(block: model.Bars) -> Iterator[str]:
    yield f"  {block.title}, {block.unit}"
    rows = tuple(
        (
            (group.name,),
            *((f"{group.values[s]:.4g}" if s in group.values else "-",) for s in block.series),
        )
        for group in block.groups
    )
    yield from printed(model.Table(("", *block.series), rows))


def _set_in(said: Words, indent: int) -> Iterator[str]:
    return (f"{' ' * indent}{line}" for line in plain(said).split("\n"))
