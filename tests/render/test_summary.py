"""Opening of emitted files: one sentence, for any summary."""

from __future__ import annotations

import ast

import pytest

from kgen.diagnostics import KgenError
from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.targets.launching import FILENAME

SPECS = {
    "attention": "head_dim: 64\ntargets: {triton: {}}\n",
    "norm": "norm: rms\nwidth: 64\ntargets: {triton: {}, cuda: {}}\n",
    "chunk_output": "head_dim: 64\ntargets: {triton: {}, cute: {}}\n",
    "linear_attention": "head_dim: 64\n",
}

OF_LAUNCHER = " These functions launch the kernels of cuda.cu from C and C++ programs."
"""The sentence that follows the summary in cuda_launch.cu."""


def sentences(kernel: str, summary: str) -> set[str]:
    """Yield the first line of every file, and of the docstring of every function with the name of
    the spec.
    """
    text = f"kernel: {kernel}\nname: sample\ndtype: bf16\n{summary}{SPECS[kernel]}"
    found = set()
    for name, source in render_spec(loads(text, "sample.yaml")).items():
        if name == FILENAME:
            continue  # this file is the same in all folders
        if not name.endswith(".py"):
            _, _, body = source.partition("// body (hash of the text below): ")
            first = next(line for line in body.splitlines()[1:] if line).removeprefix("// ")
            found.add(first.removesuffix(OF_LAUNCHER))
            continue
        tree = ast.parse(source)
        named = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "sample"]
        found |= {str(ast.get_docstring(node)).splitlines()[0] for node in [tree, *named]}
    return found


@pytest.mark.parametrize("kernel", SPECS)
@pytest.mark.parametrize(
    "summary", ["", 'summary: ""\n', 'summary: "  "\n', "summary: ...\n", "summary: >\n\n"]
)
def test_a_spec_without_a_summary(kernel: str, summary: str) -> None:
    assert sentences(kernel, summary) == {f"The {kernel.replace('_', ' ')} `sample`."}


@pytest.mark.parametrize("kernel", SPECS)
@pytest.mark.parametrize(
    ("summary", "sentence"),
    [
        ("summary: Of one line\n", "Of one line."),
        ("summary: Of one line.\n", "Of one line."),
        ("summary: '  Is it fast? '\n", "Is it fast?"),
        ("summary: >\n  Of two\n  lines.\n", "Of two lines."),
    ],
)
def test_a_summary_is_a_sentence(kernel: str, summary: str, sentence: str) -> None:
    assert sentences(kernel, summary) == {sentence}


def test_a_summary_of_several_lines_is_refused() -> None:
    with pytest.raises(KgenError, match="cannot contain this summary"):
        sentences("norm", "summary: |\n  One.\n  Two.\n")
