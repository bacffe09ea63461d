"""All mods of attn-gym: each is imported, rendered and verified, or refused for a reason.

Makes the page.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pointwise_table
import public_patterns
import pytest
import torch
from gym_table import ACCEPTED, HELPERS, REFUSED, tensors
from oracle import captured, expected, got, same
from pattern_table import MASKS, SCORES
from support.interpreters.against_float64 import assert_right

from kgen.cli import app
from kgen.flex.importing import Options, imported
from kgen.flex.writing import settled

gym = pytest.importorskip("attn_gym.masks")
mods = pytest.importorskip("attn_gym.mods")

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/import-coverage.md"
MODULES = {"mask_mod": gym, "score_mod": mods}
SAMPLE = (
    "generate_sandwich_bias(4, 64)",
    "generate_activation_score_mod()",
)
"""The mods whose kernels run at every change."""


class ByName(ast.NodeTransformer):
    """Replace `name := shape` in an EXPR by the tensor of that name."""

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        return ast.Name(node.target.id, ast.Load())


def function_of(field: str, text: str) -> Any:
    scope = vars(MODULES[field]) | {"torch": torch, **tensors()}
    return eval(ast.unparse(ByName().visit(ast.parse(text))), scope)


def test_nothing_is_left_out() -> None:
    """Every function of the package that is a mod or returns one."""
    asked = " ".join(text for _, text in (*ACCEPTED, *REFUSED))
    for module in MODULES.values():
        known = {
            n
            for n, value in vars(module).items()
            if callable(value) and not isinstance(value, type)
        }
        assert {name for name in known - HELPERS if name not in asked} == set()


def test_most_are_imported() -> None:
    assert len(ACCEPTED) >= 0.9 * (len(ACCEPTED) + len(REFUSED))
    assert len(ACCEPTED) + len(MASKS) + len(SCORES) >= 0.97 * (
        len(ACCEPTED) + len(MASKS) + len(SCORES) + len(REFUSED)
    )


@pytest.mark.parametrize(("field", "text"), ACCEPTED)
def test_means_the_same(field: str, text: str) -> None:
    spec = imported(MODULES[field].__name__, {field: text}, Options(name="pattern"))
    _, loaded = settled(spec, "pattern.yaml")
    function = function_of(field, text)
    known = tensors() | captured(function)
    same(got(loaded, field, known), expected(function, field), 1e-6)


@pytest.mark.parametrize(("field", "text"), REFUSED)
def test_is_refused(
    field: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    option = f"--{field.removesuffix('_mod')}"
    with pytest.raises(SystemExit) as caught:
        app(["import", MODULES[field].__name__, option, text], prog_name="kgen")
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(REFUSED[field, text][1])
    assert not list(tmp_path.iterdir())


def text_of(source: str, field: str, text: str) -> str:
    spec = imported(source, {field: text}, Options(name="pattern", head_dim=16))
    return settled(spec, "pattern.yaml")[0]


def verified(source: str, field: str, text: str) -> None:
    """Import, render and verify as a user does: forward and backward."""
    Path("pattern.yaml").write_text(text_of(source, field, text))
    verify = ["verify", "pattern.yaml", "--device", "cpu", "--quick"]
    for command in (["render", "pattern.yaml"], verify):
        run = subprocess.run(
            [sys.executable, "-m", "kgen", *command], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


@pytest.mark.parametrize(("field", "text"), [row for row in ACCEPTED if row[1] in SAMPLE])
def test_a_sample_of_kernels(field: str, text: str, tmp_path: Path, verdict: Any) -> None:
    path = tmp_path / "pattern.yaml"
    path.write_text(text_of(MODULES[field].__name__, field, text))
    assert_right(path, tmp_path, verdict, 9)


@pytest.mark.thorough
@pytest.mark.parametrize(("field", "text"), ACCEPTED)
def test_kernels(field: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    verified(MODULES[field].__name__, field, text)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("field", "text"),
    [*(("mask_mod", text) for text in MASKS), *(("score_mod", text) for text in SCORES)],
)
def test_kernels_of_patterns(
    field: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verified(str(HERE / "patterns.py"), field, text)


# --- the page ------------------------


def cell(text: str) -> str:
    return f"<code>{text}</code>".replace("|", "&#124;")


def block(texts: Iterable[str]) -> list[str]:
    """A block of code with the texts, several on a line."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + len(text) < 97:
            lines[-1] += f", {text}"
        else:
            lines += [text]
    return ["```text", *(f"{line}," for line in lines[:-1]), lines[-1], "```"]


def rows(module: ModuleType) -> list[str]:
    """The table of one module."""
    lines = ["| EXPR | result |", "|---|---|"]
    fields = [field for field, own in MODULES.items() if own is module]
    lines += [f"| {cell(text)} | verified |" for field, text in ACCEPTED if field in fields]
    lines += [
        f"| {cell(text)} | refused: {why} |"
        for (field, text), (why, _) in REFUSED.items()
        if field in fields
    ]
    return lines


def elements() -> list[str]:
    """The section about pointwise functions, with the reasons for those that are refused."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in pointwise_table.REFUSED.items():
        by_reason.setdefault(reason, []).append(cell(name))
    table = [f"| {', '.join(found)} | {reason} |" for reason, found in by_reason.items()]
    title = "## Functions of elements"
    intro = [
        (
            "kgen reads these pointwise operators of torch and activations of "
            "`torch.nn.functional`. They have"
        ),
        "torch's values:",
    ]
    series = ", ".join(map(cell, pointwise_table.SERIES))
    series = [
        "Kernels compute some functions as a series:",
        "",
        "| functions | relative error | relative error of the gradient |",
        "|---|---|---|",
        f"| {series} | below 1.2e-7 | below 1e-5 |",
    ]
    names = block(sorted(pointwise_table.accepted()))
    refused = ["| refused | reason |", "|---|---|", *table]
    return [title, "", *intro, "", *names, "", *series, "", *refused, ""]


def public() -> list[str]:
    """The section about public models and articles, with the reasons for those that are refused."""
    table = [f"| {name} | {row[3]} |" for name, row in public_patterns.REFUSED.items()]
    intro = [
        (
            "`tests/flex/public_patterns.py` has functions in the style of public models and "
            "articles. kgen"
        ),
        "reads these, and the specs have the values of the Python functions:",
    ]
    return [
        "## Public models and articles",
        "",
        *intro,
        "",
        *block(public_patterns.READ),
        "",
        "| refused | reason |",
        "|---|---|",
        *table,
        "",
    ]


def test_the_page_is_current() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- coverage -->\n")
    _, _, after = rest.partition("<!-- end -->\n")
    parts = []
    for title, module in (("Masks", gym), ("Score mods", mods)):
        parts += [f"## {title} of attn-gym", "", *rows(module), ""]
    for title, texts in (("Masks", MASKS), ("Score mods", SCORES)):
        parts += [f"## {title} of FlexAttention's tests, transformers and the field", ""]
        parts += ["The functions are in `tests/flex/patterns.py`:", "", *block(texts), ""]
    parts += public()
    parts += elements()
    wanted = before + "<!-- coverage -->\n\n" + "\n".join(parts) + "<!-- end -->\n" + after
    if os.environ.get("KGEN_UPDATE_GOLDEN"):
        PAGE.write_text(wanted, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == wanted
