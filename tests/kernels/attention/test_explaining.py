"""Golden texts of `kgen explain` for four specs. `scripts/update` rewrites `explained/`."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import pytest

from kgen.kernels.attention.explaining import explain as page_of
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.pages.text import text as printed
from kgen.spec.load import Loaded, load, loads

ROOT = Path(__file__).resolve().parents[3]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
ATTENTION = [path for path in SPECS if "kernel: attention" in path.read_text()]
GOLDEN = sorted((Path(__file__).parent / "explained").glob("*.txt"))


def explain(loaded: Loaded) -> str:
    return printed(page_of(loaded))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda p: p.stem)
def test_word_for_word(golden: Path) -> None:
    text = explain(load(ROOT / "specs" / f"{golden.stem}.yaml"))
    # Omit the tiles, because tuning changes them often.
    found = text.partition("\nSizes of tiles")[0]
    if os.environ.get("KGEN_UPDATE_GOLDEN") == "1":
        golden.write_text(found, encoding="utf-8")
    assert found == golden.read_text(encoding="utf-8")


def test_there_are_golden_files() -> None:
    assert len(GOLDEN) == 4


@pytest.mark.parametrize("path", ATTENTION, ids=lambda p: p.stem)
def test_every_attention_is_explained(path: Path) -> None:
    loaded = load(path)
    text = explain(loaded)
    plan = plan_attention(loaded)
    for binding in plan.forward.program.bindings:
        assert f"      {binding.name} = " in text
    for gradient in plan.gradients:
        assert f"d {gradient.buffer}[" in text
    for tile in chain.from_iterable(plan.tiles.forward.values()):
        assert (
            f"{tile.BLOCK_M} x {tile.BLOCK_N}, {tile.num_warps} warps, {tile.num_stages} stages"
            in text
        )
    assert all(line == line.rstrip() for line in text.split("\n"))
    assert "Call(" not in text


def explained(score_mod: str, more: str = "") -> str:
    head = "kernel: attention\nname: n\ndtype: bf16\nhead_dim: 64\n"
    return explain(loads(f"{head}score_mod: {score_mod}\n{more}", "n.yaml"))


def test_reductions() -> None:
    learned = "buffers: {{x: {{shape: {}, dtype: fp32, grad: true}}}}\n"
    by_head = explained("score * x[h]", learned.format("[HQ]"))
    assert "one number for each query" in by_head
    assert "sums over all but h" in by_head
    by_key = explained("score + x[kv_idx]", learned.format("[SK]"))
    assert "one number for each key" in by_key
    by_pair = explained("score + x[q_idx, kv_idx]", learned.format("[SQ, SK]"))
    assert "loops over batches and heads: no atomics" in by_pair
    by_distance = explained("score + x[abs(q_idx - kv_idx)]", learned.format("[99]"))
    assert "the same bits every time" in by_distance
    assert "tiles on each diagonal" in by_distance
    by_sum = explained("score + x[q_idx + kv_idx]", learned.format("[99]"))
    assert "atomic addition" in by_sum
    by_bucket = explained("score + x[q_idx // 8]", learned.format("[99]"))
    assert "index_put" in by_bucket


def test_forward_only_and_unclassified_masks() -> None:
    text = explained("-score", "passes: [forward]\nmask_mod: (q_idx - kv_idx) % 3 == 0\n")
    assert "`passes` does not contain `backward`" in text
    assert "the mask has no closed form" in text
    assert "factor is positive" not in text


def test_searches_are_explained() -> None:
    text = explain(load(ROOT / "specs/document_causal.yaml"))
    assert "first_at_least(doc, doc[q_start])" in text
    assert "a binary search" in text


def test_what_a_promise_of_order_would_give() -> None:
    text = (ROOT / "specs/document_causal.yaml").read_text()
    said = "If each row of doc ascends, sorted: true lets kernels skip tiles."
    assert said not in " ".join(explain(loads(text, "document_causal.yaml")).split())
    unsorted = text.replace(", sorted: true", "")
    assert unsorted != text
    assert said in " ".join(explain(loads(unsorted, "document_causal.yaml")).split())
    once = unsorted.replace("doc[q_idx] == doc[kv_idx]", "doc[q_idx] % 2 == 0")
    assert said not in " ".join(explain(loads(once, "document_causal.yaml")).split())
