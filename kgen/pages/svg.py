"""Grids and bars as SVG: plain shapes and text, which need no script and no font of their own.

Colours are classes, so that a dark page has its own: in an HTML page the style of the page has
them, and a picture that stands alone brings `STYLE`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape, quoteattr

from kgen.pages import text
from kgen.pages.model import FULL, KINDS, MASKED, SKIPPED, Bars, Grid, Group

# No matplotlib: rectangles suffice, follow a dark screen, and have the same bytes on all machines.
CLASSES = {SKIPPED: "skipped", MASKED: "masked", FULL: "full"}
SERIES = 8
"""Colours of series, in order. More series repeat them."""

STYLE = """\
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6675; --line: #d5dbe3; \
--paper: #ffffff;
  --skipped: #edf0f4; --masked: #f0a830; --full: #2f6fb7;
  --c0: #2f6fb7; --c1: #e08a1e; --c2: #3d9a5b; --c3: #c8504f;
  --c4: #8465b5; --c5: #8a6a52; --c6: #cf6fa8; --c7: #6f7a86; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #9aa6b5; --line: #38424f; --paper: #14181e;
    --skipped: #252c36; --masked: #d9962c; --full: #4f94dd;
    --c0: #4f94dd; --c1: #e79b3c; --c2: #58b878; --c3: #e0716f;
    --c4: #a48ad3; --c5: #b08f74; --c6: #df8dbe; --c7: #93a0ae; } }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; \
