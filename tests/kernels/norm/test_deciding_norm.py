"""In the quick cases of norms, every comparison of their expressions is both true and false.

The full cases include the quick ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.against_float64 import CORNERS, of_family

from kgen.expr.nodes import Node
from kgen.expr.unparse import show
from kgen.kernels.norm.verify.inputs import cases, draw
from kgen.kernels.norm.verify.problem import Problem, problem_of
from kgen.kernels.norm.verify.reference import exact
from kgen.spec.load import load
from kgen.verify.deciding import decided, decisions

ROOT = Path(__file__).resolve().parents[3]
SPECS = of_family("norm", [*sorted((ROOT / "specs").glob("*.yaml")), *CORNERS])


def undecided(problem: Problem) -> dict[Node, set[int]]:
    """Return the decisions that are constant in all quick cases, with the missing outcomes."""
    trees = [tree for tree in (problem.input_mod, problem.output_mod) if tree is not None]
    left = {node: {0, 1} for tree in trees for node in decisions(tree)}
    plain = replace(problem, output_mod=None, quantize=None)
    rows = {o.name for o in problem.operands if o.along == "row"}
    for case in cases(problem, True) if left else ():
        inputs = draw(problem, case, "cpu")
        env: dict[str, Any] = {
            n: t[..., None] if n in rows else t for n, t in inputs.operands.items()
        }
        env |= {**inputs.params, "inf": torch.inf}
        env["y"] = exact(plain, inputs.operands, eps=inputs.eps, params=inputs.params).outputs[
            "out"
        ]
        shape = inputs.operands["x"].shape
        for tree in trees:
            for node in decisions(tree):
                left[node] -= decided(tree, node, env, shape, torch.ones(shape, dtype=torch.bool))
    return {node: ways for node, ways in left.items() if ways}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_quick_cases_decide_both_ways(path: Path) -> None:
    found = [show(node) for node in undecided(problem_of(load(path)))]
    assert not found, f"no case decides {found}"


def of_kinds(tmp_path: Path, condition: str) -> Problem:
    path = tmp_path / "kinds.yaml"
    declared = {
        "ids": "buffers: {ids: {shape: [ROWS], dtype: int32}}\n",
        "level": "params: {level: {type: int, runtime: true}}\n",
    }
    path.write_text(
        "kernel: norm\nname: kinds\nnorm: rms\nwidth: any\ndtype: bf16\n"
        f"output_mod: where({condition}, -y, y)\n"
        + "".join(declared[n] for n in declared if n in condition)
    )
    return problem_of(load(path))


@pytest.mark.parametrize(
    "condition", ["ids > 2", "ids % 7 == 5", "level <= 300", "max(ids, 77) % 2 == 1", "y > 0.5"]
)
def test_integers_are_drawn_about_constants(condition: str, tmp_path: Path) -> None:
    assert undecided(of_kinds(tmp_path, condition)) == {}


def test_what_decides_nothing_is_named(tmp_path: Path) -> None:
    ((node, ways),) = undecided(of_kinds(tmp_path, "ids * ids < 0")).items()
    assert show(node) == "ids * ids < 0"
    assert ways == {0}
