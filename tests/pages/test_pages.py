"""Pages in every format contain all of the text, and none of it acts as markup."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from kgen.pages.markdown import code, fenced, markdown, said
from kgen.pages.model import (
    FULL,
    KINDS,
    MASKED,
    SKIPPED,
    Bars,
    Code,
    Formula,
    Grid,
    Group,
    Line,
    Lines,
    Listing,
    Page,
    Prose,
    Remarks,
    Section,
    Table,
    plain,
    quoting,
    words,
)
from kgen.pages.svg import SIDE, bars, grid, grids
from kgen.pages.text import text

GRID = Grid((".+#", "+#."), (128, 64), 256, "SQ = SK = 256")
BARS = Bars(
    "forward",
    "TFLOP/s",
    (Group("causal", {"kgen": 600.0, "flex": 300.0}), Group("full", {"kgen": 650.0})),
)
PAGE = Page(
    "sample",
    "A sample.",
    (
        Section(
            "First",
            (
                Prose(words("It is ", Code("a * b"), ",\nand ", Code("b", quoted=True), ".")),
                Lines((Line("x = 1", "compiled in"), Line(note="nothing"))),
                Lines((Line("[0, n)", "", (words("no mask is needed"),)),), words("each visits")),
                Formula(("qk * scale",)),
                Remarks(Code("d x = 1"), (words("It is summed;"), words("the bits are the same."))),
                Table(("kernel", "chip"), ((words("forward"), words("sm_90")),)),
                Table(("kernel", "chip"), ((words("dq"), words("any")),), plain_head=False),
                GRID,
                BARS,
            ),
        ),
        Section("Code", (Listing("triton.py", "for i in x:\n    y\n"),), for_pages=True),
    ),
)


def test_text() -> None:
    assert (
        text(PAGE)
        == """sample: A sample.

First

  It is a * b,
  and `b`.
  x = 1, compiled in
  nothing
  each visits
      [0, n)
          no mask is needed

      qk * scale


  d x = 1
      It is summed;
      the bits are the same.
  kernel   chip
  forward  sm_90
  dq  any
  SQ = SK = 256; one character is 128 queries by 64 keys
  . not visited   + mask evaluated   # mask not evaluated

      .+#
      +#.

  33% skipped, 33% masked, 33% unmasked
  forward, TFLOP/s
          kgen  flex
  causal  600   300
  full    650   -
