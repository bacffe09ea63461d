"""Serving: specs, lists of items, batches in the interpreter, and bits that no batch changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.interpreters.own_process import interpreted
from support.interpreters.some_cases import emitted, failures

from kgen.kernels.attention.schedules.serve.plan import SEGMENT, depends_on_tile, plan_serve
from kgen.spec.load import Loaded, loads
from kgen.targets import sources
from kgen.verify.families import problem_of
from kgen.verify.toolchain import import_file

HEAD = "kernel: attention\nname: sample\ndtype: bf16\nhead_dim: 32\ngqa: any\n"
SERVE = "passes: [forward, serve]\n"
CAUSAL = "mask_mod: q_idx >= kv_idx\n"
LINEAR = (
    "buffers: {slopes: {shape: [HQ], dtype: fp32}}\n"
    "score_mod: score + slopes[h] * (kv_idx - q_idx)\n"
)
WINDOW = "mask_mod: q_idx >= kv_idx and q_idx - kv_idx < 40\n"
TWO_RANGES = (
    "mask_mod: where(q_idx >= 100, kv_idx < 16, kv_idx >= 16) and "
    "(kv_idx < 20 or q_idx - kv_idx < 32)\n"
)
BY_SEQUENCE = (
    "buffers: {reach: {shape: [B], dtype: int32}, bias: {shape: [HQ, any], dtype: fp32}}\n"
    "score_mod: score + bias[h, kv_idx]\n"
    "mask_mod: q_idx >= kv_idx and q_idx - kv_idx < reach[b]\n"
)
BATCHES = ("mixed-hnd", "mixed-joint", "one-long", "speculative", "prompts", "odd-pages", "empty")


def spec(*lines: str) -> Loaded:
    return loads(HEAD + SERVE + "".join(lines), "sample.yaml")


def test_only_who_asks_serves() -> None:
    (file, *_) = sources(loads(HEAD + CAUSAL, "sample.yaml"), "triton")
    assert not any("serve" in name or "append" in name for name in file.offers)
    (file, *_) = sources(spec(CAUSAL), "triton")
    assert {"sample_serve", "sample_serve_workspace", "sample_append"} <= {*file.offers}
    assert file.unbuilt == "serve"


def test_queries_are_at_the_end() -> None:
    assert spec(CAUSAL).spec.aligned_to_end
    assert not loads(HEAD + CAUSAL, "sample.yaml").spec.aligned_to_end


def test_segments_are_whole_tiles() -> None:
    plan = plan_serve(spec(CAUSAL, "deterministic: batch\n"))
    assert not plan.many
    assert all(SEGMENT % tile.BLOCK_N == 0 for tile in plan.few.values())


def test_a_linear_score_depends_on_its_tile() -> None:
    assert depends_on_tile(plan_serve(spec(LINEAR, CAUSAL)).attention)
    assert not depends_on_tile(plan_serve(spec(BY_SEQUENCE)).attention)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(f"{CAUSAL}sinks: true\nkv_dtype: fp8_e4m3\n", marks=pytest.mark.thorough),
        f"{WINDOW}sinks: true\nkv_dtype: int8\n",
        pytest.param(f"{CAUSAL}{LINEAR}sinks: true\n", marks=pytest.mark.thorough),
        pytest.param(TWO_RANGES, marks=pytest.mark.thorough),
        pytest.param(BY_SEQUENCE, marks=pytest.mark.thorough),
        f"{WINDOW}deterministic: batch\nsinks: true\n",
    ],
    ids=["fp8", "int8", "linear", "ranges", "by-sequence", "batch"],
)
def test_batches(lines: str, tmp_path: Path, verdict: Any) -> None:
    text = HEAD + SERVE + lines
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "spec.yaml")), path)
    assert not interpreted(failures, text, path, [f"serve-{name}" for name in BATCHES])


def test_launches_of_a_quantized_cache(tmp_path: Path, verdict: Any) -> None:
    """Check the launches and the misuse of a cache with scales of tokens."""
    text = f"{HEAD}{SERVE}{CAUSAL}kv_dtype: fp8_e4m3\n"
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "spec.yaml")), path)
    interpreted(_check_launches, text, path)


def test_small_scales_of_fp16_keep_bits(tmp_path: Path, verdict: Any) -> None:
    """Check values of FP16 whose scales are below its smallest number."""
    text = f"{HEAD.replace('bf16', 'fp16')}{SERVE}{CAUSAL}kv_dtype: fp8_e5m2\n"
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "spec.yaml")), path)
    interpreted(_check_small_scales, path)


def test_no_batch_changes_bits(tmp_path: Path, verdict: Any) -> None:
    text = f"{HEAD}{SERVE}{CAUSAL}deterministic: batch\nsinks: true\nkv_dtype: fp8_e4m3\n"
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "spec.yaml")), path)
    interpreted(_keep_bits, text, path)


@pytest.mark.thorough
def test_64_requests_in_20_schedules(tmp_path: Path, verdict: Any) -> None:
    """Compare all bits of 64 requests, with random chunks, orders and neighbors."""
    text = f"{HEAD}{SERVE}{WINDOW}deterministic: batch\nsinks: true\nkv_dtype: int8\n"
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "spec.yaml")), path)
    interpreted(_keep_bits_of_64, text, path)


def test_schedules_would_find_other_bits(tmp_path: Path, verdict: Any) -> None:
    """Without `deterministic: batch`, the check of schedules fails."""
    text = HEAD + SERVE + CAUSAL
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "spec.yaml")), path)
    with pytest.raises(AssertionError, match="differs from each request alone"):
        interpreted(_keep_bits, text, path)


def test_lists_have_each_tile_once(tmp_path: Path, verdict: Any) -> None:
    text = HEAD + SERVE + WINDOW
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "spec.yaml")), path)
    interpreted(_check_lists, path)


def _subject(text: str, path: Path) -> Any:
    from kgen.verify import interpreter
    from kgen.verify.families import Subject

    interpreter.mend()
    problem = problem_of(loads(text, "spec.yaml"))
    return Subject(problem, "triton", path, import_file(path, "kgen_test_serve"), "cpu")


def _keep_bits(text: str, path: Path) -> None:
    from kgen.kernels.attention.verify.schedules import keep_bits

    keep_bits(_subject(text, path), schedules=2)


def _check_launches(text: str, path: Path) -> None:
    from kgen.kernels.attention.verify.launches import launches_what_it_compiled_for
    from kgen.kernels.attention.verify.serve_checks import check_serving

    launches_what_it_compiled_for(_subject(text, path))
    check_serving(_subject(text, path))


def _check_small_scales(path: Path) -> None:
    import torch

    from kgen.verify import interpreter

    interpreter.mend()
    module: Any = import_file(path, "kgen_test_serve")
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 40, 1, 32), generator=random) for _ in range(3))
    pages = [(1000 * x).to(torch.float8_e5m2) for x in (k, v)]
    scales = [torch.full((1, 40, 1), x) for x in (1e-3, 2e-8)]
    lengths = torch.tensor([40], dtype=torch.int32)
    found = module.sample_serve(
        q[0].half(), *pages, block_table=torch.zeros((1, 1), dtype=torch.int32), seq_lens=lengths,
        cu_seqlens_q=torch.tensor([0, 40], dtype=torch.int32), k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    k, v = (x.double() * s[..., None].double() for x, s in zip(pages, scales, strict=True))
    scores = q[0, :, 0].half().double() @ k[0, :, 0].T * 32**-0.5
    hidden = torch.ones((40, 40)).triu(1).bool()
    wanted = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[0, :, 0]
    assert (found[:, 0] - wanted).norm() < 2e-2 * wanted.norm()


def _keep_bits_of_64(text: str, path: Path) -> None:
    from kgen.kernels.attention.verify.schedules import CROWD, keep_bits

    assert len(CROWD.lengths) == 64
    keep_bits(_subject(text, path), 20, CROWD)


def _check_lists(path: Path) -> None:
    """Check the items and the split tiles of random batches: each part once, in a slot of its
    own.
    """
    import random

    import torch

    from kgen.verify import interpreter

    interpreter.mend()
    module: Any = import_file(path, "kgen_test_serve")
    random.seed(0)
    heads_kv, group = 2, 2
    for _ in range(25):
        processors = random.choice([1, 5, 40])
        module._multiprocessors = lambda device, count=processors: count
        module._serve_lists.cache_clear()
        new = [random.choice([0, 1, 1, 3, 40, 90]) for _ in range(random.randint(1, 150))]
        keys = [n + random.choice([0, 5, 300, 2000]) for n in new]
        total = sum(new)
        if not total:
            continue
        ends = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        sizes = (total, len(new), heads_kv * group, heads_kv, None, torch.device("cpu"))
        words, rows, lists, _ = module._serve_lists(*sizes)
        assert 4 * words == module.sample_serve_workspace(*sizes[:4], device="cpu")
        work = torch.full((words,), -1, dtype=torch.int32)
        limits = [of[3:] for of in (lists[0], lists[-1])]
        module._serve_items_kernel[(len(lists),)](
            work, torch.tensor(keys, dtype=torch.int32), ends, len(new), total, 4000, rows,
            *limits[0], *limits[1], GQA=group,
            BLOCK_M_0=lists[0][1], BLOCK_N_0=64, BLOCK_M_1=lists[-1][1], BLOCK_N_1=64,
            BLOCK_B=128, BLOCK_I=128,
        )  # fmt: skip
        found: dict[tuple[int, int], list[int]] = {}
        for _, block_m, count_at, items_at, merges_at, _, most, _, slots, _ in lists:
            count, split = work[count_at : count_at + 2].tolist()
            assert count <= most
            assert bool((work[items_at + 8 * count : items_at + 8 * most] == -1).all())
            taken: set[int] = set()
            for item in work[items_at : items_at + 8 * count].view(-1, 8).tolist():
                b, row, part, parts, slot, merge = item[:6]
                assert row % block_m == 0
                found.setdefault((b, row), []).append(part)
                if parts == 1:
                    continue
                assert slot + part not in taken
                assert slot + parts <= slots
                taken.add(slot + part)
                entry = work[merges_at + 4 * merge : merges_at + 4 * merge + 4].tolist()
                assert merge < split
                assert entry == [b, row, slot, parts]
        wanted = {
            (b, row)
            for b, n in enumerate(new)
            for row in range(0, n * group, _rows(lists, rows, n * group))
        }
        assert found.keys() == wanted
        for parts in found.values():
            assert sorted(parts) == list(range(len(parts)))


def _rows(lists: Any, most: int, rows: int) -> int:
    """Return the rows of the tiles of a sequence."""
    block: int = lists[0][1] if rows <= most else lists[1][1]
    return block
