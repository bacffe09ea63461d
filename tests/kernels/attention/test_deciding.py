"""In the quick cases of stock specs, every comparison of mask and score is both true and false.

The full cases include the quick ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.interpreters.against_float64 import CORNERS, of_family

from kgen.expr.nodes import variables
from kgen.expr.unparse import show
from kgen.kernels.attention.verify.deciding import shapes_that_decide, ways_taken
from kgen.kernels.attention.verify.inputs import cases, draw
from kgen.kernels.attention.verify.problem import problem_of
from kgen.spec.load import load
from kgen.verify.deciding import decisions

ROOT = Path(__file__).resolve().parents[3]
STOCK = of_family("attention", sorted((ROOT / "specs").glob("*.yaml")))


def undecided(problem):
    """Return the decisions that are constant in all quick cases, with the missing outcomes."""
    left = {node: {0, 1} for tree in problem.trees for node in decisions(tree)}
    named = set().union(*(variables(tree) for tree in problem.trees))
    for case in sorted(cases(problem, True), key=lambda case: case.sq * case.sk):
        if not (left := {node: ways for node, ways in left.items() if ways}):
            break
        inputs = draw(problem, case, "cpu")
        scores = torch.randn(case.sq, case.sk, generator=torch.Generator().manual_seed(0))
        offsets = case.cu_seqlens if case.packed else None
        for b in range(case.sizes["B"] if case.packed or problem.per_batch or "b" in named else 1):
            sq, sk = case.packed[b] if offsets else (case.sq, case.sk)
            length = int(inputs.cache["kv_lens"][b]) if problem.per_batch else sk
            first = length - sq if problem.aligned_to_end else 0
            env = {
                **case.sizes,
                **inputs.params,
                **inputs.buffers,
                **inputs.cache,
                "b": b,
                "SQ": sq,
                "SK": sk,
            }
            for h in range(case.sizes["HQ"] if "h" in named else 1):
                for node in left:
                    if left[node]:
                        positions = first + torch.arange(sq), torch.arange(length)
                        given = env | {"h": h, "score": scores[:sq, :length]}
                        left[node] = left[node] - ways_taken(problem, node, given, *positions)
    return {node: ways for node, ways in left.items() if ways}


VACUOUS = {"ends_by_head": "b >= 0"}
"""Conditions that hold in every call. The specs contain them because kernels drop them."""


@pytest.mark.parametrize(
    "path", [*STOCK, *of_family("attention", CORNERS)], ids=lambda path: path.stem
)
def test_quick_cases_decide_both_ways(path):
    loaded = load(path)
    found = {show(node) for node in undecided(problem_of(loaded))}
    assert found == {VACUOUS[path.stem]} if path.stem in VACUOUS else not found, (
        f"no case decides {found}"
    )


def test_what_decides_nothing_is_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "kernel: attention\nname: x\ndtype: bf16\nhead_dim: 64\n"
        "mask_mod: q_idx >= kv_idx and q_idx + kv_idx >= 0\n"
    )
    assert [show(node) for node in undecided(problem_of(load(path)))] == ["q_idx + kv_idx >= 0"]


def test_lengths_follow_the_constants(tmp_path):
    path = tmp_path / "x.yaml"
    for window, queries in ((100, 0), (3000, 3197), (10_000, 10_197)):
        path.write_text(
            "kernel: attention\nname: x\ndtype: bf16\nhead_dim: 64\n"
            f"mask_mod: q_idx >= kv_idx and q_idx - kv_idx < {window}\n"
        )
        shapes = shapes_that_decide(problem_of(load(path)))
        assert (
            not shapes if not queries else abs(shapes[0][0] - queries) <= 32 and shapes[0][1] > 128
        )
