"""The picture of the tiles, compared with the mask at every pair of positions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kgen.diagnostics import KgenError
from kgen.kernels.attention.explaining import explain
from kgen.kernels.attention.explaining.drawing import grids
from kgen.kernels.attention.plan.picture import Run, picture, usual, value
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.positions import positioned
from kgen.pages.model import FULL, MASKED, SKIPPED, Drawing, Grid
from kgen.pages.text import text as printed
from kgen.spec.load import Loaded, load, loads
from kgen.verify.evaluate import evaluate

SPECS = sorted((Path(__file__).resolve().parents[3] / "specs").glob("*.yaml"))
MASKED_SPECS = [
    path
    for path in SPECS
    if (text := path.read_text(encoding="utf-8")).startswith("kernel: attention")
    and "\nmask_mod:" in text
]


@pytest.mark.parametrize("length", [1000, 1024])
@pytest.mark.parametrize("path", MASKED_SPECS, ids=lambda p: p.stem)
def test_against_the_mask(path: Path, length: int) -> None:
    plan, loaded = plan_attention(load(path)), positioned(load(path))
    drawn = picture(plan, Run(length))
    scalars, rows, _ = usual(plan, Run(length))
    # The picture does not depend on leading indices.
    sizes = {"B": 1, "HQ": 1, "HKV": 1, "SQ": length, "SK": length}
    shapes = {
        n: tuple(sizes.get(str(s), s) for s in b.shape[:-1]) for n, b in loaded.spec.buffers.items()
    }
    buffers = {n: torch.tensor(row).expand(*shapes[n], -1) for n, row in rows.items()}
    buffers = {
        n: b.bool() if loaded.spec.buffers[n].dtype == "bool" else b for n, b in buffers.items()
    }
    index = torch.arange(length)
    env = {**scalars, **buffers, "q_idx": index[:, None], "kv_idx": index}
    for name, buffer in loaded.spec.buffers.items():
        env.setdefault(name, torch.zeros((1,) * len(buffer.shape), dtype=torch.int64))
    mask = evaluate(loaded.trees["mask_mod"], env, torch).expand(length, length)
    height, width = drawn.tile
    for i, row in enumerate(drawn.rows):
        for j, kind in enumerate(row):
            tile = mask[i * height : (i + 1) * height, j * width : (j + 1) * width]
            if kind == SKIPPED:
                assert not tile.any(), (i, j)
            if kind == FULL:
                assert tile.all(), (i, j)
                assert tile.shape[1] == width, "a tile across the last key needs its bound"


def test_what_causal_looks_like() -> None:
    spec = "kernel: attention\nname: n\ndtype: bf16\nhead_dim: 128\nmask_mod: q_idx >= kv_idx\n"
    drawn = picture(plan_attention(loads(spec, "n.yaml")), Run(100_000))
    wide = drawn.tile[0] // drawn.tile[1]
    assert drawn.tile[0] == wide * drawn.tile[1]
    columns = -(-100_000 // drawn.tile[1])
    for i, row in enumerate(drawn.rows):
        assert row == (FULL * wide * i + MASKED * wide + SKIPPED * columns)[:columns]
    assert len(drawn.rows) <= 64


def test_it_is_part_of_the_explanation() -> None:
    path = next(p for p in SPECS if p.stem == "prefix_lm")
    assert "one character" not in printed(explain(load(path)))
    said = printed(explain(load(path), Drawing(2048)))
    assert "SQ = SK = 2048, prefix = 512; one character is" in said
    assert "% skipped, " in said
    given = printed(explain(load(path), Drawing(2048, given={"prefix": "300"})))
    assert "SQ = SK = 2048, prefix = 300; one character is" in given


def test_scalars_are_python_numbers() -> None:
    head = "kernel: attention\nname: n\ndtype: bf16\nhead_dim: 64\nscore_mod: "
    tree = loads(
        head + "score + where(q_idx % 3 == 1 and not q_idx > 8, q_idx // -2, max(q_idx, 5, 2))\n",
        "n",
    )
    score = tree.trees["score_mod"]
    assert value(score, {"score": 0.5, "q_idx": 7}, {}) == 0.5 - 4
    assert value(score, {"score": 0.5, "q_idx": 3}, {}) == 5.5


HEAD = "kernel: attention\nname: n\ndtype: bf16\nhead_dim: 128\n"


def masked(mask: str, more: str = "") -> Loaded:
    return loads(f"{HEAD}mask_mod: {mask}\n{more}", "n.yaml")


def by_hand(allowed: Callable[[int, int], bool], drawn: Grid) -> None:
    """Check every tile by all its pairs: skipped if none is allowed, full if all are, masked
    otherwise.
    """
    height, width = drawn.tile
    for i, row in enumerate(drawn.rows):
        for j, kind in enumerate(row):
            queries = range(i * height, min((i + 1) * height, drawn.length))
            keys = range(j * width, min((j + 1) * width, drawn.length))
            found = {allowed(q, k) for q in queries for k in keys}
            assert kind == {frozenset({False}): SKIPPED, frozenset({True}): FULL}.get(
                frozenset(found), MASKED
            )


def test_a_window_that_is_given() -> None:
    loaded = masked(
        "q_idx >= kv_idx and q_idx - kv_idx < window",
        "params: {window: {type: int, runtime: true}}\n",
    )
    plan = plan_attention(loaded)
    for window in (64, 200, 300):
        whose, (drawn,) = grids(plan, Drawing(512, given={"window": str(window)}))
        assert whose == "All batches and heads have these tiles."
        assert drawn.title == f"SQ = SK = 512, window = {window}"
        by_hand(lambda q, k, window=window: q >= k and q - k < window, drawn)


def test_what_makes_no_difference_is_said() -> None:
    params = "score_mod: score * t\nparams: {t: {type: float, runtime: true}}\n"
    whose, _ = grids(
        plan_attention(masked("q_idx >= kv_idx", params)), Drawing(512, given={"t": "2"})
    )
    assert whose == "All batches and heads have these tiles. The tiles do not depend on `t`."


def test_each_head() -> None:
    plan = plan_attention(masked("q_idx >= kv_idx and q_idx - kv_idx < 128 * (1 + h % 2)"))
    whose, (one,) = grids(plan, Drawing(512))
    assert whose.startswith("Drawn for b = 0, h = 0. Tiles differ between heads. `--heads 8`")
    whose, found = grids(plan, Drawing(512, heads=4))
    assert "each of 4 heads" in whose
    assert [drawn.title.partition(":")[0] for drawn in found] == ["h = 0, 2", "h = 1, 3"]
    assert found[0].rows == one.rows
    for head, drawn in enumerate(found):
        by_hand(lambda q, k, head=head: q >= k and q - k < 128 * (1 + head), drawn)


def test_lengths_of_heads_differ() -> None:
    buffers = "buffers: {window: {shape: [HQ], dtype: int32}}\n"
    plan = plan_attention(masked("q_idx >= kv_idx and q_idx - kv_idx < window[h]", buffers))
    _, found = grids(plan, Drawing(1024, heads=4))
    for size, drawn in zip((192, 384, 576, 768), found, strict=True):
        by_hand(lambda q, k, size=size: q >= k and q - k < size, drawn)


def test_the_length_shows_the_mask() -> None:
    def length(mask: str, more: str = "") -> int:
        return grids(plan_attention(masked(mask, more)), Drawing())[1][0].length

    assert length("q_idx >= kv_idx") == 1024
    assert length("q_idx - kv_idx < 1024") == 4096
    assert length("q_idx - kv_idx < window", "params: {window: 4096}\n") == 16384
    assert length("q_idx - kv_idx < 1000000") == 1024


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": "x"}, "expected an integer of 32 bits for `size`, got `x`"),
        ({"size": "3000000000"}, "expected an integer of 32 bits for `size`"),
        ({"size": "9" * 5000}, "expected an integer of 32 bits for `size`"),
        ({"x": "nan"}, "expected a number of 32 bits for `x`, got `nan`"),
        ({"fixed": "3"}, "`fixed` is a compile-time parameter"),
        ({"m": "3"}, "`n` has no run-time parameter `m`"),
        ({"size": "0"}, "the tiles of `n` cannot be drawn"),
    ],
)
def test_what_cannot_be_given(given: dict[str, str], said: str) -> None:
    params = (
        "params: {size: {type: int, runtime: true}, x: {type: float, runtime: true}, fixed: 4}\n"
    )
    plan = plan_attention(masked("q_idx // size == kv_idx // size and q_idx * x > fixed", params))
    with pytest.raises(KgenError, match=re.escape(said)):
        grids(plan, Drawing(512, given=given))
