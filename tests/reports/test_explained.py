"""`kgen explain` as a page, of a spec of every family."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kgen.cli import app
from kgen.pages.markdown import markdown
from kgen.pages.model import Drawing
from kgen.render.rendering import excerpts
from kgen.reports.explained import INNER_LOOP, explained
from kgen.reports.html import anchor, html
from kgen.reports.record import record
from kgen.spec.load import load, loads
from kgen.verify import ledger

ROOT = Path(__file__).resolve().parents[2]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
ALWAYS = ["Files", "The inner loop, as emitted", "The spec"]
SECTIONS = {
    "causal_alibi": [
        "Formula",
        "As read",
        "Softmax",
        "Where it is computed, in the forward kernel",
        "Operations for each (query, key)",
        "Tiles that are visited",
        "Tiles of queries (down) by keys (across)",
        "Gradients",
        "Sizes of tiles",
        "Kernels by chip",
        *ALWAYS,
    ],
    "layer_norm": [
        "Forward, for each row",
        "Backward, for each row",
        "Gradients",
        "Operations for each element",
        *ALWAYS,
    ],
    "gated_delta_output": [
        "Formula",
        "Decay",
        "Operations for each token of a head",
        "Memory",
        "Gradients",
        "Sizes of tiles",
        *ALWAYS,
    ],
}


class Read(HTMLParser):
    """Parser that collects elements with their attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_harmless(text: str) -> Read:
    """Check that a page has no script, loads nothing, and links only to itself."""
    page = Read(text)
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "h1",
        "p",
        "nav",
        "a",
        "main",
        "section",
    }
    allowed |= {
        "h2",
        "ul",
        "li",
        "span",
        "code",
        "pre",
        "figure",
        "figcaption",
        "div",
        "table",
        "thead",
        "tbody",
    }
    allowed |= {"tr", "th", "td", "svg", "rect", "line", "text"}
    assert {tag for tag, _ in page.elements} <= allowed
    for tag, attributes in page.elements:
        assert not [
            name
            for name in attributes
            if name.startswith("on") or name in ("src", "srcset", "action")
        ]
        assert tag != "a" or (attributes["href"] or "").startswith("#")
    policy = dict(page.elements)["meta"]
    assert any(
        "default-src 'none'" in (a.get("content") or "")
        for tag, a in page.elements
        if tag == "meta"
    ), policy
    for said in ("url(", "@import", "http://", "https://"):
        assert said not in text.replace("http://www.w3.org/2000/svg", "")
    return page


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_is_there(name: str) -> None:
    loaded = load(ROOT / f"specs/{name}.yaml")
    page = explained(loaded, Drawing(1024), ROOT / "generated")
    assert [section.title for section in page.sections] == SECTIONS[name]
    assert all(section.blocks for section in page.sections)
    read = assert_harmless(html(page))
    ids = {attributes.get("id") for tag, attributes in read.elements if tag == "section"}
    assert ids == {anchor(title) for title in SECTIONS[name]}
    assert all(title in read.text for title in SECTIONS[name])
    assert [line[3:] for line in markdown(page).splitlines() if line.startswith("## ")] == [
        *SECTIONS[name]
    ]


def test_what_is_said() -> None:
    page = explained(load(ROOT / "specs/causal_alibi.yaml"), Drawing(1024), ROOT / "generated")
    records = ledger.records_of(ROOT / "generated/causal_alibi/triton.py", ROOT / "generated")
    device = min(row["device"] for place, row in records.items() if place.startswith("NVIDIA"))
    said = Read(html(page)).text
    for sentence in (
        "Dropped: (q_start - q_idx) * slopes[h]",
        "Folded: score_mod is linear in the score",
        "its own kernels in Gluon",
        "dq adds up ds times keys",
        "All batches and heads have these tiles.",
        f"verified on {device}, worst relative error",
        "of 85 obligations proved",
        "none: the spec does not have targets: {cuda: {}}",
        "kv_start = kv_lo + (i + turn) % wrap * BLOCK_N",
    ):
        assert sentence in said, sentence
    longformer = explained(load(ROOT / "specs/longformer.yaml"), None, ROOT / "generated")
    assert (
        "No kernels for Hopper: the mask leaves several ranges of keys."
        in Read(html(longformer)).text
    )


