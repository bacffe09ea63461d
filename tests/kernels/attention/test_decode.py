"""Decoding: plans by spec, the distribution of programs, and the choices of the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.interpreters.own_process import interpreted
from support.interpreters.some_cases import emitted, failures

from kgen.expr.nodes import Read, Type, Var, reads, variables
from kgen.kernels.attention.lowered.live_tiles import LiveTiles
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.positions import positioned
from kgen.kernels.attention.schedules.decode.kernels import decode_kernels
from kgen.kernels.attention.schedules.decode.lowering import decode_kernel
from kgen.kernels.attention.schedules.decode.plan import decodes, plan_decode
from kgen.kernels.attention.verify.cache import NO_PAGE, lengths
from kgen.kernels.attention.verify.inputs import Case
from kgen.sizes import SHARED_MEMORY
from kgen.spec.load import Loaded, load, loads
from kgen.verify.families import problem_of

ROOT = Path(__file__).resolve().parents[3]
HEAD = "kernel: attention\nname: sample\ndtype: bf16\nhead_dim: 128\n"
CAUSAL = "mask_mod: q_idx >= kv_idx\n"
PER_BATCH = "lengths: {kv: {per_batch: true}}\n"


def spec(*lines: str) -> Loaded:
    return loads(HEAD + "".join(lines), "sample.yaml")


def shifts(loaded: Loaded) -> bool:
    """True if the mask depends on SQ, as it does if queries are aligned to the end."""
    return "SQ" in variables(positioned(loaded).trees["mask_mod"])


def test_queries_stand_at_the_end_of_a_cache() -> None:
    assert shifts(spec(CAUSAL, "passes: [forward, decode]\n"))
    assert shifts(spec(CAUSAL, "paged_kv: {page_size: 64}\npasses: [forward]\n"))
    assert shifts(spec(CAUSAL, "align: end\n"))
    assert not shifts(spec(CAUSAL))
    assert not shifts(spec(CAUSAL, PER_BATCH))
    assert not shifts(spec(CAUSAL, "align: start\npasses: [forward, decode]\n"))


def test_numbers_of_keys_are_a_buffer_and_a_condition() -> None:
    loaded = positioned(spec(PER_BATCH))
    assert loaded.spec.buffers["kv_lens"].shape == ("B",)
    assert reads(loaded.trees["mask_mod"]) == (Read("kv_lens", (Var("b", Type.INT),), Type.INT),)
    assert positioned(spec(CAUSAL)) == spec(CAUSAL)


@pytest.mark.parametrize(
    ("lines", "balanced"),
    [
        (CAUSAL, False),
        (CAUSAL + PER_BATCH, True),
        ("buffers: {lens: {shape: [B], dtype: int32}}\nmask_mod: kv_idx < lens[b]\n", True),
        # A search is a loop, which is not run for all sequences at once.
        (
            "buffers: {doc: {shape: [B, SK], dtype: int32, sorted: true}}\n"
            "mask_mod: doc[b, q_idx] == doc[b, kv_idx]\n",
            False,
        ),
    ],
)
def test_sequences_that_differ_share_programs(lines: str, balanced: bool) -> None:
    assert plan_decode(spec(lines, "passes: [forward, decode]\n")).balanced == balanced


def test_a_condition_on_the_head_bounds_no_tile() -> None:
    """The rows of a tile belong to several heads, so neither tiles nor loads may depend on the
    head.
    """
    mask = "buffers: {reach: {shape: [HQ], dtype: int32}}\nmask_mod: kv_idx < reach[h]\n"
    plan = plan_decode(spec(mask, "passes: [decode]\n")).attention
    (span,) = plan.forward.spans
    assert not reads(span.hi)
    assert "h" not in variables(plan.kv.live)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_pages_and_tiles(size: int) -> None:
    plan = plan_decode(spec(CAUSAL, f"paged_kv: {{page_size: {size}}}\npasses: [forward]\n"))
    assert plan.alone
    assert plan.page_per_tile == (size >= 64)


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256, 512, 576, 1024])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_tiles_fit(head_dim: int, dtype: str) -> None:
    text = HEAD.replace("bf16", dtype).replace("128", str(head_dim)) + "passes: [decode]\n"
    plan = plan_decode(loads(text, "sample.yaml"))
    size = 4 if dtype == "fp32" else 2
    for chip, tile in plan.tiles.items():
        streamed = tile.num_stages * tile.BLOCK_N * 2 * head_dim * size
        # fp32 heads above 512 fit only in the smallest tile.
        assert streamed <= SHARED_MEMORY[chip] or tile.BLOCK_N == 16
        assert tile.BLOCK_M >= 16
        assert tile.per_sm >= 1


def test_only_who_asks_decodes() -> None:
    assert not decodes(spec(CAUSAL))
    assert not decodes(spec(PER_BATCH))


def live(loaded: Loaded) -> LiveTiles:
    plan = plan_decode(loaded)
    return decode_kernel(plan, Lowering(plan.attention))


def test_the_length_of_a_sequence_is_loaded_once() -> None:
    window = "params: {WINDOW: 128}\n"
    mask = "mask_mod: (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)\n"
    for lines in (CAUSAL, window + mask):
        found = live(spec(lines, PER_BATCH, "passes: [forward, decode]\n"))
        text = "\n".join(line for of in found.live_lines for line in of.lines())
        assert text.count("tl.load(") == 1
        assert text.count("kv_lens_b") > 2


def test_only_spans_after_a_start_have_a_first_tile() -> None:
    passes = "passes: [forward, decode]\n"
    assert live(spec(CAUSAL, passes)).live_results == ["n_tiles"]
    assert live(spec(CAUSAL, passes)).tiles_counted == []
    sinks = "mask_mod: (q_idx >= kv_idx) & ((kv_idx < 4) | (q_idx - kv_idx < 128))\n"
    found = live(spec(sinks, passes))
    assert found.live_results == ["end_1", "first_2", "end_2"]
    (counted,) = found.tiles_counted
    assert counted.lines() == ["n_tiles = end_1 + (end_2 - first_2)"]


def test_a_tile_of_keys_that_is_loaded_at_once_is_in_one_page() -> None:
    def check(size: int) -> list[str]:
        loaded = spec(CAUSAL, f"paged_kv: {{page_size: {size}}}\npasses: [forward]\n")
        plan = plan_decode(loaded)
        checked = decode_kernels(plan, Lowering(plan.attention)).template.page_checked
        return [line for of in checked for line in of.lines()]

    said = '"a tile of keys must be within one page"'
    assert check(64) == [f"tl.static_assert(64 % BLOCK_N == 0, {said})"]
    assert check(8) == []


def test_lengths_are_hard() -> None:
    for turn in range(5):
        assert set(lengths(5, 300, turn).tolist()) == {300, 101, 0, 1, 299}
    assert {int(lengths(5, 300, turn)[0]) for turn in range(5)} == {300, 101, 0, 1, 299}
    assert int(lengths(7, 1, 0).max()) == 1
    assert lengths(1, 300, 2).tolist() == [300]
    assert NO_PAGE * 64 > 2**31


SHARES = """
import importlib, random, sys
from pathlib import Path
import torch, triton, triton.language as tl

