"""Tables that are read by distance have tiles of one element."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.tile_reads import asked_ahead, element_bounds
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, loads


def planned(score_mod: str) -> Loaded:
    text = (
        "kernel: attention\nname: n\ndtype: bf16\nhead_dim: 64\nbuffers:\n"
        "  table: {shape: [HQ, 16], dtype: fp32}\n"
    )
    text += "  kind: {shape: [SK], dtype: int32}\n" * ("kind" in score_mod)
    return loads(f"{text}score_mod: {score_mod}\n", "n.yaml")


@pytest.mark.parametrize(
    ("score_mod", "once", "ahead"),
    [
        ("score + table[h, min(abs(q_idx - kv_idx), 15)]", True, True),
        ("score + table[h, abs(q_idx - kv_idx) % 16]", False, True),
        # The result of another read has no bounds.
        ("score + table[h, min(kind[kv_idx] + q_idx, 15)]", False, True),
        ("score + table[h, 3]", False, False),
    ],
)
def test_plans(score_mod: str, once: bool, ahead: bool) -> None:
    loaded = planned(score_mod)
    plan = plan_attention(loaded)
    for loop in (plan.forward, plan.dq, plan.dkdv):
        assert loop is not None
        assert any(element_bounds(b, loop) for b in loop.program.bindings) == once
        assert bool(asked_ahead(loop.program.in_loop(without=("mask", "inner_live")))) == ahead
    text = next(iter(render_spec(loaded, single=True).values()))
    assert text.count("# all pairs of the tile read one element") == 3 * once
    for function in ("_forward_tiles", "_dq_tiles", "_dkdv_tiles"):
        body = text.partition(f"def {function}(")[2].partition("\n\n\n")[0]
        assert (0 < body.find("table_at = ") < body.find("qk = tl.dot")) == ahead


def test_where_the_repository_has_tiles_of_one_element() -> None:
    root = Path(__file__).resolve().parents[3]
    found = {
        p.parent.name
        for p in root.glob("generated/*/triton.py")
        if "read one element" in p.read_text()
    }
    assert found == {"relative_bias"}