fill: var(--ink); }
svg .soft { fill: var(--soft); }
svg .strong { font-weight: 600; }
svg .paper { fill: var(--paper); }
svg .rule { stroke: var(--line); stroke-width: 1; }
svg .cut { stroke: var(--paper); stroke-width: 0.75; }
svg .skipped { fill: var(--skipped); } svg .masked { fill: var(--masked); } \
svg .full { fill: var(--full); }
svg .c0 { fill: var(--c0); } svg .c1 { fill: var(--c1); } svg .c2 { fill: var(--c2); } \
svg .c3 { fill: var(--c3); }
svg .c4 { fill: var(--c4); } svg .c5 { fill: var(--c5); } svg .c6 { fill: var(--c6); } \
svg .c7 { fill: var(--c7); }
"""


@dataclass(frozen=True)
class Element:
    """Return an element with its attributes and content."""

    tag: str
    attributes: dict[str, str | float]
    inner: tuple[Element, ...] | str = ()

    def __str__(self) -> str:
        named = "".join(
            f" {name}={quoteattr(_shown(value))}" for name, value in self.attributes.items()
        )
        inner = escape(self.inner) if isinstance(self.inner, str) else "".join(map(str, self.inner))
        return f"<{self.tag}{named}>{inner}</{self.tag}>" if inner else f"<{self.tag}{named}/>"


def _shown(value: str | float) -> str:
    return value if isinstance(value, str) else f"{round(value, 2):g}"


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> Element:
    told = (Element("title", {}, title),) if title else ()
    return Element("rect", {"x": x, "y": y, "width": width, "height": height, "class": kind}, told)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Element:
    return Element("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": kind})


def _text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> Element:
    where: dict[str, str | float] = {"x": x, "y": y}
    where |= {"class": kind} if kind else {}
    where |= {"text-anchor": anchor} if anchor != "start" else {}
    return Element("text", where, said)


def _picture(width: float, height: float, title: str, inner: Iterable[Element]) -> Element:
    box = f"0 0 {_shown(width)} {_shown(height)}"
    # A page may make it narrower than it is drawn, and no wider.
    fit = f"width: 100%; max-width: {_shown(width * 1.25)}px; height: auto"
    given: dict[str, str | float] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": box,
        "role": "img",
    }
    return Element("svg", {**given, "style": fit}, (Element("title", {}, title), *inner))


# --- grids ------------------------

SIDE = 384
"""The size of a grid, in units of the picture."""
LEFT, TOP, LINE = 28, 24, 18


def grid(of: Grid) -> Element:
    """Draw tiles as rectangles.

    Neighbours of one kind share a rectangle, and lines separate the tiles.
    """
    return _picture(LEFT + SIDE + 8, _height(of), f"{of.title}: {text.shares(of)}", _drawn(of))


def _drawn(of: Grid) -> Iterator[Element]:
    columns = len(of.rows[0])
    down, across = SIDE / len(of.rows), SIDE / columns
    yield _text(LEFT, 14, "keys, from 0", "soft")
    yield _text(LEFT + SIDE, 14, f"{of.length:,}", "soft", "end")
    turned = f"rotate(-90 16 {TOP + SIDE})"
    label = _text(16, TOP + SIDE, "queries, from 0 at the top", "soft")
    yield Element("text", {**label.attributes, "transform": turned}, label.inner)
    for i, row in enumerate(of.rows):
        start = 0
        for kind, run in groupby(row):
            count = len([*run])
            title = KINDS[kind]
            yield _rect(
                LEFT + start * across, TOP + i * down, count * across, down, CLASSES[kind], title
            )
            start += count
    for i in range(1, len(of.rows)):
        yield _line(LEFT, TOP + i * down, LEFT + SIDE, TOP + i * down, "cut")
    for i in range(1, columns):
        yield _line(LEFT + i * across, TOP, LEFT + i * across, TOP + SIDE, "cut")
    y, x = float(TOP + SIDE + LINE), LEFT
    for (kind, name), share in zip(KINDS.items(), of.shares().values(), strict=True):
        yield _rect(x, y - 10, 11, 11, CLASSES[kind])
        said = f"{name}, {share:.0%}"
        yield _text(x + 16, y, said)
        y += LINE
    queries, keys = of.tile
    yield _text(LEFT, y, f"one rectangle is {queries} queries by {keys} keys", "soft")
    yield from (
        _text(LEFT, y + (i + 1) * LINE, line, "soft") for i, line in enumerate(_wrapped(of.title))
    )


def _wrapped(title: str) -> list[str]:
    """Wrap a title to the width of a grid."""
    return textwrap.wrap(title, SIDE // 7)


def _height(of: Grid) -> float:
    return TOP + SIDE + (len(KINDS) + 1 + len(_wrapped(of.title)) + 0.5) * LINE


def grids(of: tuple[Grid, ...], name: str) -> str:
    """Draw the grids of a spec below each other, as a separate file."""
    placed, height = [], 30.0
    for one in of:
        placed.append(
            Element("g", {"transform": f"translate(0 {_shown(height)})"}, tuple(_drawn(one)))
        )
        height += _height(one)
    width = LEFT + SIDE + 8
    style = Element("style", {}, STYLE)
    head = _text(LEFT, 20, name, "strong")
    paper = _rect(0, 0, width, height, "paper")
    title = f"Tiles of {name}: queries (down) by keys (across)"
    return f"{_picture(width, height, title, (style, paper, head, *placed))}\n"


# --- bars ------------------------

WIDTH, BAR = 560, 13
LETTER = 7.4
"""The width of the widest usual character in names."""


def bars(of: Bars) -> Element:
    """Draw horizontal bars by group, with the value at the end.

    A stack lists its parts in its title.
    """
    labels = 8 + LETTER * max(len(group.name) for group in of.groups)
    room = WIDTH - labels - 64
    rows = [1 if of.stacked else len(group.values) for group in of.groups]
    legend = [*_legend(of)]
    top = 10 + LINE * (1 + (legend[-1][1] if legend else 0))
    height: float = top + sum(rows) * BAR + len(rows) * 7 + 4
    inner = [_text(0, 14, f"{of.title}, {of.unit}", "strong")]
    for number, (x, line) in enumerate(legend):
        y = 14 + LINE * line
        name = of.series[number]
        inner += [_rect(x, y - 10, 11, 11, _class(of, name)), _text(x + 16, y, name)]
    lowest, highest = _range(of)
    inner.append(_line(labels, top - 2, labels, height - 4, "rule"))
    below = float(top)
    for group, count in zip(of.groups, rows, strict=True):
        inner.append(_text(labels - 6, below + count * BAR / 2 + 4, group.name, "", "end"))
        inner += _group(
            of, group, labels, below, lambda v: room * _share(v, lowest, highest, of.logarithmic)
        )
        below += count * BAR + 7
    return _picture(WIDTH, height, f"{of.title}, {of.unit}", inner)


def _legend(of: Bars) -> Iterator[tuple[float, int]]:
    """Return the position of each name in the legend: an offset, and a line below the title."""
    x, line = 0.0, 1
    for name in of.series:
        width = 16 + LETTER * len(name) + 14
        if x and x + width > WIDTH:
            x, line = 0.0, line + 1
        yield x, line
        x += width


def _class(of: Bars, series: str) -> str:
    return f"c{of.colour(series) % SERIES}"


def _range(of: Bars) -> tuple[float, float]:
    values = [value for group in of.groups for value in group.values.values()]
    if of.stacked:
        values = [sum(group.values.values()) for group in of.groups]
    positive = [value for value in values if value > 0]
    highest = max(positive, default=1.0)
    lowest = (
        10.0 ** math.floor(math.log10(min(positive, default=1.0))) / 10 if of.logarithmic else 0.0
    )
    return lowest, highest


def _share(value: float, lowest: float, highest: float, logarithmic: bool) -> float:
    if not logarithmic:
        return value / highest
    return math.log(value / lowest) / math.log(highest / lowest) if value > lowest else 0.0


def _group(
    of: Bars, group: Group, x: float, y: float, length: Callable[[float], float]
) -> Iterator[Element]:
    end = x
    for name, value in group.values.items():
        kind, width = _class(of, name), length(value)
        yield _rect(
            end, y + 1, max(width, 0.5), BAR - 2, kind, f"{group.name}, {name}: {value:.4g}"
        )
        if of.stacked:
            end += width
        else:
            yield _text(x + width + 4, y + BAR - 3, f"{value:.3g}", "soft")
            y += BAR
    if of.stacked:
        yield _text(end + 4, y + BAR - 3, f"{sum(group.values.values()):g}", "soft")