"""
    )


def test_markdown() -> None:
    made = markdown(PAGE)
    assert made.startswith(
        "# sample\n\nA sample.\n\n## First\n\nIt is `a * b`, and `b`.\n\n- `x = 1`, compiled in\n"
    )
    assert "each visits\n\n- `[0, n)`\n  - no mask is needed\n" in made
    assert "| kernel | chip |\n| --- | --- |\n| forward | sm_90 |" in made
    assert "```\n. not visited   + mask evaluated   # mask not evaluated\n\n.+#\n+#.\n```" in made
    assert made.endswith("`triton.py`\n\n```python\nfor i in x:\n    y\n```\n")


@pytest.mark.parametrize(
    "written",
    [
        *(
            "<script>alert(1)</script>",
            "</p><b>",
            "<!-- a -->",
            "<?a?>",
            "&lt;b&gt; &#60;",
            "a < b > c & d",
        ),
        *(
            "[a](http://b.c)",
            "![a](b)",
            "<http://a.b>",
            "[a]: b",
            "`a` ``b``",
            "*a* **b** _c_ __d__ a_b_c ~~e~~",
        ),
        *(
            "a|b",
            "# a",
            "> a",
            "- a",
            "+ a",
            "12. a",
            "1) a",
            "---",
            "===",
            "\\",
            "\\*a*",
            "$a$",
            "@team",
            "www.a.b http://a.b",
        ),
    ],
)
def test_markdown_of_a_user_is_text(written: str) -> None:
    """A Markdown parser reads one paragraph of plain text."""
    opened, inline, closed = MarkdownIt("commonmark").enable("table").parse(said((written,)))
    assert (opened.type, closed.type) == ("paragraph_open", "paragraph_close")
    assert {child.type for child in inline.children or ()} <= {"text", "text_special"}
    assert "".join(child.content for child in inline.children or ()) == written


def test_code_in_markdown_ends_where_it_ends() -> None:
    assert code("a") == "`a`"
    assert code("a `b` c") == "``a `b` c``"
    assert code("`") == "`` ` ``"
    assert fenced("```\n<b>").startswith("````\n```\n")
    assert fenced("a `b`", "yaml") == "```yaml\na `b`\n```"


def test_our_own_sentences_quote() -> None:
    assert quoting("write `a: b`, or `c`.") == (
        "write ", Code("a: b", quoted=True), ", or ", Code("c", quoted=True), ".",
    )  # fmt: skip
    assert plain(quoting("`a` b")) == "`a` b"


def shapes(drawn: str, kind: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(drawn).iter() if e.get("class") == kind]


def test_a_grid_is_drawn_tile_by_tile() -> None:
    """The rectangles of a kind cover the tiles of the rows, and none twice."""
    drawn = str(grid(GRID))
    names = {SKIPPED: "skipped", MASKED: "masked", FULL: "full"}
    down, across = SIDE / len(GRID.rows), SIDE / len(GRID.rows[0])
    covered: dict[tuple[int, int], str] = {}
    left = min(float(e.get("x", 0)) for kind in names.values() for e in shapes(drawn, kind))
    top = min(float(e.get("y", 0)) for kind in names.values() for e in shapes(drawn, kind))
    for kind, name in names.items():
        for rect in shapes(drawn, name):
            x, y = (float(rect.get(n, 0)) - base for n, base in (("x", left), ("y", top)))
            if y >= SIDE:
                continue  # the legend
            for j in range(round(float(rect.get("width", 0)) / across)):
                place = round(y / down), round(x / across) + j
                assert place not in covered
                covered[place] = kind
    assert covered == {
        (i, j): kind for i, row in enumerate(GRID.rows) for j, kind in enumerate(row)
    }
    assert all(name in drawn for name in KINDS.values())


def test_grids_in_a_file_of_their_own() -> None:
    made = grids((GRID, GRID), "<name>")
    root = ElementTree.fromstring(made)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len([e for e in root if e.tag.endswith("}g")]) == 2
    assert "&lt;name&gt;" in made
    assert "prefers-color-scheme: dark" in made


def test_bars_are_as_long_as_their_values() -> None:
    drawn = str(bars(BARS))
    widths = {
        (e.findtext("{*}title") or ""): float(e.get("width", 0))
        for k in ("c0", "c1")
        for e in shapes(drawn, k)
    }
    assert widths["full, kgen: 650"] / widths["causal, flex: 300"] == pytest.approx(
        650 / 300, rel=1e-3
    )
    stacked = str(bars(Bars("states", "files", (Group("a", {"x": 1, "y": 3}),), stacked=True)))
    first, second = (shapes(stacked, kind)[-1] for kind in ("c0", "c1"))
    assert float(first.get("x", 0)) + float(first.get("width", 0)) == pytest.approx(
        float(second.get("x", 0)), abs=0.1
    )
    small = str(
        bars(
            Bars("errors", "", (Group("a", {"x": 1e-6}), Group("b", {"x": 1e-2})), logarithmic=True)
        )
    )
    lengths = [float(e.get("width", 0)) for e in shapes(small, "c0")][1:]
    assert 0 < lengths[0] < lengths[1]


def test_bars_of_nothing_but_zeros() -> None:
    for logarithmic in (False, True):
        drawn = str(bars(Bars("t", "u", (Group("a", {"x": 0.0}),), logarithmic=logarithmic)))
        assert ElementTree.fromstring(drawn) is not None


def test_colours_are_shared() -> None:
    one = Bars("a", "", (Group("g", {"flex": 1.0}),), palette=("kgen", "flex"))
    assert one.series == ("flex",)
    assert 'class="c1"' in str(bars(one))


def test_what_is_drawn_is_escaped() -> None:
    hostile = '</svg><script>"&'
    for drawn in (
        str(bars(Bars(hostile, hostile, (Group(hostile, {hostile: 1.0}),)))),
        str(grid(Grid(("#",), (1, 1), 1, hostile))),
    ):
        root = ElementTree.fromstring(drawn)
        assert not [e for e in root.iter() if e.tag.endswith("script")]
        assert hostile in "".join(root.itertext())
