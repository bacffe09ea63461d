"""In the quick cases of chunk_output, every comparison of the decay is both true and false.

The full cases include the quick ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.against_float64 import CORNERS, of_family

from kgen.expr.nodes import Node, substitute
from kgen.expr.unparse import show
from kgen.kernels.chunk_output.verify.inputs import cases, draw
from kgen.kernels.chunk_output.verify.problem import Problem, problem_of
from kgen.kernels.chunk_output.verify.reference import VALUES
from kgen.spec.load import load
from kgen.verify.deciding import decided, decisions

ROOT = Path(__file__).resolve().parents[3]
SPECS = of_family("chunk_output", [*sorted((ROOT / "specs").glob("*.yaml")), *CORNERS])


def undecided(problem: Problem) -> dict[Node, set[int]]:
    """Return the decisions that are constant in all quick cases, with the missing outcomes."""
    if problem.decay is None:
        return {}
    tree = substitute(problem.decay, VALUES)
    left = {node: {0, 1} for node in decisions(tree)}
    for case in cases(problem, True) if left else ():
        if not any(case.lengths):
            continue
        inputs = draw(problem, case, "cpu")
        t, chunks = inputs.tensors, inputs.chunks
        H, HV = t["q"].shape[2], t["h"].shape[2]
        i = torch.arange(problem.chunk_size)
        env: dict[str, Any] = {"i": i, "h": torch.arange(HV)[:, None], "H": H, "HV": HV}
        env |= {"g": t["g"][chunks.batch[:, None], chunks.rows].transpose(1, 2)} if "g" in t else {}
        env |= {"g_gamma": t["g_gamma"][:, None]} if "g_gamma" in t else {}
        shape = (len(chunks.batch), HV, problem.chunk_size)
        for node in left:
            left[node] -= decided(tree, node, env, shape, chunks.live[:, None].expand(shape))
    return {node: ways for node, ways in left.items() if ways}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_quick_cases_decide_both_ways(path: Path) -> None:
    found = [show(node) for node in undecided(problem_of(load(path)))]
    assert not found, f"no case decides {found}"


def of_decay(tmp_path: Path, decay: str) -> Problem:
    path = tmp_path / "x.yaml"
    path.write_text(
        "kernel: chunk_output\nname: x\ndtype: bf16\nhead_dim: 64\nchunk_size: 64\n"
        f"decay: {decay}\n"
    )
    return problem_of(load(path))


@pytest.mark.parametrize(
    "decay",
    [
        "where(h > 6, g[i], 2 * g[i])",
        "where(i >= 40, g[i], 0)",
        "max(g[i], -20.0)",
        "where(g[i] < -1, -h, 0)",
    ],
)
def test_gates_and_heads_are_drawn_for_comparisons(decay: str, tmp_path: Path) -> None:
    assert undecided(of_decay(tmp_path, decay)) == {}


def test_what_decides_nothing_is_named(tmp_path: Path) -> None:
    ((node, ways),) = undecided(of_decay(tmp_path, "where(i > 64, 2 * g[i], g[i])")).items()
    assert show(node) == "i > 64"
    assert ways == {0}