def test_operations_before_and_after() -> None:
    """ALiBi has kv_idx - q_idx, its product with a slope, the sum, scale and LOG2E. The loop has
    one multiply-add.
    """
    page = explained(load(ROOT / "specs/causal_alibi.yaml"), None, ROOT / "generated")
    (table,) = [s.blocks[0] for s in page.sections if s.title.startswith("Operations")]
    rows = {row[0][0]: [cell[0] for cell in row[1:]] for row in table.rows}
    assert rows["multiply"] == ["3", "1", "1"]
    assert rows["add, subtract"] == ["2", "1", "1"]
    assert rows["read of a buffer"] == ["1", "0", "0"]
    assert rows["all"] == ["8", "5", "2"]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_loop_stands_in_the_file(path: Path) -> None:
    found = excerpts(load(path), INNER_LOOP)
    assert found
    for file, text in found:
        assert text.strip()
        emitted = (ROOT / "generated" / path.stem / file).read_text(encoding="utf-8")
        # A file may break a line that an excerpt does not, because it is indented further.
        packed = ["".join(one.split()).replace(",)", ")") for one in (text, emitted)]
        assert packed[0] in packed[1]


HOSTILE = (
    "<script>alert(1)</script> </style> <img src=x onerror=alert(1)> {{ 7 * 7 }} &amp; ]]> "
    "javascript:1"
)


@pytest.mark.parametrize(
    "spec",
    [
        (
            "kernel: attention\ndtype: bf16\nhead_dim: 64\nscore_mod: |\n  # {0}\n  score * 2\n"
            "mask_mod: q_idx >= kv_idx\n"
        ),
        "kernel: norm\nnorm: rms\nwidth: any\ndtype: bf16\n",
        "kernel: chunk_output\ndtype: bf16\nhead_dim: 128\n",
    ],
)
def test_a_spec_is_no_markup(spec: str, tmp_path: Path) -> None:
    text = f'name: sample\nsummary: "{HOSTILE}"\nlicense: MIT\n' + spec.replace("{0}", HOSTILE)
    page = explained(loads(text, tmp_path / "<b>.yaml"), Drawing(512), tmp_path / "<i>")
    made = html(page)
    read = assert_harmless(made)
    assert read.text.count(HOSTILE) == 2 + text.count(f"# {HOSTILE}"), "the summary, and the spec"
    assert "49" not in read.text.partition("javascript:1")[0].partition("alert")[2]
    assert "\\<script>" in markdown(page)


@pytest.mark.thorough
def test_bytes_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import sys; from tests.reports.test_explained import pages; sys.stdout.write(pages())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, check=True
    )
    assert run.stdout.decode() == pages()


def pages() -> str:
    """Return the pages of one spec of each family, and their report."""
    specs = [
        load(ROOT / f"specs/{name}.yaml") for name in ("prefix_lm", "rms_norm", "retention_output")
    ]
    made = [html(explained(one, Drawing(), ROOT / "generated")) for one in specs]
    return "".join([*made, html(record(specs, ROOT / "generated", ROOT / "benchmarks"))])


def kgen(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        app([*arguments], prog_name="kgen")
    return (caught.value.code, *capsys.readouterr())


ALIBI, NORM = str(ROOT / "specs/causal_alibi.yaml"), str(ROOT / "specs/rms_norm.yaml")


@pytest.mark.parametrize(
    ("form", "begins"),
    [
        ("text", "causal_alibi: "),
        ("md", "# causal"),
        ("html", "<!DOC"),
        ("svg", "<svg"),
        ("json", "{"),
    ],
)
def test_formats(
    form: str, begins: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = kgen(capsys, "explain", ALIBI, "--format", form)
    assert (code, err) == (0, "")
    assert out.startswith(begins)
    path = tmp_path / "deep" / "page"
    assert kgen(capsys, "explain", ALIBI, "--format", form, "-o", str(path)) == (0, "", "")
    assert path.read_text(encoding="utf-8") == out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([NORM, "--format", "svg"], "error[no-picture]: kernel `norm` has no tiles to draw"),
        ([NORM, "--length", "64"], "error[no-picture]: kernel `norm` has no tiles to draw"),
        ([ALIBI, "--set", "window"], "error[usage]: `--set`: expected NAME=VALUE, got `window`"),
        (
            [ALIBI, "--set", "window=8"],
            "error[usage]: `causal_alibi` has no run-time parameter `window`",
        ),
        (
            [ALIBI, "--flex", "--format", "html"],
            "error[usage]: `--flex` cannot be combined with a drawing or a page",
        ),
        ([ALIBI, "-o", ALIBI], "error[usage]: `--output` is the file of the spec"),
    ],
)
def test_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(ALIBI).read_bytes()
    code, out, err = kgen(capsys, "explain", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(said)
    assert Path(ALIBI).read_bytes() == before
