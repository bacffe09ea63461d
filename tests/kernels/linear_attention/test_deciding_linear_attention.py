"""In the quick cases of linear_attention, every comparison of an expression is both true and false.

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
from kgen.kernels.linear_attention.spec import FIELDS, values
from kgen.kernels.linear_attention.verify.inputs import Inputs, cases, draw
from kgen.kernels.linear_attention.verify.problem import Problem, problem_of
from kgen.kernels.linear_attention.verify.reference import linear_attention
from kgen.spec.load import load, loads
from kgen.verify.deciding import decided, decisions

ROOT = Path(__file__).resolve().parents[3]
SPECS = of_family("linear_attention", [*sorted((ROOT / "specs").glob("*.yaml")), *CORNERS])


def undecided(problem: Problem) -> list[str]:
    """Return the decisions that are constant in all quick cases."""
    trees = {f: values(tree) for f in FIELDS if (tree := getattr(problem, f)) is not None}
    left = {(field, node): {0, 1} for field, tree in trees.items() for node in decisions(tree)}
    for case in cases(problem, True) if left else ():
        if not sum(case.lengths):
            continue
        inputs = draw(problem, case, "cpu")
        for (field, node), ways in left.items():
            ways -= _ways(problem, field, trees[field], node, inputs)
    return [f"{field}: {show(node)}" for (field, node), ways in left.items() if ways]


def _ways(problem: Problem, field: str, tree: Node, node: Node, inputs: Inputs) -> set[int]:
    """Return the outcomes of a decision at the tokens of one case, without those after the last
    sequence.
    """
    tensors = inputs.tensors
    live = slice(None, tensors["q"].shape[1] - inputs.case.tail)
    if field in ("q_map", "k_map"):
        x = tensors[field[0]][:, live].detach()
        return decided(tree, node, {"x": x}, tuple(x.shape), torch.ones(x.shape, dtype=torch.bool))
    B, _, HV, V = tensors["v"].shape
    columns = V if field in ("skip", "output_gate", "output") else problem.head_qk
    shape = (B, len(range(tensors["q"].shape[1])[live]), HV, columns)
    env: dict[str, Any] = {"h": torch.arange(HV)[:, None], "c": torch.arange(columns)}
    env |= {"H": tensors["q"].shape[2], "HV": HV, "v": tensors["v"][:, live].detach()}
    if field == "output":
        normed = linear_attention(replace(problem, output=None), tensors, inputs.call(problem))
        env["o"] = normed.o[:, live]
    for buffer in problem.buffers:
        x = tensors[buffer.name].detach()
        x = x[:, live] if buffer.tokens else x
        env[buffer.name] = x if buffer.shape[-1] in ("K", "V") else x[..., None]
    return decided(tree, node, env, shape, torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_quick_cases_decide_both_ways(path: Path) -> None:
    assert undecided(problem_of(load(path))) == []


def test_a_decision_without_a_case_is_found() -> None:
    text = (
        "kernel: linear_attention\nname: sample\ndtype: bf16\nhead_dim: 64\n"
        "buffers: {g: {shape: [T, HV], dtype: fp32}}\n"
        "decay: where(g[t, h] > 123456, -1, -abs(g[t, h]))\n"
    )
    assert undecided(problem_of(loads(text, "sample.yaml"))) == ["decay: g > 123456"]


@pytest.mark.parametrize(("bound", "left"), [("0.5", []), ("50", ["output: o > 50"])])
def test_decisions_of_the_output(bound: str, left: list[str]) -> None:
    text = (
        "kernel: linear_attention\nname: sample\ndtype: bf16\nhead_dim: 64\nchunk_size: 16\n"
        f"output_norm: rms\noutput: where(o > {bound}, o, 2 * o)\n"
    )
    assert undecided(problem_of(loads(text, "sample.yaml"))) == left
