"""Packed sequences that end before their tensors: the cases of every packed spec include them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.kernels.attention.verify.inputs import cases as attention_cases
from kgen.kernels.chunk_output.verify.inputs import cases as chunk_cases
from kgen.kernels.chunk_output.verify.inputs import draw
from kgen.kernels.linear_attention.verify.inputs import cases as linear_cases
from kgen.spec.load import load
from kgen.verify.families import problem_of

SPECS = [
    path for path in sorted(Path("specs").glob("*.yaml")) if "varlen: true" in path.read_text()
]


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_some_tokens_are_after_the_last_sequence(path: Path) -> None:
    loaded = load(path)
    problem = problem_of(loaded)
    if loaded.spec.kernel == "attention":
        assert any(min(case.tail) > 0 for case in attention_cases(problem, quick=True))
        return
    if loaded.spec.kernel == "linear_attention":
        assert any(case.tail > 0 for case in linear_cases(problem, quick=True))
        return
    tails = [case for case in chunk_cases(problem, quick=True) if case.tail]
    # Tails of three lengths: no chunk at all, less than the chunks hold, and several times as much.
    room = [
        sum(-(-n // problem.chunk_size) for n in case.lengths) * problem.chunk_size
        for case in tails
    ]
    assert any(not n for n in room)
    assert any(case.tail < n for case, n in zip(tails, room, strict=True))
    assert any(case.tail > 2 * n for case, n in zip(tails, room, strict=True) if n)
    inputs = draw(problem, tails[0], "cpu")
    assert inputs.tensors["q"][:, -tails[0].tail :].isnan().all()
    assert inputs.do[:, -tails[0].tail :].isnan().all()


def test_three_families_have_packed_specs() -> None:
    found = {load(path).spec.kernel for path in SPECS}
    assert found == {"attention", "chunk_output", "linear_attention"}
