"""Print a page as GitHub Markdown. Text from users is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import singledispatch

from kgen.pages import model, text
from kgen.pages.model import Block, Code, Page, Words

LANGUAGES = {"py": "python", "cu": "c++", "yaml": "yaml"}
"""Languages of code blocks, by the suffix of a file."""


def markdown(page: Page) -> str:
    """Return the page as Markdown."""
    parts = [f"# {said((page.title,))}", said((page.summary,))]
    for section in page.sections:
        parts.append(f"## {said((section.title,))}")
        parts += (part for block in section.blocks for part in printed(block))
    return "\n\n".join(filter(None, parts)) + "\n"


@singledispatch
def printed(block: Block) -> Iterator[str]:
    """Yield the paragraphs of a block."""
    raise TypeError(block)


@printed.register
def _prose(block: model.Prose) -> Iterator[str]:
    yield said(block.said)


@printed.register
def _lines(block: model.Lines) -> Iterator[str]:
    if block.heading:
        yield said(block.heading)
    yield "\n".join(line for item in block.lines for line in _item(item))


def _item(line: model.Line) -> Iterator[str]:
    note = said((line.note,))
    yield f"- {', '.join(filter(None, [code(line.code) if line.code else '', note]))}"
    yield from (f"  - {said(below)}" for below in line.below)


@printed.register
def _formula(block: model.Formula) -> Iterator[str]:
    yield fenced("\n".join(block.lines))


@printed.register
def _remarks(block: model.Remarks) -> Iterator[str]:
    yield code(block.of.text)
    yield " ".join(map(said, block.said))


@printed.register
def _table(block: model.Table) -> Iterator[str]:
    rows = [
        [said((name,)) for name in block.columns],
        ["---"] * len(block.columns),
        *([_cell(cell) for cell in row] for row in block.rows),
    ]
    yield "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(cell: Words) -> str:
    # A bar ends a cell in a piece of code, too.
    return "".join(
        said((part,)) if isinstance(part, str) else code(part.text).replace("|", "\\|")
        for part in cell
    )


@printed.register
def _listing(block: model.Listing) -> Iterator[str]:
    yield code(block.file)
    yield fenced(block.text, LANGUAGES.get(block.file.rpartition(".")[2], ""))


@printed.register
def _grid(block: model.Grid) -> Iterator[str]:
    queries, keys = block.tile
    yield said((f"{block.title}; one character is {queries} queries by {keys} keys.",))
    yield fenced("\n".join((text.legend(), "", *block.rows)))
    yield said((f"{text.shares(block)}.",))


@printed.register
def _bars(block: model.Bars) -> Iterator[str]:
    yield said((f"{block.title}, {block.unit}",))
    yield fenced("\n".join(text.printed(block)))


def said(parts: Words) -> str:
    """Return words on one line that is not a list, quote or heading."""
    line = "".join(
        code(part.text)
        if isinstance(part, Code)
        else _MARKUP.sub(r"\\\g<0>", part.replace("\n", " "))
        for part in parts
    )
    return re.sub(r"^( *\d*)([-+=.)>])", r"\1\\\2", line)


_MARKUP = re.compile(
    r"[\\`*\[\]#|~$@]|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\."
)
"""Characters that would be markup. `a_b` and `a < b` are not markup."""


def code(text: str) -> str:
    """Return text in more backquotes than it contains in a row."""
    text = text.replace("\n", " ")
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fenced(text: str, language: str = "") -> str:
    """Return text in a fenced block, with more backquotes than it contains in a row."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text.rstrip(chr(10))}\n{ticks}"
