"""The picture of the tiles against the mask itself, evaluated position by position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kgen.kernels.attention.explaining import explain
from kgen.kernels.attention.plan.picture import FULL, MASKED, SKIPPED, _usual, picture, value
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.positions import positioned
from kgen.spec.load import load, loads
from kgen.verify.evaluate import evaluate

SPECS = sorted((Path(__file__).resolve().parents[3] / "specs").glob("*.yaml"))
MASKED_SPECS = [
    path
    for path in SPECS
    if (text := path.read_text(encoding="utf-8")).startswith("kernel: attention") and "\nmask_mod:" in text
]


@pytest.mark.parametrize("length", [1000, 1024])
@pytest.mark.parametrize("path", MASKED_SPECS, ids=lambda p: p.stem)
def test_against_the_mask(path: Path, length: int) -> None:
    plan, loaded = plan_attention(load(path)), positioned(load(path))
    drawn = picture(plan, length)
    scalars, rows, _ = _usual(plan, length)
    # Leading indices make no difference in a picture.
    sizes = {"B": 1, "HQ": 1, "HKV": 1, "SQ": length, "SK": length}
    shapes = {n: tuple(sizes.get(str(s), s) for s in b.shape[:-1]) for n, b in loaded.spec.buffers.items()}
    buffers = {n: torch.tensor(row).expand(*shapes[n], -1) for n, row in rows.items()}
    buffers = {n: b.bool() if loaded.spec.buffers[n].dtype == "bool" else b for n, b in buffers.items()}
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
    text = "kernel: attention\nname: n\ndtype: bf16\nhead_dim: 128\nmask_mod: q_idx >= kv_idx\n"
    drawn = picture(plan_attention(loads(text, "n.yaml")), 100_000)
    wide = drawn.tile[0] // drawn.tile[1]
    assert drawn.tile[0] == wide * drawn.tile[1]
    columns = -(-100_000 // drawn.tile[1])
    for i, row in enumerate(drawn.rows):
        assert row == (FULL * wide * i + MASKED * wide + SKIPPED * columns)[:columns]
    assert len(drawn.rows) <= 64


def test_it_is_part_of_the_explanation() -> None:
    path = next(p for p in SPECS if p.stem == "prefix_lm")
    assert "one character" not in explain(load(path))
    text = explain(load(path), 2048)
    assert "SQ = SK = 2048, prefix = 512; one character is" in text
    assert "% skipped, " in text


def test_scalars_are_python_numbers() -> None:
    text = "kernel: attention\nname: n\ndtype: bf16\nhead_dim: 64\nscore_mod: "
    tree = loads(
        text + "score + where(q_idx % 3 == 1 and not q_idx > 8, q_idx // -2, max(q_idx, 5, 2))\n", "n"
    )
    score = tree.trees["score_mod"]
    assert value(score, {"score": 0.5, "q_idx": 7}, {}) == 0.5 - 4
    assert value(score, {"score": 0.5, "q_idx": 3}, {}) == 5.5