sys.path.insert(0, str(Path(sys.argv[1]).parents[1]))
module = importlib.import_module("decode_gqa.triton")

@triton.jit
def shares(out_ptr, kv_lens_ptr, B, slots, SK, BATCHES: tl.constexpr, BLOCK_N: tl.constexpr):
    splits = module._splits_by_batch(0, B, slots, kv_lens_ptr, 1, 1, SK, BATCHES, BLOCK_N)
    batches = tl.arange(0, BATCHES)
    tl.store(out_ptr + batches, splits, mask=batches < B)

random.seed(0)
for _ in range(200):
    B = random.randint(1, 40)
    slots = B * random.randint(2, 9)
    lens = [random.choice([0, 1, 64, 65, random.randint(0, 9000)]) for _ in range(B)]
    lens = torch.tensor(lens, dtype=torch.int32)
    out = torch.full((B,), -1, dtype=torch.int32)
    shares[(1,)](out, lens, B, slots, 9000, BATCHES=triton.next_power_of_2(B), BLOCK_N=64)
    tiles = (lens + 63) // 64
    share = (tiles + out - 1) // out
    assert int(out.min()) >= 1 and int(out.sum()) <= slots, (lens, slots, out)
    # A slot for each, and what all have over the rest: no share is far above that.
    assert int(share.max()) <= 2 * (int(tiles.sum()) // (slots - B) + 2), (lens, slots, out)

for programs in (1, 3, 8, 64, 100, 263, 264, 265, 500, 4000):
    for most in (1, 2, 17, 128):
        for slots in (4, 264, 396):
            splits = module._splits(programs, most, slots)
            def busy(n):
                return programs * n / slots / -(-programs * n // slots)
            assert 1 <= splits <= most
            assert busy(splits) >= 0.85 * max(busy(n) for n in range(1, most + 1)) - 1e-9
print("fine")
"""


def test_programs_are_shared_out(tmp_path: Path, verdict: Any) -> None:
    """Every sequence gets a program, none gets more than it has work for, and the parts have
    similar sizes.
    """
    script = tmp_path / "shares.py"
    script.write_text(SHARES)
    path = ROOT / "generated" / "decode_gqa" / "triton.py"
    verdict(problem_of(load(ROOT / "specs/decode_gqa.yaml")), path)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


EMPTY_RANGES = [
    (
        "where(q_idx >= 512, kv_idx < 16, kv_idx >= 16) and (kv_idx < 20 or q_idx - kv_idx < 32)",
        "end",
        200,
    ),
    ("((q_idx < 32) != (kv_idx < 16)) and (kv_idx % 2 == 0 or q_idx >= kv_idx)", "start", 40),
]
"""Masks of several ranges. For one query, an earlier range is empty. With this number of keys, a
later one is not.
"""


@pytest.mark.parametrize(("mask", "align", "keys"), EMPTY_RANGES)
def test_an_empty_range_hides_no_later_one(
    mask: str, align: str, keys: int, tmp_path: Path, verdict: Any
) -> None:
    text = HEAD.replace("bf16", "fp32").replace("128", "16")
    text += f"mask_mod: {mask}\nalign: {align}\npasses: [forward, decode]\n"
    path = emitted(text, tmp_path)
    assert "first_2" in path.read_text()
    verdict(problem_of(loads(text, "sample.yaml")), path)
    assert not interpreted(failures, text, path, [Case("ranges", 1, keys, batch=2, lse=True)])
