"""Lines of emitted files have at most 120 columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.build.native import native_of
from kgen.render.environment import rendered
from kgen.render.layout import laid_out_in_c
from kgen.render.rendering import render_spec
from kgen.spec.load import load, loads
from kgen.targets.folding import COLUMNS

ROOT = Path(__file__).resolve().parents[1]


def long_lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if len(line) > COLUMNS]


def test_lines_of_emitted_files_are_not_too_long() -> None:
    files = [
        path for path in sorted((ROOT / "generated").rglob("*")) if path.suffix in (".py", ".cu")
    ]
    assert len(files) > 100
    assert {
        path: found for path in files if (found := long_lines(path.read_text(encoding="utf-8")))
    } == {}


@pytest.mark.parametrize(
    "name",
    ["broad_learned", "ends_by_head", "norm_integers", "norm_modified", "open_extents", "packed"],
)
def test_lines_of_long_operands_and_messages_are_not_too_long(name: str) -> None:
    files = render_spec(load(ROOT / f"tests/specs/{name}.yaml"))
    assert {file: found for file, text in files.items() if (found := long_lines(text))} == {}


LONG = {letter: letter * 60 for letter in "bnps"}
LONGEST = {
    "attention": """kernel: attention
name: {n}
dtype: bf16
head_dim: 64
buffers: {{{b}: {{shape: [HQ], dtype: fp32, grad: true}}, {s}: {{shape: [HQ, SK], dtype: fp32, grad: true}}}}
params: {{{p}: {{type: float, runtime: true}}}}
score_mod: score + {b}[h] * (kv_idx - q_idx) * {p} + {s}[h, kv_idx]
""",  # noqa: E501
    "norm": """kernel: norm
name: {n}
norm: layer
width: any
dtype: bf16
buffers: {{{b}: {{shape: [ROWS, WIDTH], dtype: bf16, grad: true}}}}
params: {{{p}: {{type: float, runtime: true}}}}
output_mod: tanh(y * {b}) * {p}
targets: {{triton: {{}}, cuda: {{}}}}
""",
}


@pytest.mark.parametrize("family", LONGEST)
def test_lines_of_the_longest_names_are_not_too_long(family: str) -> None:
    """A longer line is one word: a default argument of a signature in a docstring.

    The header has its own format.
    """
    files = render_spec(loads(LONGEST[family].format(**LONG), "longest.yaml"))
    for file, text in files.items():
        _, body = text.split(" body (hash of the text below): ")
        assert [line for line in long_lines(body) if " " in line.strip()] == [], file


@pytest.mark.parametrize(
    "name", ["causal_alibi", "layer_norm_wide", "linear_attention_output", "document_causal"]
)
def test_lines_of_packages_for_c_are_not_too_long(name: str) -> None:
    native = native_of(load(next((ROOT / "specs").rglob(f"{name}.yaml"))), {"heads": [16]}, [90])
    for template in (native.header, native.program, native.example):
        assert long_lines(laid_out_in_c(rendered(template))) == []


def test_lines_of_files_for_c_that_are_copied_are_not_too_long() -> None:
    files = sorted((ROOT / "templates/c").glob("*.h"))
    assert files
    assert {
        path: found for path in files if (found := long_lines(path.read_text(encoding="utf-8")))
    } == {}
