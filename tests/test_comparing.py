"""Random masks and scores in the forms of the passes, compared with their text.

The tests run a sample, the bugs that random runs found, and planted bugs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fuzzing import comparing
from fuzzing.expressions import BUFFERS, Drawn, drawn
from fuzzing.forms import compare_drawn
from fuzzing.text_values import text_value

from kgen.expr import alternatives, canonical, distance, softmax_form, tile_ranges
from kgen.expr.algebra import call
from kgen.expr.mask_form import NEGATED
from kgen.expr.nodes import Const, Node, Type, substitute
from kgen.expr.softmax_form import KV_IDX, Q_IDX
from kgen.kernels.attention.plan import block_mask

SAMPLE = 400
ENDS = {"align": "end", "lengths": {"kv": {"per_batch": True}}}


def of(mask: str | None, score: str | None = None, **more: Any) -> Drawn:
    """Return expressions with the buffers that they read."""
    read = {name: BUFFERS[name] for name in BUFFERS if f"{name}[" in f"{mask} {score}"}
    return Drawn(mask, score, 1, read, {}, more)


FOUND = {
    "abs of itself": of("abs(q_idx - kv_idx) <= 0"),
    "abs of elements": of("-abs(doc[q_idx] - doc[kv_idx]) >= 0"),
    "abs of an abs": of("abs(abs(q_idx - kv_idx)) < 1 and abs(2 * q_idx - kv_idx) >= kv_idx"),
    "elements before the first": of("doc[q_idx - 3] >= doc[kv_idx]"),
    "elements past the last": of("doc[q_idx + 5] >= kv_idx"),
    "keys past the last": of("doc[kv_idx + 3] >= q_idx"),
    "elements of an aligned query": of("doc[q_idx] == doc[kv_idx]", **ENDS),
    "elements of a short sequence": of("wide[q_idx // 2] <= wide[kv_idx]", **ENDS),
    "a pole in the first row": of("q_idx > kv_idx", "score + kv_idx * 0.5 + 1 / q_idx"),
    "far keys that an overflow hides": of(None, "score - exp(20.0 * (q_idx - kv_idx))"),
    "a logarithm in the first row": of(None, "score + 0.5 * (kv_idx - q_idx) - log(float(q_idx))"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Run torch on one thread, because the arrays are short."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_sample_is_right() -> None:
    found = [comparing.compared(seed) for seed in range(SAMPLE)]
    assert not [one for one in found if one.failed]
    assert sum(one.what == "right" for one in found) > 0.98 * SAMPLE


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    for seed in range(12):
        compare_drawn(FOUND[name], random.Random(seed), thorough=True)


def test_a_seed_is_one_expression() -> None:
    again = [drawn(random.Random(seed)) for seed in range(50)]
    assert [drawn(random.Random(seed)) for seed in range(50)] == again
    assert len({str(one.fields()) for one in again}) > 45


DRAWN = (
    *(
        "abs(q_idx - kv_idx) <= 0",
        "abs(q_idx - kv_idx) < 1",
        "!= ",
        "where(",
        "h_kv",
        "kv_idx < 0",
        " < 1000000",
    ),
    *("/ (q_idx)", "log(float(", "n[b]", "doc[", "// -", "-inf", "0.0 * "),
)


def test_the_edges_are_drawn() -> None:
    those = [drawn(random.Random(seed)) for seed in range(4000)]
    texts = " ".join(f"{one.mask} {one.score}" for one in those)
    assert [form for form in DRAWN if form not in texts] == []
    assert {one.gqa for one in those} == {1, 2, 3, "any"}
    assert {"align", "lengths"} <= {field for one in those for field in one.more}


# --- texts ------------------------

ENV = {
    "a": np.array([-7, -1, 0, 1, 2, 5]),
    "x": np.array([-1.5, -0.25, 0.0, 0.1, 0.3, np.inf]),
    "t": np.array([4, 5, 6]),
    "score": np.array([-2.0, -0.5, 0.0, 0.1, 0.7, 3.0]),
}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a // 2", [-4, -1, 0, 0, 1, 2]),
        ("a % -3", [-1, -1, 0, -2, -1, -1]),
        ("t[a]", [0, 0, 4, 5, 6, 0]),
        ("where(a > 0, a, -a) if a != 5 else 0", [7, 1, 0, 1, 2, 0]),
        ("-1 <= a < 2 and not a == 0", [False, True, False, True, False, False]),
        ("b = a * a\nmax(b, 3, a) - clamp(a, 0, 1)", [49, 3, 3, 2, 3, 24]),
        ("int(a / 2)", [-3, 0, 0, 0, 1, 2]),
        ("(a ^ 3) + (a << 1) + (a >> 1) + (~a & 6)", [-18, -7, 9, 10, 10, 20]),
        ("a * 2 ** 2", [-28, -4, 0, 4, 8, 20]),
        (
            "1000000 * (1000000 + a)",
            [-734379968, -728379968, -727379968, -726379968, -725379968, -722379968],
        ),
        ("abs(x) < 0.5", [False, True, True, True, True, False]),
        ("floor(x) + ceil(x) + sign(x)", [-4.0, -2.0, 0.0, 2.0, 2.0, np.inf]),
    ],
)
def test_the_value_of_a_text(text: str, values: list[Any]) -> None:
    assert text_value(text, ENV, frozenset({"t"})).it.tolist() == values


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("6 // a > 0", [1, 1, 0, 1, 1, 1]),
        ("where(a != 0, 6 // a, 0) > 0", [1, 1, 1, 1, 1, 1]),
        ("a != 0 and 6 // a > 0", [1, 1, 1, 1, 1, 1]),
        ("a == 0 or 1.0 / a > 0.0", [1, 1, 1, 1, 1, 1]),
        ("2000000000 * a > 0", [0, 1, 1, 1, 0, 0]),
        ("float(2000000000 * a) > 0.0", [1, 1, 1, 1, 1, 1]),
        ("1 << a > 0", [0, 0, 1, 1, 1, 1]),
        ("3 * score == score + score + score", [0, 0, 0, 0, 0, 0]),
        ("floor(score / 0.1) >= 0.0", [0, 0, 1, 0, 0, 0]),
        ("0.5 * a == 0.0", [1, 1, 1, 1, 1, 1]),
    ],
)
def test_where_a_text_means_something(text: str, means: list[int]) -> None:
    """`ok` is false where a kernel may compute anything, or where rounding decides. Operands that
    are not evaluated do not count.
    """
    assert np.broadcast_to(text_value(text, ENV).ok, 6).tolist() == [bool(one) for one in means]


def test_the_record_begins_anew_with_another_generator(tmp_path: Path) -> None:
    path = tmp_path / "expressions.json"
    record = comparing.Record.read(path)
    record.enter([comparing.Compared(0, "right"), comparing.Compared(1, "ranges", "wrong")], path)
    record.enter([comparing.Compared(7, "right")], path)
    assert comparing.Record.read(path) == comparing.Record(
        2, {"right": 1, "ranges": 1}, {"1": "wrong"}
    )
    with mock.patch.object(comparing, "generator", return_value="other"):
        assert comparing.Record.read(path) == comparing.Record()


def test_seeds_of_the_record_are_right() -> None:
    assert comparing.Record.read().failed == {}


# --- planted ------------------------


def _from_the_key(node: Node, _: Any) -> Node:
    return substitute(node, {KV_IDX: call("add", Q_IDX, distance.DISTANCE)})


PLANTED: dict[str, tuple[str, Any, str, Any]] = {
    "a fact of its own": ("canonical", canonical, "_has_abs", lambda node: False),
    "a strict bound": (
        "canonical",
        canonical,
        "_below",
        lambda a, b: call("lt", a.tree(), b.tree()),
    ),
    "an opposite": ("canonical", canonical, "NEGATED", NEGATED | {"lt": "gt"}),
    "an alternative less": ("alternatives", alternatives, "_needed", lambda found: found[:1]),
    "a bound of another row": (
        "ranges",
        tile_ranges,
        "_undivided",
        lambda b, d, upper: call("mul", b, d),
    ),
    "a bound one too low": ("ranges", tile_ranges, "_ONE", Const(0, Type.INT)),
    "a row that is not dropped": (
        "softmax",
        softmax_form,
        "_separated",
        lambda bias, algebra: 0 * bias,
    ),
    "a distance from the key": ("distance", distance, "substitute", _from_the_key),
    "a period": ("periods", block_mask, "lcm", min),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str) -> None:
    form, module, member, wrong = PLANTED[name]
    canonical.condition.cache_clear()
    alternatives.alternatives.cache_clear()
    with mock.patch.object(module, member, wrong):
        found = next((one for one in map(comparing.compared, _seeds(form)) if one.failed), None)
    canonical.condition.cache_clear()
    alternatives.alternatives.cache_clear()
    assert found is not None
    assert found.what == form


def _seeds(form: str) -> range:
    return (
        range(SAMPLE)
        if form in ("canonical", "alternatives")
        else range(0, 4 * SAMPLE, comparing.THOROUGH)
    )
