"""Tile ranges against brute force.

Kernels skip no pair that the mask keeps, mask each pair that it removes, and visit a tile once.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.specs.trees import POSITIVE, SORTED, bounded, draw_env, evaluate, grid, mask, words

from kgen.expr.algebra import Algebra
from kgen.expr.alternatives import MOST_ALTERNATIVES, alternatives
from kgen.expr.canonical import canonical
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Const, Node, Type, Var, walk
from kgen.expr.softmax_form import KV_IDX, Q_IDX, Q_START
from kgen.expr.spans import Span
from kgen.expr.tile_ranges import Axis, RangeFinder

Q_AXIS = Axis(Q_IDX, Q_START, Var("q_last", Type.INT), Var("SQ", Type.INT))
KV_AXIS = Axis(KV_IDX, Var("kv_start", Type.INT), Var("kv_last", Type.INT), Var("SK", Type.INT))
DIRECTIONS = {"keys of a query tile": (KV_AXIS, Q_AXIS), "queries of a key tile": (Q_AXIS, KV_AXIS)}
ZERO = Const(0, Type.INT)


def finder(inner: Axis, outer: Axis, values: dict[str, int] | None = None) -> RangeFinder:
    return RangeFinder(
        inner,
        outer,
        Algebra(POSITIVE),
        POSITIVE,
        lambda read: read.buffer in SORTED,
        values=values or {},
    )


def spans_of(tree: Node, inner: Axis, outer: Axis) -> tuple[Span, ...]:
    return finder(inner, outer).spans(tree)


def in_one_form(tree: Node) -> Node:
    return canonical({"mask_mod": tree}).get("mask_mod", TRUE)


def allowed(tree: Node, env: dict[str, Any], inner: Axis) -> torch.Tensor:
    """Return the mask as a matrix, outer positions by inner positions."""
    matrix = evaluate(tree, env | grid(env["SQ"], env["SK"])).expand(env["SQ"], env["SK"])
    return matrix if inner is KV_AXIS else matrix.T


def tiles(env: dict[str, Any], outer: Axis, rows: int) -> dict[str, Any]:
    """Return the names of the outer tile, for all tiles at once."""
    start = torch.arange(0, env[outer.size.name], rows)
    last = (start + rows).clamp(max=env[outer.size.name]) - 1
    return {outer.start.name: start, outer.last.name: last}


def numbers(
    spans: tuple[Span, ...], env: dict[str, Any], count: int
) -> list[list[tuple[int, ...]]]:
    """Return for each tile the values (lo, hi, full_lo, full_hi) of each span."""
    fields = [
        [evaluate(n, env).expand(count) for n in (s.lo, s.hi, s.full_lo, s.full_hi)] for s in spans
    ]
    return [[tuple(int(bound[t]) for bound in span) for span in fields] for t in range(count)]


def truncated(a: int, b: int) -> int:
    """Divide as kernels do, towards zero."""
    return abs(a) // b * (1 if a >= 0 else -1)


def visits(
    spans: tuple[Span, ...], bounds: list[tuple[int, ...]], block: int
) -> list[tuple[int, bool]]:
    """Return the tiles that the loops of an emitted kernel visit: the first position, and True if
    masked.
    """
    visited: list[tuple[int, bool]] = []
    done = 0
    for i, (span, (span_lo, hi, full_lo, full_hi)) in enumerate(zip(spans, bounds, strict=True)):
        lo = max(truncated(span_lo, block) * block, done if i else 0)
        done = truncated(hi + block - 1, block) * block if lo < hi or span.lo == ZERO else done
        if not span.has_full:
            loops = [(lo, hi, True)]
        else:
            full_lo = max(truncated(full_lo + block - 1, block) * block, lo)
            full_hi = truncated(full_hi, block) * block
            # A range that begins at 0 has no first loop, so `full_hi` needs no comparison with
            # `full_lo`.
            from_start = i == 0 and span.full_lo == span.lo == ZERO
            tail = full_hi if from_start else max(full_lo, full_hi)
            loops = [(lo, min(full_lo, hi), True), (full_lo, full_hi, False), (tail, hi, True)]
        visited += [(start, masked) for a, b, masked in loops for start in range(a, b, block)]
    return visited


def test_a_condition_on_the_outer_tile_chooses_the_range() -> None:
    text = "kv_idx < window or q_idx >= kv_idx"
    (span,) = spans_of(mask(text), Q_AXIS, KV_AXIS)
    env = {"SQ": 100, "window": 40, "kv_start": 32, "kv_last": 63}
    # All queries see the keys below 40. Queries from position 63 on see all keys of the tile.
    assert [int(evaluate(n, env)) for n in (span.lo, span.hi, span.full_lo, span.full_hi)] == [
        0,
        100,
        63,
        100,
    ]
    check(text, 1, 100, 130, 32, 16, {"window": 40})
    check(text, 2, 77, 50, 16, 32, {"window": 16})


@pytest.mark.parametrize("bounds", list(itertools.permutations((10, 40, 70))))
@pytest.mark.parametrize("position", ["kv_idx", "q_idx", "kv_idx - q_idx"])
def test_alternatives_in_a_circle_have_no_order(position: str, bounds: tuple[int, ...]) -> None:
    names = "offset", "window", "dilation"
    each = [f"{a} <= {position} < {b}" for a, b in zip(names, (*names[1:], names[0]), strict=True)]
    check(" or ".join(each), 1, 50, 90, 16, 8, dict(zip(names, bounds, strict=True)))


def check(
    text: str, seed: int, sq: int, sk: int, rows: int, block: int, changes: dict[str, int]
) -> None:
    """Check a mask as written, and in one form."""
    written = mask(text)
    for tree in dict.fromkeys((written, in_one_form(written))):
        check_tree(tree, seed, sq, sk, rows, block, changes)


def check_tree(
    tree: Node, seed: int, sq: int, sk: int, rows: int, block: int, changes: dict[str, int]
) -> None:
    env = draw_env(seed, sq, sk) | {"b": seed % 2, "h": seed // 2 % 2} | changes
    for inner, outer in DIRECTIONS.values():
        matrix = allowed(tree, env, inner)
        spans = finder(inner, outer, {n: env[n] for n in ("window", "dilation")}).spans(tree)
        tile_env = env | tiles(env, outer, rows)
        starts = tile_env[outer.start.name]
        for start, bounds in zip(
            starts.tolist(), numbers(spans, tile_env, len(starts)), strict=True
        ):
            part = matrix[start : start + rows]
            some = set(part.any(0).nonzero().flatten().tolist())
            every = set(part.all(0).nonzero().flatten().tolist())
            inside = {x for lo, hi, _, _ in bounds for x in range(lo, hi)}
            assert some <= inside, f"tile {start}: {bounds} leave out {some - inside}"
            for span, (_, _, full_lo, full_hi) in zip(spans, bounds, strict=True):
                full = set(range(full_lo, full_hi)) if span.has_full else set()
                assert full <= every, f"tile {start}: {bounds} do not mask {full - every}"
            # Compare with the tiles that a kernel visits.
            order = visits(spans, bounds, block)
            places = [position for position, _ in order]
            assert len(places) == len(set(places)), f"tile {start}: {bounds} visit {places}"
            assert all(0 <= p < env[inner.size.name] for p in places), (
                f"tile {start}: {bounds} visit {places}"
            )
            assert some <= {p + i for p in places for i in range(block)}
            assert every >= {p + i for p, masked in order if not masked for i in range(block)}


# --- any mask ------------------------

LEAVES = st.sampled_from(
    words(
        "q_idx kv_idx q_idx kv_idx q_idx kv_idx window offset offset h b SQ SK doc[q_idx] "
        "doc[kv_idx] "
        "docs[b,kv_idx] docs[b,q_idx] kind[kv_idx] kind[q_idx] lens[b] 0 1 3 (-2)"
    )
)
DIVISORS = st.sampled_from(words("2 3 window dilation (-2) 1"))
FACTORS = st.sampled_from(words("2 3 (-1) (-2) 0 window offset h"))


def larger(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} + {})".format, part, part),
        st.builds("({} - {})".format, part, part),
        st.builds("({} - {})".format, part, part),
        st.builds("{} * {}".format, part, FACTORS),
        st.builds("{1} * {0}".format, part, FACTORS),
        st.builds("({} // {})".format, part, DIVISORS),
        st.builds("({} % {})".format, part, DIVISORS),
        st.builds("({0} - {0} % {1})".format, part, DIVISORS),
        st.builds("({} >> {})".format, part, st.integers(0, 3)),
        st.builds("({} << {})".format, part, st.integers(0, 2)),
        st.builds("({} & {})".format, part, st.sampled_from(words("1 3 (-2) (-4) 5"))),
        st.builds("abs({})".format, part),
        st.builds("(-{})".format, part),
        st.builds("min({}, {})".format, part, part),
        st.builds("max({}, {})".format, part, part),
        st.builds("clamp({}, 0, {})".format, part, part),
        st.builds("where(h > 0, {}, {})".format, part, part),
        st.builds("where({} < {}, {}, 2)".format, part, part, part),
    )


# Deferred, so that a failure does not print the whole grammar.
VALUES = st.deferred(lambda: LEAVES | larger(LEAVES) | larger(LEAVES | larger(LEAVES)))
COMPARISONS = st.one_of(
    st.builds("{} {} {}".format, VALUES, st.sampled_from(words("< <= > >= == !=")), VALUES),
    st.builds("{} {} {}".format, LEAVES, st.sampled_from(words("< <= > >= == !=")), LEAVES),
    st.builds("({} < {}) == ({} < {})".format, LEAVES, LEAVES, LEAVES, LEAVES),
    st.builds(
        "abs(q_idx - kv_idx) {} {}".format, st.sampled_from(words("< <= > >= == !=")), VALUES
    ),
    st.sampled_from(["q_idx >= kv_idx", "q_idx * 0.5 >= kv_idx", "True", "False", "gain > 0"]),
)
MASKS = st.recursive(
    COMPARISONS,
    lambda part: st.one_of(
        st.builds("({} and {})".format, part, part),
        st.builds("({} or {})".format, part, part),
        st.builds("(not {})".format, part),
    ),
    max_leaves=4,
)


@settings(bounded, max_examples=600)
@given(
    MASKS,
    st.integers(0, 20),
    st.integers(1, 13),
    st.integers(1, 13),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(
        [{}, {}, {"offset": 0}, {"offset": -40}, {"offset": 2**31 - 20}, {"offset": 20 - 2**31}]
    ),
)
@example("kv_idx <= q_idx + offset", 0, 13, 13, 2, 4, {"offset": -12})
@example("q_idx != kv_idx", 0, 9, 9, 2, 2, {})
@example("kv_idx < where(offset > 3, 256, 64)", 0, 9, 9, 2, 2, {})
def test_every_mask(
    text: str, seed: int, sq: int, sk: int, rows: int, block: int, changes: dict[str, int]
) -> None:
    if "kind" in text or "doc" in text:  # these require equal lengths
        sk = sq
    check(text, seed, sq, sk, rows, block, changes)


# --- masks whose ranges are exact ------------------------

EXACT = {
    "causal": "q_idx >= kv_idx",
    "causal with an offset": "q_idx + offset >= kv_idx",
    "sliding window": "q_idx >= kv_idx and q_idx - kv_idx < window",
    "symmetric window": "abs(q_idx - kv_idx) <= window",
    "prefix": "kv_idx < offset or q_idx >= kv_idx",
    "padding": "kv_idx < lens[b]",
    "strided": "3 * q_idx >= 2 * kv_idx + 1",
    "chunks": "kv_idx // window == q_idx // window",
    "chunks behind a prefix": "(kv_idx - 3) // window == q_idx // window",
    "documents": "doc[q_idx] == doc[kv_idx]",
    "documents of a batch": "docs[b, kv_idx] <= docs[b, q_idx] and q_idx >= kv_idx",
    "head-dependent": "q_idx - kv_idx >= h * 2",
    "nothing": "True",
}
# In some tiles, several alternatives together cover all pairs, one for each row. `full` is smaller
# there.
SEVERAL = {
    "longformer": "abs(q_idx - kv_idx) <= window or kv_idx < offset",
    "prefix and window": "q_idx >= kv_idx and (q_idx - kv_idx < window or kv_idx < 2)",
}


def check_exact(tree: Node, seed: int, rows: int, inner: Axis, outer: Axis, alone: bool) -> None:
    env = draw_env(seed, 12, 12) | {"b": seed % 2, "h": seed % 2}
    matrix = allowed(tree, env, inner)
    spans = spans_of(tree, inner, outer)
    tile_env = env | tiles(env, outer, rows)
    starts = tile_env[outer.start.name]
    for start, bounds in zip(starts.tolist(), numbers(spans, tile_env, len(starts)), strict=True):
        part = matrix[start : start + rows]
        some = set(part.any(0).nonzero().flatten().tolist())
        every = set(part.all(0).nonzero().flatten().tolist())
        assert {x for lo, hi, _, _ in bounds for x in range(lo, hi)} == some, (start, bounds)
        full = {x for _, _, full_lo, full_hi in bounds for x in range(full_lo, full_hi)}
        assert full == every if alone or rows == 1 else full <= every, (start, bounds)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", [*EXACT, *SEVERAL])
def test_exact(name: str, direction: str) -> None:
    for seed in range(8):
        for rows in (1, 3, 4):
            tree = mask((EXACT | SEVERAL)[name])
            check_exact(tree, seed, rows, *DIRECTIONS[direction], alone=name in EXACT)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "text",
    [
        "kind[kv_idx] == kind[q_idx]",
        "(q_idx - kv_idx) % dilation == 0",
        "q_idx * kv_idx < 9",
        "q_idx * 0.5 >= kv_idx",
        "doc[kv_idx] % 2 == doc[q_idx] % 2",
        "kv_idx // 2 + kv_idx // 3 <= q_idx // 2 + q_idx // 3",
    ],
)
def test_what_cannot_be_classified_is_scanned_with_the_mask(text: str, direction: str) -> None:
    inner, outer = DIRECTIONS[direction]
    (span,) = spans_of(mask(text), inner, outer)
    assert (span.lo, span.hi, span.has_full) == (ZERO, inner.size, False)


def test_one_condition_that_cannot_be_classified_leaves_the_others() -> None:
    (span,) = spans_of(
        mask("q_idx >= kv_idx and (q_idx - kv_idx) % dilation == 0"), KV_AXIS, Q_AXIS
    )
    (causal,) = spans_of(mask("q_idx >= kv_idx"), KV_AXIS, Q_AXIS)
    assert (span.lo, span.hi) == (causal.lo, causal.hi)
    assert not span.has_full


QUOTIENTS = {
    "difference": "q_idx // 4 - kv_idx // 4 <= 1",
    "causal by blocks": "q_idx // 4 - kv_idx // 4 >= 0",
    "both sides": "0 <= q_idx // 4 - kv_idx // 4 <= 1 and q_idx >= kv_idx",
    "distance": "abs(q_idx // 4 - kv_idx // 4) <= 1",
    "other sizes": "abs(q_idx // 2 - kv_idx // 3) <= 1",
    "multiples": "3 * (q_idx // 4) <= 2 * (kv_idx // 2) + 1",
    "of a param": "q_idx // window - kv_idx // window <= 1",
    "by a param": "abs(q_idx // 4 - kv_idx // 4) <= offset",
    "nested": "(q_idx // 2) // 3 == (kv_idx // 2) // 3",
    "nested in a param's": "q_idx // window // 2 >= kv_idx // window // 2",
    "shifts": "q_idx >> 2 == kv_idx >> 2",
    "shifts of shifts": "(q_idx >> 1) >> 1 >= kv_idx // 4",
    "to the left": "kv_idx << 1 <= q_idx",
    "bits": "(q_idx & -4) == (kv_idx & -4) and (q_idx & 3) >= (kv_idx & 3)",
    "starts": "q_idx - q_idx % 4 == kv_idx - kv_idx % 4",
    "starts of a param's": "q_idx - q_idx % window == kv_idx - kv_idx % window",
    "starts, the size last": "q_idx // window * window >= kv_idx // window * window",
    "later starts of a param's": "q_idx - q_idx % window > kv_idx - kv_idx % window",
    "a window of blocks": "kv_idx >= q_idx - q_idx % 4 - 4 and kv_idx <= q_idx",
    "of a distance": "(kv_idx - q_idx) // 4 == -1",
    "of a sum": "(kv_idx + q_idx) // 2 < 3",
    "of a moved position": "(2 * kv_idx + 1) // 3 <= (q_idx + offset) // 2",
    "of documents": "doc[kv_idx] // 2 == doc[q_idx] // 2",
    "not": "not (q_idx // 4 - kv_idx // 4 != 1)",
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients(name: str) -> None:
    """Every condition has a range, and kernels skip only pairs that the mask removes.

    Lengths and tiles are multiples of a block, and others.
    """
    tree = in_one_form(mask(QUOTIENTS[name]))
    for inner, outer in DIRECTIONS.values():
        assert finder(inner, outer, {"window": 4}).unclassified(tree) == ()
    for seed, (sq, sk) in enumerate([(16, 16), (13, 13), (1, 1), (9, 21), (24, 7)]):
        for rows, block in ((4, 4), (3, 2), (8, 1), (1, 8)):
            for offset in (2, -1, 2**30, -(2**30)) if "offset" in QUOTIENTS[name] else (0,):
                lengths = (sq, sq if "doc" in name else sk)
                check(QUOTIENTS[name], seed, *lengths, rows, block, {"offset": offset})


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "name", ["difference", "of a param", "shifts", "starts", "nested", "a window of blocks"]
)
def test_ranges_of_quotients_are_exact(name: str, direction: str) -> None:
    for seed in range(4):
        for rows in (1, 3, 4):
            inner, outer = DIRECTIONS[direction]
            check_exact(in_one_form(mask(QUOTIENTS[name])), seed, rows, inner, outer, alone=True)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "text",
    [
        *(
            "q_idx // 64 - kv_idx // 64 <= offset",
            "kv_idx // 4 <= q_idx // 3",
            "kv_idx // 64 >= offset",
        ),
        *(
            "kv_idx // 8 // 9 < offset",
            "(kv_idx + q_idx) // 64 <= offset",
            "3 * (kv_idx // 4) >= offset",
        ),
    ],
)
def test_multiples_of_bounds_do_not_wrap(text: str, direction: str) -> None:
    """Run-time numbers and positions may have their largest values: a bound beyond all quotients is
    clamped first.
    """
    inner, outer = DIRECTIONS[direction]
    tree, size, rows = in_one_form(mask(text)), 2**29, torch.arange(64)
    ends = torch.tensor([0, 1, 63, 64, 2**27, size - 64, size - 2, size - 1])
    for offset, start in itertools.product((2**30, -(2**30), 2**25, 5, 0), (0, 2**27, size - 64)):
        env = draw_env(0, 8, 8) | {"SQ": size, "SK": size, "offset": offset}
        env |= {outer.start.name: start, outer.last.name: start + 63}
        pairs = {outer.index.name: start + rows[:, None], inner.index.name: ends}
        matrix = evaluate(tree, env | pairs).expand(64, len(ends))
        for span in finder(inner, outer).spans(tree):
            lo, hi, full_lo, full_hi = (
                int(evaluate(n, env)) for n in (span.lo, span.hi, span.full_lo, span.full_hi)
            )
            assert {*ends[matrix.any(0)].tolist()} <= {x for x in ends.tolist() if lo <= x < hi}
            assert {*ends[matrix.all(0)].tolist()} >= {
                x for x in ends.tolist() if full_lo <= x < full_hi
            }


# Two halves of a sequence, as in block diffusion: the noisy half, and the clean half from position
# 8 on.
Q_BLOCK = "where(q_idx >= 8, (q_idx - 8) // window, q_idx // window)"
KV_BLOCK = "where(kv_idx >= 8, (kv_idx - 8) // window, kv_idx // window)"
HALVES = {
    "block diffusion": f"{Q_BLOCK} == {KV_BLOCK} and (q_idx >= 8) == (kv_idx >= 8)"
    f" or {Q_BLOCK} > {KV_BLOCK} and kv_idx >= 8 and q_idx < 8"
    f" or {Q_BLOCK} >= {KV_BLOCK} and kv_idx >= 8 and q_idx >= 8",
    "halves apart": "(q_idx < 8) == (kv_idx < 8) and q_idx >= kv_idx",
    "chosen by a half": (
        "where(q_idx < 8, q_idx - kv_idx < window and q_idx >= kv_idx, kv_idx >= 8)"
    ),
    "numbers of halves": "where(q_idx < 8, 1, 0) == where(kv_idx < 8, 1, 0) and q_idx >= kv_idx",
    "windows of halves": "abs(q_idx - kv_idx) < where(q_idx < 8, 2, 5)",
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", HALVES)
def test_cases_are_told_apart(name: str, direction: str) -> None:
    inner, outer = DIRECTIONS[direction]
    tree = mask(HALVES[name])
    found = RangeFinder(inner, outer, Algebra(POSITIVE), POSITIVE, lambda read: False)
    assert found.unclassified(tree) == ()
    for seed in range(4):
        env = draw_env(seed, 16, 16)
        matrix = allowed(tree, env, inner)
        # Tiles of 4 do not cross the border of the halves, so each range is exact.
        tile_env = env | tiles(env, outer, 4)
        for start, bounds in enumerate(numbers(found.spans(tree), tile_env, 4)):
            some = set(matrix[4 * start : 4 * start + 4].any(0).nonzero().flatten().tolist())
            assert {x for lo, hi, _, _ in bounds for x in range(lo, hi)} == some, (start, bounds)
        for rows, block in ((4, 4), (3, 4), (8, 2), (5, 3), (16, 1)):
            check(HALVES[name], seed, 16, 16, rows, block, {})
            check(HALVES[name], seed, 13, 16, rows, block, {})


def test_too_many_cases_stay_one() -> None:
    swin = "((q_idx >= 8) != (kv_idx >= 8)) != (q_idx // window == kv_idx // window)"
    assert finder(KV_AXIS, Q_AXIS).unclassified(mask(swin)) != ()
    check(swin, 0, 16, 16, 4, 4, {})


def test_spans_are_few_and_ascend() -> None:
    for text in (EXACT | SEVERAL).values():
        for inner, outer in DIRECTIONS.values():
            spans = spans_of(mask(text), inner, outer)
            assert 1 <= len(spans) <= 2
            assert all(span.lo == ZERO for span in spans[:-1])


MANY = {
    "!=": " and ".join(f"kv_idx != q_idx + {3 * i}" for i in range(20)),
    "or in and": " and ".join(
        f"(kv_idx < q_idx + {i} or kv_idx > q_idx + {2 * i + 70})" for i in range(60)
    ),
    "and in or": " or ".join(
        f"(kv_idx < q_idx - {i} and kv_idx > q_idx - {i + 3})" for i in range(0, 60, 5)
    ),
    "the same again": " and ".join(["(kv_idx < q_idx or kv_idx > q_idx + 5)"] * 60),
    "choices": " and ".join(f"kv_idx <= where(q_idx > {i}, q_idx + {i}, {i})" for i in range(20)),
    "choices of choices": "kv_idx <= "
    + "".join(f"where(q_idx > {i}, q_idx + {i}, " for i in range(20))
    + "q_idx"
    + ")" * 20,
    "truth values": "kv_idx <= q_idx + 5 and ("
    + " == ".join([f"(q_idx > {i})" for i in range(2)])
    + ")",
    "not": "not (" + " or ".join(f"kv_idx == q_idx + {3 * i}" for i in range(20)) + ")",
    "nested": " or ".join(f"(q_idx > {i} and (kv_idx < {i} or q_idx == {i}))" for i in range(9)),
}


@pytest.mark.parametrize("name", MANY)
def test_many_alternatives_are_not_multiplied_out(name: str) -> None:
    """Twenty `!=` would be a million alternatives. Beyond the limit, the other conditions still
    bound the range.
    """
    text = f"({MANY[name]}) and kv_idx <= q_idx + 90"
    began = time.process_time()
    for inner, outer in DIRECTIONS.values():
        assert len(alternatives(mask(text))) <= MOST_ALTERNATIVES
        (*_, last) = spans_of(mask(text), inner, outer)
        env = {
            "SQ": 1000,
            "SK": 1000,
            **dict.fromkeys(("q_start", "kv_start"), 256),
            "q_last": 319,
            "kv_last": 319,
        }
        if inner is KV_AXIS:
            assert int(evaluate(last.hi, env)) <= 410
        else:
            assert int(evaluate(last.lo, env)) >= 166
    assert time.process_time() - began < 5.0
    check(text, 3, 100, 130, 32, 16, {})


def test_bounds_stay_within_32_bits() -> None:
    """Run-time integers are within 2**30 of zero, because the emitted launcher refuses others."""
    (span,) = spans_of(mask("abs(q_idx - kv_idx) <= window"), KV_AXIS, Q_AXIS)
    env = draw_env(0, 8, 8) | {"q_start": 4, "q_last": 7, "window": 2**30}
    for node in (
        n for bound in (span.lo, span.hi, span.full_lo, span.full_hi) for n in walk(bound)
    ):
        assert -(2**31) <= int(evaluate(node, env)) < 2**31
