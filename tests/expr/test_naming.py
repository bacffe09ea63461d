"""Names of values that kernels compute apart."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.specs.trees import index, mask, score

from kgen.expr.hoist import TILE, Place, hoist
from kgen.expr.naming import alike, candidates, is_taken, numbered
from kgen.expr.nodes import Node

PLACES = {
    "q_idx": Place(False, ("q",)),
    "kv_idx": Place(True, ("kv",)),
    "kv_start": Place(True, ()),
    "score": TILE,
}


def names_of(
    node: Node, named: Mapping[Node, str] | None = None, reserved: tuple[str, ...] = ()
) -> list[str]:
    return [b.name for b in hoist({"mask": (node, TILE)}, PLACES, reserved, named).bindings]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("kv_idx <= q_idx + SK - SQ", ["sk_minus_sq_plus_q"]),
        ("kv_idx < window or q_idx > 3", ["kv_lt_window", "q_gt_3"]),
        ("kv_idx // 128 == q_idx // 128", ["kv_div_128", "q_div_128"]),
        ("doc[q_idx] == doc[kv_idx]", ["doc_q", "doc_kv"]),
        ("doc[q_idx + 1] == doc[kv_idx]", ["doc_at", "doc_kv"]),
    ],
)
def test_short_integers_are_read_aloud(condition: str, expected: list[str]) -> None:
    assert sorted(names_of(mask(condition))) == sorted(expected)


def test_other_values_say_what_they_are_part_of() -> None:
    roots = {"core": (score("tanh(score * gain / cap) + 2 * tanh(score * gain / cap)"), TILE)}
    program = hoist(roots, PLACES, reserved=["core"])
    assert [b.name for b in program.bindings] == ["core_scale", "core_tanh"]


def test_a_name_that_is_taken_gives_way() -> None:
    node = mask("kv_idx < window or q_idx > 3")
    assert names_of(node, reserved=("kv_lt_window",)) == ["mask_kv", "q_gt_3"]
    assert names_of(node, reserved=("kv_lt_window", "mask_kv", "mask_kv_lt")) == [
        "mask_kv_lt_2",
        "q_gt_3",
    ]


def test_the_users_name_comes_first() -> None:
    node = mask("kv_idx <= q_idx + SK - SQ")
    assert "row" in names_of(node, {index("q_idx + SK - SQ"): "row"})
    # A name of the kernel stays the kernel's.
    assert "row_value" in names_of(node, {index("q_idx + SK - SQ"): "row"}, reserved=("row",))


def test_the_users_name_is_found_in_another_order() -> None:
    assert alike(index("q_idx + SK - SQ")) == alike(index("SK - (SQ - q_idx)"))
    assert alike(score("q_idx * gain * cap")) == alike(score("cap * (gain * q_idx)"))
    assert alike(index("q_idx - kv_idx")) != alike(index("kv_idx - q_idx"))
    assert alike(index("2 * q_idx + q_idx")) != alike(index("2 * q_idx"))
    assert alike(index("min(q_idx, kv_idx)")) != alike(index("max(q_idx, kv_idx)"))


def test_numbers_begin_no_name() -> None:
    (first, *_) = candidates(mask("3 < q_idx"), "mask", ("q",), {}, whole=False)
    assert first.isidentifier()
    long = mask("q_idx + window + window + window < kv_idx")
    assert [*candidates(long, "mask", (), {}, whole=False)] == ["mask_lt"]
    assert [*candidates(long, "mask", (), {}, whole=True)] == ["mask", "mask_lt"]


def test_many_values_of_a_name_have_initials() -> None:
    assert [numbered("core_scale", count) for count in (2, 9, 10, 120)] == [
        "core_scale_2",
        "core_scale_9",
        "cs_10",
        "cs_120",
    ]


def test_a_name_that_kernels_count_is_taken_with_any_number() -> None:
    taken = {"dq_0", "dq_#", "m_i"}
    assert all(is_taken(name, taken) for name in ("dq_0", "dq_12", "m_i"))
    assert not any(is_taken(name, taken) for name in ("ds_12", "m_12"))
