"""A buffer or param of a spec may have any name that the harness uses for its own values."""

from __future__ import annotations

import ast
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from kgen.diagnostics import KgenError
from kgen.spec.load import loads
from kgen.verify.families import family_of, problem_of

ROOT = Path(__file__).resolve().parents[2]
ATTENTION = """kernel: attention
name: sample
dtype: fp32
head_dim: 8
buffers:
  one: {shape: [HQ], dtype: fp32, grad: true}
params:
  two: {type: float, runtime: true}
score_mod: score + one[h] * two * (kv_idx - q_idx)
"""
NORM = """kernel: norm
name: sample
norm: rms
width: 24
dtype: fp32
buffers:
  one: {shape: [WIDTH], dtype: fp32, grad: true}
params:
  two: {type: float, runtime: true}
output_mod: y * one * two
"""


def words(family: str) -> list[str]:
    """Return every identifier that is quoted, or names a keyword argument, in the harness of a
    family.
    """
    files = [*ROOT.glob("kgen/verify/*.py"), *ROOT.glob(f"kgen/kernels/{family}/verify/*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    found = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    found |= {str(node.arg) for node in nodes if isinstance(node, ast.keyword)}
    return sorted(word for word in found if word.isidentifier())


@cache
def free(text: str, family: str) -> tuple[list[str], list[str]]:
    """Return the names that a spec may use for a buffer, and those for a param."""

    def fits(old: str, new: str) -> bool:
        try:
            loads(text.replace(old, new), "sample.yaml")
        except KgenError:
            return False
        return True

    found = [word for word in words(family) if word == word.lower()]
    buffers = [word for word in found if fits("one", word)]
    return buffers, [word for word in found if fits("two", word)]


def results(text: str, family: str, buffer: str, param: str) -> list[torch.Tensor]:
    problem: Any = problem_of(
        loads(text.replace("one", buffer).replace("two", param), "sample.yaml")
    )
    if family == "attention":
        from kgen.kernels.attention.verify.cases import references
        from kgen.kernels.attention.verify.inputs import Case, differentiable, draw

        inputs = draw(problem, Case("small", 3, 5, group=2), "cpu")
        wanted = differentiable(problem, inputs)
        found = references(problem, inputs, tuple(wanted))
        outputs = [x for one in found for x in (one.out, one.lse, *one.grads.values())]
    else:
        from kgen.kernels.norm.verify.cases import _references
        from kgen.kernels.norm.verify.inputs import Case, differentiable, draw

        inputs = draw(problem, Case("small", 24, (3,)), "cpu")
        wanted = differentiable(problem, inputs)
        found = _references(problem, inputs, True)
        outputs = [x for one in found for x in (*one.outputs.values(), *one.grads.values())]
    assert inputs.tensors[buffer] is wanted[buffer]
    assert list(inputs.runtime) == [param]
    assert family_of(problem)
    return outputs


@pytest.mark.parametrize(
    ("family", "text"),
    [pytest.param("attention", ATTENTION, marks=pytest.mark.thorough), ("norm", NORM)],
)
def test_words_of_the_harness_are_names_like_others(family: str, text: str) -> None:
    buffers, params = free(text, family)
    assert len(buffers) > 50
    want = results(text, family, "one", "two")
    for buffer, param in zip_longest(buffers, params[1:] + params[:1], fillvalue="two"):
        if buffer != param:
            got = results(text, family, buffer, param)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (buffer, param)
