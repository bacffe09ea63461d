"""Normal forms of masks have the values of the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.specs.trees import bounded, draw_env, evaluate, grid, mask, words
from test_tile_ranges import MASKS

from kgen.expr.mask_form import FALSE, TRUE, all_of, any_of, conjuncts, disjuncts, normalize
from kgen.expr.nodes import Call, Node, walk

N = 8
SIZE = {"sq": N, "sk": N}
NAN = float("nan")


def matrix(tree: Node, env: dict[str, Any]) -> torch.Tensor:
    return evaluate(tree, env | grid(N, N)).expand(N, N)


# Comparisons of reals, some of which are NaN: the test puts one into `columns`.
REALS = st.builds(
    "({} {} {})".format,
    st.sampled_from(words("columns[kv_idx] abs(columns[kv_idx]) gain")),
    st.sampled_from(words("< <= > >= == !=")),
    st.sampled_from(words("rows[q_idx] 0.5 gain abs(gain)")),
)
MIXED = st.recursive(
    MASKS | REALS,
    lambda part: st.one_of(
        st.builds("({} and {})".format, part, part),
        st.builds("({} or {})".format, part, part),
        st.builds("(not {})".format, part),
    ),
    max_leaves=4,
)


@settings(bounded, max_examples=300)
@given(MIXED, st.integers(0, 7))
def test_normalize_changes_no_value(text: str, seed: int) -> None:
    tree = mask(text)
    env = draw_env(seed, N, N) | {"b": seed % 2, "h": seed // 2 % 2}
    env["columns"][seed] = NAN
    normal = normalize(tree)
    want = matrix(tree, env)
    assert torch.equal(matrix(normal, env), want)
    # Conjuncts and disjuncts have the values of the whole.
    assert torch.equal(matrix(all_of(conjuncts(normal)), env), want)
    assert torch.equal(matrix(any_of(disjuncts(normal)), env), want)
    assert not any(isinstance(c, Call) and c.fn == "and" for c in conjuncts(normal))
    assert not any(isinstance(c, Call) and c.fn == "or" for c in disjuncts(normal))
    # Outside of comparisons, `not` is only on leaves.
    for node in walk(normal):
        if isinstance(node, Call) and node.fn == "not":
            (inner,) = node.args
            assert not (isinstance(inner, Call) and inner.fn in ("not", "and", "or")) or text.count(
                "where"
            )


@pytest.mark.parametrize("comparison", ["<", "<=", ">", ">="])
def test_not_of_a_real_comparison_holds_for_nan(comparison: str) -> None:
    env = draw_env(0, N, N) | {"b": 0, "h": 0}
    env["columns"][:] = NAN
    tree = mask(f"not columns[kv_idx] {comparison} 0.5")
    assert matrix(tree, env).all()
    assert matrix(normalize(tree), env).all()


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("not q_idx < kv_idx", "q_idx >= kv_idx"),
        ("not (q_idx < kv_idx or h == 1)", "q_idx >= kv_idx and h != 1"),
        ("not (q_idx < kv_idx and not h == 1)", "q_idx >= kv_idx or h == 1"),
        ("abs(q_idx - kv_idx) <= 3", "q_idx - kv_idx <= 3 and q_idx - kv_idx >= -3"),
        ("3 >= abs(q_idx - kv_idx)", "q_idx - kv_idx <= 3 and q_idx - kv_idx >= -3"),
        ("abs(q_idx - kv_idx) > window", "q_idx - kv_idx > window or q_idx - kv_idx < -window"),
        ("not abs(q_idx - kv_idx) > 3", "q_idx - kv_idx <= 3 and q_idx - kv_idx >= -3"),
        ("abs(gain) <= 0.5", "abs(gain) <= 0.5"),
        ("not gain < 0.5", "not gain < 0.5"),
        ("not gain == 0.5", "gain != 0.5"),
    ],
)
def test_normal_forms(text: str, normal: str) -> None:
    assert normalize(mask(text)) == mask(normal)


def test_nothing_to_require() -> None:
    assert (all_of([]), any_of([])) == (TRUE, FALSE)
    assert (conjuncts(TRUE), disjuncts(FALSE)) == ([], [])
    assert all_of([TRUE, mask("h == 1"), TRUE]) == mask("h == 1")
