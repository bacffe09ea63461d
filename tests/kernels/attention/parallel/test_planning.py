"""Plans of work: every pair that a mask allows occurs once, and no key is sent that no range
contains.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.kernels.attention.parallel.kernel_calls import Calls, pieces
from kgen.kernels.attention.parallel.planning import (
    SHARDINGS,
    Mask,
    Plan,
    Rows,
    chosen,
    decoded,
    encoded,
    first_at_least,
    planned,
    sharded,
    work,
)
from kgen.kernels.attention.parallel.sharding import (
    Sharding,
    contiguous,
    cut,
    head_tail,
    merged,
    runs,
    without,
)

FULL = Mask(lambda SK, **_: [(0, SK)], lambda SQ, **_: [(0, SQ)], {"SQ": 10**6, "SK": 10**6})
CAUSAL = Mask(lambda q_last, **_: [(0, q_last + 1)], lambda kv_start, **_: [(kv_start, 10**6)], {})


def window(width: int, first: int = 0) -> Mask:
    """Return a mask with a window and `first` keys that all queries see."""

    def keys(q_start: int, q_last: int, **_: object) -> list[tuple[int, int]]:
        return [(0, first), (q_start - width + 1, q_last + 1)]

    def queries(kv_start: int, kv_last: int, **_: object) -> list[tuple[int, int]]:
        return [(0, 10**6)] if kv_start < first else [(kv_start, kv_last + width)]

    return Mask(keys, queries, {})


def documents(ids: list[int]) -> Mask:
    def keys(q_start: int, q_last: int, doc: Rows, **_: object) -> list[tuple[int, int]]:
        return [
            (
                first_at_least(doc, doc[q_start]),
                min(first_at_least(doc, doc[q_last] + 1), q_last + 1),
            )
        ]  # type: ignore[operator,arg-type]

    def queries(kv_start: int, kv_last: int, doc: Rows, **_: object) -> list[tuple[int, int]]:
        return [(kv_start, first_at_least(doc, doc[kv_last] + 1))]  # type: ignore[operator]

    return Mask(keys, queries, {"doc": Rows(ids)})


def allowed(mask: Mask, length: int) -> np.ndarray:
    """Return the pairs in the range of each single query."""
    pairs = np.zeros((length, length), dtype=int)
    for q in range(length):
        for lo, hi in merged(mask.keys_of(q, q + 1), 0, length):
            pairs[q, lo:hi] = 1
    return pairs


def attended(plan: Plan) -> np.ndarray:
    """Return the number of times that each pair is in the plan."""
    pairs = np.zeros((plan.q.length, plan.kv.length), dtype=int)
    for pair in plan.pairs:
        pairs[slice(*pair.q), slice(*pair.kv)] += 1
    return pairs


masks = st.one_of(
    st.just(FULL),
    st.just(CAUSAL),
    st.builds(window, st.integers(1, 40), st.integers(0, 9)),
    st.lists(st.integers(0, 5), min_size=90, max_size=90).map(sorted).map(documents),
)


@settings(max_examples=150, deadline=None)
@given(masks, st.integers(1, 90), st.integers(1, 9), st.sampled_from(SHARDINGS))
def test_every_pair_that_is_allowed_is_attended_to_once(
    mask: Mask, length: int, ranks: int, name: str
) -> None:
    sharding = sharded(name, mask, length, ranks)
    plan = planned(sharding, sharding, mask)
    pairs = attended(plan)
    assert pairs.max(initial=0) <= 1
    assert (pairs >= allowed(mask, length)).all()
    for pair in plan.pairs:  # the ranks have these rows in one piece
        assert plan.q.rows(pair.q_rank, *pair.q)
        assert plan.kv.rows(pair.kv_rank, *pair.kv)
    assert decoded(encoded(plan)) == plan
    # exactly the attended keys are sent
    for source, target in itertools.permutations(range(ranks), 2):
        there = merged([*plan.sent(source, target), *plan.shared_by(source)])
        wanted = merged(p.kv for p in plan.pairs_of(target, source))
        assert not without(wanted, there)
        assert not without(plan.sent(source, target), wanted)


@settings(max_examples=60, deadline=None)
@given(masks, st.integers(1, 90), st.integers(2, 5), st.sampled_from(SHARDINGS), st.booleans())
def test_keys_of_several_parts_are_those_of_several_calls(
    mask: Mask, length: int, ranks: int, name: str, gathered: bool
) -> None:
    sharding = sharded(name, mask, length, ranks)
    plan = planned(sharding, sharding, mask, gathered)
    for rank, other in itertools.permutations(range(ranks), 2):
        calls = (
            plan.calls(rank, back=True).rest
            if gathered
            else [(p.q, p.kv) for p in plan.pairs_of(rank, other)]
        )
        parts = np.zeros(length, int)
        for _, keys in calls:
            parts[slice(*keys)] += 1
        for keys in plan.sent(other, rank):
            assert plan.several(rank, keys) is bool(parts[slice(*keys)].max() > 1)


@settings(max_examples=60, deadline=None)
@given(masks, st.integers(1, 90), st.integers(2, 5), st.sampled_from(SHARDINGS))
def test_calls_of_gathered_keys_are_of_keys_that_are_there(
    mask: Mask, length: int, ranks: int, name: str
) -> None:
    sharding = sharded(name, mask, length, ranks)
    plan = planned(sharding, sharding, mask, gathered=True)
    for back in (False, True):
        seen = np.zeros((length, length), int)
        for rank in range(ranks):
            calls = plan.calls(rank, back)
            there = merged(
                [*sharding.parts[rank], *(x for o in range(ranks) for x in plan.sent(o, rank))]
            )
            for q, kv in calls.first + calls.rest + calls.last:
                assert plan.q.rows(rank, *q)
                assert not without([kv], there)
                seen[slice(*q), slice(*kv)] += 1
            assert not without([kv for _, kv in calls.first + calls.last], sharding.parts[rank])
            assert back or not calls.last
        assert seen.max(initial=0) <= 1
        assert (seen >= allowed(mask, length)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), st.sampled_from(SHARDINGS))
def test_every_position_is_on_one_rank(length: int, ranks: int, name: str) -> None:
    sharding = sharded(name, CAUSAL, length, ranks)
    assert sharding.ranks == ranks
    found = [x for part in sharding.parts for lo, hi in part for x in range(lo, hi)]
    assert sorted(found) == list(range(length))
    local = [sharding.local(rank) for rank in range(ranks)]
    if name == "contiguous":  # as in DTensors
        assert [n for n in local if n] == [
            len(x) for x in torch.arange(length).chunk(ranks) if len(x)
        ]
    else:
        assert max(local) - min(local) <= 2


def test_a_window_is_sent_to_the_neighbour_and_nothing_else() -> None:
    length, ranks = 131072, 8
    sharding = contiguous(length, ranks)
    plan = planned(sharding, sharding, window(1024))
    links = {(a, b): plan.sent(a, b) for a in range(ranks) for b in range(ranks) if plan.sent(a, b)}
    assert {pair: hi - lo for pair, [(lo, hi)] in links.items()} == {
        (r, r + 1): 1023 for r in range(ranks - 1)
    }
    # Only the queries within reach of the remote keys take part.
    assert {p.q[1] - p.q[0] for p in plan.pairs if p.q_rank != p.kv_rank} == {1023}


def test_a_causal_mask_is_balanced_by_head_and_tail() -> None:
    for name, most in (("contiguous", 1.75), ("head_tail", 1.01), ("by_cost", 1.01)):
        found = sharded(name, CAUSAL, 8192, 4)
        done = [sum(work(CAUSAL, 8192, *run) for run in part) for part in found.parts]
        assert max(done) / (sum(done) / 4) == pytest.approx(most, abs=0.02), name
    assert chosen(CAUSAL, 8192, 4)[0] == "head_tail"
    assert chosen(window(256), 8192, 4)[0] == "contiguous"


def test_documents_of_one_rank_send_nothing() -> None:
    sharding = contiguous(80, 4)
    assert [
        planned(sharding, sharding, documents([i // 20 for i in range(80)])).received(r)
        for r in range(4)
    ] == [0] * 4
    across = planned(sharding, sharding, documents([0] * 30 + [1] * 50))
    assert across.sent(0, 1) == [(0, 20)]
    assert across.sent(0, 2) == []


def test_what_all_need_is_sent_once() -> None:
    sharding = contiguous(4000, 4)
    plan = planned(sharding, sharding, window(10, first=16))
    assert plan.shared == ((0, (0, 16)),)
    assert plan.sent(0, 3) == []
    assert plan.received(3) == 16 + 9


def test_few_keys_that_all_need_are_gathered() -> None:
    for length, ranks, gathered in ((4 * 4096, 4, True), (4 * 4097, 4, False), (99999, 2, True)):
        sharding = head_tail(length, ranks)
        assert planned(sharding, sharding, CAUSAL).gathered is gathered
    assert not planned(contiguous(100, 1), contiguous(100, 1), CAUSAL).gathered


def test_own_keys_are_attended_to_beside_each_transfer() -> None:
    causal = planned(head_tail(400, 2), head_tail(400, 2), CAUSAL)
    head, tail, tail_alone = ((0, 100), (0, 100)), ((300, 400), (0, 300)), ((300, 400), (300, 400))
    assert causal.calls(0, back=False) == Calls([head], [((300, 400), (0, 400))], [])
    assert causal.calls(0, back=True) == Calls([head], [tail], [tail_alone])
    # Adjacent runs are merged.
    assert causal.calls(1, back=False) == Calls(
        [((200, 300), (200, 300))], [((100, 300), (0, 200))], []
    )
    assert causal.calls(1, back=True) == Calls(
        [((150, 300), (150, 200))], [((100, 300), (0, 150))], [((200, 300), (200, 300))]
    )
    assert pieces(100, 2180) == [(100, 612), (612, 1124), (1124, 1636), (1636, 2180)]
    assert pieces(5, 8) == [(5, 6), (6, 7), (7, 8)]
    # The rest of the own keys is merged with adjacent remote keys.
    full = planned(contiguous(400, 2), contiguous(400, 2), FULL)
    assert full.calls(0, back=False) == Calls([((0, 200), (0, 100))], [((0, 200), (100, 400))], [])
    assert full.calls(1, back=False) == Calls(
        [((200, 400), (300, 400))], [((200, 400), (0, 300))], []
    )


def test_packed_sequences_have_ranges_of_their_own() -> None:
    starts = [0, 40, 60, 61, 61, 91], [0, 40, 73, 93, 93, 94]
    mask = Mask(
        lambda SQ, SK, q_last, **_: [(0, min(q_last + SK - SQ + 1, SK))], None, {}, starts=starts
    )
    assert merged(mask.keys_of(0, 10)) == [(0, 10)]
    assert merged(mask.keys_of(39, 41)) == [
        (0, 54)
    ]  # all keys of the first sequence, and 33 - 20 + 1 of the second
    assert merged(mask.keys_of(61, 91)) == [(93, 94)]
    assert next(mask.queries_of(5, 6))[1] > 91
    plan = planned(runs([50, 41]), runs([50, 44]), mask)
    assert plan.sent(1, 0) == [(50, 63)]


def test_lengths_of_ranks_may_differ_and_be_nothing() -> None:
    sharding = runs([5, 0, 7])
    assert sharding.parts == (((0, 5),), (), ((5, 12),))
    plan = planned(sharding, sharding, CAUSAL)
    assert (attended(plan) >= np.tri(12)).all()


def test_mistakes_are_told() -> None:
    with pytest.raises(
        ValueError, match="unknown sharding 'zigzag': choose contiguous, head_tail, by_cost or auto"
    ):
        sharded("zigzag", CAUSAL, 8, 2)
    with pytest.raises(ValueError, match="the same number of ranks, got 2 and 3"):
        planned(contiguous(8, 2), contiguous(8, 3), CAUSAL)
    with pytest.raises(
        ValueError, match=r"positions \[3, 5\) are not one run of rank 0, which has \[?\(?\(0, 4\)"
    ):
        Sharding((((0, 4),), ((4, 8),))).rows(0, 3, 5)
    assert cut(7, 3) == [(0, 2), (2, 4), (4, 7)]


def test_rows_outside_of_a_buffer_are_zero() -> None:
    rows = Rows([[3, 4], [5, 6]])
    assert (rows[1, 0], rows[1, 2], rows[2, 0], rows[0, -1]) == (5, 0, 0, 0)
    assert first_at_least(rows[0], 4) == 1
