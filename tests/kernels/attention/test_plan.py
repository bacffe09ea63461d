"""Decisions of attention plans about buffers."""

from __future__ import annotations

import pytest

from kgen.expr.softmax_form import Q_START
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.model import SQ, AttentionPlan
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.spec.load import loads

HEAD = "kernel: attention\nname: n\ndtype: bf16\nhead_dim: 128\npasses: [forward, backward]\n"


def plan(more: str) -> AttentionPlan:
    return plan_attention(loads(HEAD + more, "n.yaml"))


@pytest.mark.parametrize(("shape", "mask"), [("[SQ]", "search"), ("[64]", "scan")])
def test_a_sorted_buffer_that_may_be_too_short_is_not_searched(shape: str, mask: str) -> None:
    more = f"block_mask: never\nbuffers: {{doc: {{shape: {shape}, dtype: int32, sorted: true}}}}\n"
    assert plan(more + "mask_mod: doc[q_idx] == doc[kv_idx]\n").problem.mask == mask


@pytest.mark.parametrize(("dtype", "words"), [("bool", 0), ("int32", 1), ("int64", 2)])
def test_what_is_read_for_each_pair_takes_shared_memory(dtype: str, words: int) -> None:
    of = "" if dtype == "bool" else " > 0"
    more = f"block_mask: never\nbuffers: {{t: {{shape: [64], dtype: {dtype}}}}}\n"
    found = plan(f"{more}mask_mod: q_idx >= kv_idx and t[abs(q_idx - kv_idx)]{of}\n")
    assert found.problem.tile_reads == words


@pytest.mark.parametrize(("lists", "inside"), [("never", True), ("always", False)])
def test_a_tile_of_a_listed_block_may_begin_past_the_end(lists: str, inside: bool) -> None:
    ranges = plan(f"block_mask: {lists}\nmask_mod: (q_idx * kv_idx) % 3 == 0\n").index_ranges
    assert ranges.below(Q_START, SQ) == inside
    assert ranges.not_negative(Q_START)


def test_a_derivative_has_a_name_of_its_own() -> None:
    more = "buffers: {w: {shape: [SQ, SK], dtype: fp32, grad: true}}\n"
    found = plan(f"{more}score_mod: score + w[q_idx, kv_idx] * (kv_idx - q_idx) + exp2(-h)\n")
    (pair,) = found.pairs
    assert "d_w" in pair.program.results
    assert not {"d_w", "d_w_tile"} & {binding.name for binding in pair.program.bindings}


def test_promises_are_taken_back() -> None:
    promised = loads(
        f"{HEAD}lengths: {{q: {{multiple_of: 128}}, kv: {{multiple_of: 256}}}}\n", "n.yaml"
    )
    free = without_promises(promised)
    assert plan_attention(promised).forward.masked is False
    assert plan_attention(free).forward.masked is True
    assert free.spec.lengths == loads(HEAD, "n.yaml").spec.lengths
