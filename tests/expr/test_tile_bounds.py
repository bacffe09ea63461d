"""Bounds of an index over a tile hold for all of its pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.specs.trees import INT, bounded, divides, evaluate, index, words

from kgen.expr.nodes import Node, Var
from kgen.expr.tile_bounds import tile_bounds

ENDS: dict[Node, tuple[Node, Node]] = {
    Var(f"{side}_idx", INT): (Var(f"{side}_start", INT), Var(f"{side}_last", INT))
    for side in ("q", "kv")
}
LEAVES = st.sampled_from(words("q_idx kv_idx q_idx kv_idx h offset window 0 1 3 9 (-1) (-4)"))


def larger(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = (
        "({} + {})",
        "({} - {})",
        "({} * {})",
        "min({}, {})",
        "max({}, {})",
        "({} // {})",
        "({} % {})",
    )
    return st.one_of(
        *(st.builds(form.format, part, part) for form in two),
        *(
            st.builds(form.format, part)
            for form in ("abs({})", "(-{})", "(q_idx - {})", "min({}, 5)")
        ),
        st.builds("clamp({}, {}, {})".format, part, part, part),
        st.builds("where({} < {}, {}, {})".format, part, part, part, part),
    )


INDICES = st.deferred(lambda: LEAVES | larger(LEAVES) | larger(LEAVES | larger(LEAVES)))
TILES = st.tuples(*(st.tuples(st.integers(0, 40), st.integers(0, 7)) for _ in range(2)))


@bounded
@given(INDICES.filter(divides), TILES, st.integers(-9, 9))
def test_bounds_hold(text: str, tile: tuple[tuple[int, int], ...], offset: int) -> None:
    node = index(text)
    bounds = tile_bounds(node, ENDS)
    if bounds is None:
        return
    (q_start, q_more), (kv_start, kv_more) = tile
    q, kv = (
        torch.arange(q_start, q_start + q_more + 1),
        torch.arange(kv_start, kv_start + kv_more + 1),
    )
    known = {
        "h": torch.tensor(2),
        "offset": torch.tensor(offset),
        "window": torch.tensor(abs(offset) + 1),
    }
    known |= {"q_start": q[0], "q_last": q[-1], "kv_start": kv[0], "kv_last": kv[-1]}
    values = evaluate(node, known | {"q_idx": q[:, None], "kv_idx": kv[None, :]})
    least, most = (evaluate(bound, known) for bound in bounds)
    assert bool((least <= values).all() and (values <= most).all())


@pytest.mark.parametrize(
    ("text", "far"),
    [
        ("min(abs(q_idx - kv_idx), 9)", 9),
        ("clamp(kv_idx - q_idx, -9, 9) + 9", 0),
        ("max(q_idx - kv_idx, 0) // 4 % h", None),  # remainders are not bounded
        ("min(q_idx - kv_idx, 9) // 4", 2),
        ("2 * min(q_idx - kv_idx, 9)", 18),
        ("-2 * min(q_idx - kv_idx, 9)", None),
        ("where(q_idx - kv_idx > 9, 9, q_idx - kv_idx)", None),
        ("q_idx - kv_idx", None),  # nothing saturates
        ("abs(q_idx - kv_idx)", None),
        ("min(h, offset) + q_idx", None),
        ("min(q_idx - kv_idx, q_idx)", None),
    ],
)
def test_tiles_of_one_element(text: str, far: int | None) -> None:
    bounds = tile_bounds(index(text), ENDS)
    assert (bounds is None) == (far is None)
    if bounds is None:
        return
    numbers = ("q_start", "q_last", "kv_start", "kv_last")
    away, near = (
        dict(zip(numbers, map(torch.tensor, n), strict=True))
        for n in ((64, 71, 0, 7), (64, 71, 64, 71))
    )
    assert [int(evaluate(bound, away)) for bound in bounds] == [far, far]
    least, most = (int(evaluate(bound, near)) for bound in bounds)
    assert least < most
