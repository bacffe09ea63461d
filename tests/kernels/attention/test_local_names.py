"""Local names of a spec become names in the kernels, and change nothing else."""

from __future__ import annotations

import ast
from itertools import count

import pytest

from kgen.render.rendering import render_spec
from kgen.spec.load import loads

HEAD = """kernel: attention
name: sample
dtype: bf16
head_dim: 64
buffers:
  slopes: {shape: [HQ], dtype: fp32}
params: {cap: 20.0, width: 64}
"""
WITH_NAMES = (
    HEAD
    + """score_mod: |
  capped = cap * tanh(score / cap)
  steepness = slopes[h] * 2
  capped + steepness * (kv_idx - q_idx)
mask_mod: |
  q_line = q_idx // width
  kv_line = kv_idx // width
  mask = q_line - kv_line
  abs(mask) <= 3 and abs(q_idx % width - kv_idx % width) <= 3
"""
)
WITHOUT = (
    HEAD
    + """score_mod: cap * tanh(score / cap) + slopes[h] * 2 * (kv_idx - q_idx)
mask_mod: |
  abs(q_idx // width - kv_idx // width) <= 3 and abs(q_idx % width - kv_idx % width) <= 3
"""
)


class _Numbered(ast.NodeTransformer):
    """Replace names by numbers in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}
        self.next = count()

    def number(self, name: str) -> str:
        return self.numbers.setdefault(name, f"n{next(self.next)}")

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.number(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self.number(node.arg), node.annotation)


def kernels(text: str, file: str) -> list[ast.FunctionDef]:
    """Return the Triton functions of a file."""
    tree = ast.parse(render_spec(loads(text, "sample.yaml"))[file])
    return [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.decorator_list]


def operations(functions: list[ast.FunctionDef]) -> list[str]:
    return [ast.dump(_Numbered().visit(function)) for function in functions]


def stored(functions: list[ast.FunctionDef]) -> set[str]:
    names = (n for f in functions for n in ast.walk(f) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Store)}


def test_kernels_have_the_names_of_the_spec() -> None:
    found = stored(kernels(WITH_NAMES, "triton.py"))
    assert {"q_line", "kv_line"} <= found
    assert not {"q_line", "kv_line"} & stored(kernels(WITHOUT, "triton.py"))


@pytest.mark.parametrize("align", ["", "align: end\n"])
def test_names_change_no_operation(align: str) -> None:
    assert operations(kernels(WITH_NAMES + align, "triton.py")) == operations(
        kernels(WITHOUT + align, "triton.py")
    )
