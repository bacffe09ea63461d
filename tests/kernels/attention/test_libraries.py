"""Peers from other libraries: their masks, arguments and results, with stand-ins for the libraries.

The stand-ins compute in PyTorch from the arguments that the libraries document.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import attn_gym.masks
import attn_gym.mods
import pytest
import torch
from support.specs.hand_built import ALIBI, CAUSAL, PADDING, SCORE, H, K, Q, buffer, call, loaded
from torch import Tensor

from kgen.bench.peers import DoesNotApply, NotInstalled
from kgen.bench.timing import BenchJob
from kgen.diagnostics import KgenError
from kgen.expr.nodes import Node, Read, Type
from kgen.kernels.attention.bench import intervals, libraries, peers
from kgen.kernels.attention.bench.contenders import contenders, prepared
from kgen.kernels.attention.bench.intervals import Window, window
from kgen.kernels.attention.bench.shape import DEFAULT_PEERS, PEERS, Shape, neutral
from kgen.kernels.attention.bench.workload import Workload, draw_workload
from kgen.kernels.attention.verify.problem import Problem, problem_of
from kgen.spec.load import load_variants
from kgen.verify.evaluate import evaluate

ROOT = Path(__file__).resolve().parents[3]
NEUTRAL = sorted((ROOT / "benchmarks/neutral").glob("*.yaml"))
APART = call("sub", Q, K)
WINDOW = call("and", CAUSAL, call("lt", APART, 5))
BOTH_SIDES = call("and", call("le", APART, 3), call("le", call("neg", APART), 2))
TWO_PARTS = call("or", WINDOW, call("lt", K, 3))
SAME = call("eq", Read("doc", (Q,), Type.INT), Read("doc", (K,), Type.INT))
DILATED = call("eq", call("mod", APART, 2), 0)
BY_HEAD = call("lt", K, Read("ends", (H,), Type.INT))
BUFFERS = {
    "slopes": buffer(("HQ",), "fp32"),
    "lens": buffer(("B",), "int32"),
    "ends": buffer(("HQ",), "int32"),
    "doc": buffer(("SQ",), "int32", sorted=True),
}
MASKS = {
    "none": None,
    "causal": CAUSAL,
    "window": WINDOW,
    "both sides": BOTH_SIDES,
    "two parts": TWO_PARTS,
    "documents": call("and", SAME, CAUSAL),
    "by batch": PADDING,
    "by head": BY_HEAD,
    "no keys": call("gt", Q, K),
}


def made(mask: Node | None, score: Node | None = None, **changes: Any) -> Workload:
    """Return a workload of 2 batch entries, 4 query heads, 2 KV heads and 48 tokens."""
    trees = {"mask_mod": mask, "score_mod": score}
    one = loaded("s", dtype="bf16", buffers=BUFFERS, **{k: t for k, t in trees.items() if t})
    problem = replace(problem_of(one), **changes)
    found = draw_workload(problem, 2, 4, 48, "cpu", kv_heads=2)
    if not problem.varlen:
        found.buffers["lens"].copy_(torch.tensor([48, 17]))
        found.buffers["ends"].copy_(torch.tensor([1, 48, 20, 33]))
    return found


def seen(workload: Workload) -> Tensor:
    """Return the mask as bool [B, HQ, SQ, SK]."""
    size, tree = workload.sizes, workload.problem.mask_mod
    shape = [size[name] for name in ("B", "HQ", "SQ", "SK")]
    if tree is None:
        return torch.ones(shape, dtype=torch.bool)
    axes = [
        torch.arange(n).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(shape)
    ]
    env = {**size, **workload.params, **workload.buffers}
    env |= dict(zip(("b", "h", "q_idx", "kv_idx"), axes, strict=True))
    return evaluate(tree, env, torch).expand(shape)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float = 0.0) -> Tensor:
    """Return attention of [B, S, H, D] tensors in fp32, under a mask [B, HQ, SQ, SK]."""
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = cap * torch.tanh(scores / cap) if cap else scores
    p = torch.softmax(scores.masked_fill(~mask, -1e30), -1).masked_fill(~mask, 0.0)
    return (p @ v).transpose(1, 2)


def band(length: int, left: int | None, right: int | None) -> Tensor:
    """Return the mask of a window, [S, S]."""
    apart = torch.arange(length)[:, None] - torch.arange(length)
    found = torch.ones(length, length, dtype=torch.bool)
    found = found if left is None else found & (apart <= left)
    return found if right is None else found & (-apart <= right)


@pytest.mark.parametrize("name", MASKS)
def test_intervals_are_the_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "ROWS", 5)
    workload = made(MASKS[name])
    ends, keys = intervals.intervals(workload), torch.arange(48)
    assert ends.dtype == torch.int32
    inside = (keys >= ends[..., :1]) & (keys < ends[..., 1:])
    found = inside.any(-2).transpose(0, 1).expand(2, 4, 48, 48)
    assert torch.equal(found, seen(workload))
    # cuDNN rejects endpoints that decrease.
    points = libraries.endpoints(workload)
    assert points.shape[1] % 2 == 1
    assert bool((points.diff(dim=1) >= 0).all())
    assert 0 <= int(points.min()) <= int(points.max()) <= 48
    assert torch.equal(from_endpoints(points, 2, 48).expand(2, 4, 48, 48), seen(workload))


def from_endpoints(points: Tensor, batch: int, keys: int) -> Tensor:
    """Return the mask of cuDNN's endpoints [H, N, B * SQ], as [B, H, SQ, SK]."""
    ends = torch.nn.functional.pad(points.transpose(1, 2), (1, 0)).unflatten(1, (batch, -1))
    places = torch.arange(keys)[:, None]
    inside = (places >= ends[..., None, 0::2]) & (places < ends[..., None, 1::2])
    return inside.any(-1).transpose(0, 1)


def test_masks_with_too_many_intervals_do_not_apply() -> None:
    with pytest.raises(DoesNotApply):
        intervals.intervals(draw_workload(made(DILATED).problem, 1, 1, 4 * intervals.MOST, "cpu"))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("none", Window(None, None)),
        ("causal", Window(None, 0)),
        ("window", Window(4, 0)),
        ("both sides", Window(3, 2)),
        *((name, None) for name in ("two parts", "documents", "by batch", "by head", "no keys")),
    ],
)
def test_a_window_is_equal_to_the_mask(name: str, wanted: Window | None) -> None:
    workload = made(MASKS[name])
    if wanted is None:
        with pytest.raises(DoesNotApply):
            window(workload)
        return
    assert window(workload) == wanted
    found = band(48, wanted.left, wanted.right)
    assert torch.equal(found.expand(2, 4, 48, 48), seen(workload))


@pytest.mark.parametrize(
    ("tree", "cap"),
    [
        (None, 0.0),
        (call("mul", 20.0, call("tanh", call("div", SCORE, 20.0))), 20.0),
        (call("mul", 20.0, call("tanh", call("div", SCORE, 10.0))), None),
        (call("mul", SCORE, 0.5), None),
        (SCORE, None),
        (ALIBI, None),
        (call("add", SCORE, call("sub", K, Q)), None),
    ],
)
def test_a_soft_cap_is_the_score_modification(tree: Node | None, cap: float | None) -> None:
    workload = made(CAUSAL, tree)
    if cap is None:
        with pytest.raises(DoesNotApply):
            libraries.softcap(workload)
    else:
        assert libraries.softcap(workload) == pytest.approx(cap)


# --- stand-ins ------------------------


class Cudnn(ModuleType):
    """Stand-in for `cudnn.flex_attention`."""

    def create_mask_plan(self, points: Tensor, *qkv: Tensor, build_backward: bool) -> Any:
        assert points.dtype == torch.int32
        assert points.is_contiguous()
        return points, [x.shape for x in qkv], build_backward

    def flex_attn_func(self, q: Tensor, k: Tensor, v: Tensor, *, mask_plan: Any) -> Tensor:
        points, shapes, learns = mask_plan
        assert [x.shape for x in (q, k, v)] == shapes
        assert learns or not q.requires_grad
        mask = from_endpoints(points, q.shape[0], k.shape[1]).expand(-1, q.shape[2], -1, -1)
        return attend(q, k, v, mask).to(q.dtype)


class Flash(ModuleType):
    """Stand-in for FlashAttention, whose number of an unbounded side is `unbounded`."""

    unbounded: int | None

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        window_size: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
    ) -> Any:
        sides = window_size or (self.unbounded, self.unbounded)
        left, right = (None if n == self.unbounded else n for n in sides)
        mask = band(q.shape[1], left, 0 if causal else right)
        out = attend(q, k, v, mask.expand(*q.shape[::2], *mask.shape), softcap)
        # FlashAttention-4 also returns the log-sum-exp.
        return out.to(q.dtype) if self.unbounded == -1 else (out.to(q.dtype), None)

    def flash_attn_varlen_func(self, q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
        ends = named.pop("cu_seqlens_q").tolist()
        assert ends == named.pop("cu_seqlens_k").tolist()
        longest = max(b - a for a, b in itertools.pairwise(ends))
        assert named.pop("max_seqlen_q") == named.pop("max_seqlen_k") == longest
        parts = [
            self.flash_attn_func(*(x[None, a:b] for x in (q, k, v)), **named)
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat([libraries._only_out(part)[0] for part in parts])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cudnn", "flash_attn"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", Cudnn("cudnn.flex_attention"))
    for name, unbounded in (("flash_attn_interface", -1), ("flash_attn.cute", None)):
        library = Flash(name)
        library.unbounded = unbounded
        monkeypatch.setitem(sys.modules, name, library)


CAP = call("mul", 1.0, call("tanh", call("div", SCORE, 1.0)))
LIBRARIES = ("cudnn-flex", "fa3", "fa4")
RACES: list[tuple[Node | None, Node | None, dict[str, Any], tuple[str, ...]]] = [
    *((MASKS[name], None, {}, LIBRARIES) for name in ("none", "causal", "window", "both sides")),
    *((MASKS[name], None, {}, LIBRARIES[:1]) for name in ("two parts", "by batch", "by head")),
    (CAUSAL, CAP, {}, LIBRARIES[1:]),
    (CAUSAL, ALIBI, {}, ()),
    (CAUSAL, None, {"sinks": True}, ()),
    (CAUSAL, None, {"dtype": "fp32"}, ()),
    (CAUSAL, None, {"varlen": True}, LIBRARIES),
    (None, None, {"varlen": True}, LIBRARIES),
    (WINDOW, None, {"varlen": True}, LIBRARIES[:1]),
    (CAUSAL, None, {"passes": ("forward",)}, LIBRARIES),
]


@pytest.mark.parametrize(("mask", "score", "changes", "able"), RACES, ids=range(len(RACES)))
def test_libraries_compute_the_spec(
    mask: Node | None,
    score: Node | None,
    changes: dict[str, Any],
    able: tuple[str, ...],
    stand_ins: None,
) -> None:
    """The stand-ins get arguments with which they agree with eager PyTorch, in both passes."""
    workload = made(mask, score, **changes)
    problem = workload.problem
    if problem.sinks:
        workload = replace(workload, buffers={**workload.buffers, "sinks": torch.zeros(4)})
    job = BenchJob(problem, {}, ("eager", *LIBRARIES), Shape(), "cpu")
    attentions, failed = prepared(job, workload, {})
    assert (tuple(attentions), failed) == (("eager", *able), {})
    for pass_ in problem.passes:
        found = contenders(pass_, workload, attentions, failed, "cpu")
        assert ([one.name for one in found], failed) == (["eager", *able], {})


def test_a_wrong_window_is_found(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that compute another mask fail the comparison, so the test above can fail."""
    monkeypatch.setattr(libraries, "window", lambda workload: Window(9, 0))
    workload = made(WINDOW)
    job = BenchJob(workload.problem, {}, ("eager", "fa3"), Shape(), "cpu")
    attentions, failed = prepared(job, workload, {})
    assert [one.name for one in contenders("forward", workload, attentions, failed, "cpu")] == [
        "eager"
    ]
    assert "disagrees with eager" in failed["fa3"].text
    assert not failed["fa3"].missing


@pytest.mark.parametrize("peer", ["cudnn-flex", "fa3", "fa4", "flex-flash"])
def test_missing_libraries_say_how_to_install_them(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cudnn", "flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotInstalled, match=r"^not installed: (pip install|build) .* \(no module"):
        peers.prepare(peer, made(CAUSAL), {})
    assert peer in DEFAULT_PEERS
    assert peer in PEERS


# --- neutral specs and shapes ------------------------


def test_shapes_of_other_projects() -> None:
    def shapes(dtype: str, dim: int) -> dict[str, Shape]:
        return neutral(Problem("n", dtype, dim, dim))

    wide = shapes("bf16", 128)
    assert wide["4x16x4x32768"] == replace(Shape.parse("4x16x4x32768"), documents=4)
    assert wide["8x32x32x8192"].kv_heads == 32
    assert len(shapes("bf16", 64)) == 10
    assert set(shapes("fp16", 64)) == {"2x32x32x1024", "2x32x32x2048", "2x32x32x4096"}
    assert shapes("fp16", 96) == {}
    with pytest.raises(KgenError, match="not a shape"):
        Shape.parse("2x16x3x8192")


def test_packed_shapes_have_a_sequence_per_batch_entry() -> None:
    problem = replace(made(CAUSAL).problem, varlen=True)
    found = draw_workload(problem, 3, 2, 100, "cpu", documents=3)
    assert found.packing is not None
    lengths = found.packing.cu_seqlens.diff().tolist()
    assert sum(lengths) == 300
    assert len(lengths) == 3 == len(set(lengths))
    assert all(70 < length < 130 for length in lengths)


def _as_attention_gym(name: str) -> tuple[Any, Any]:
    """Return attention-gym's `mask_mod` and `score_mod` of a neutral spec."""
    masks, mods = attn_gym.masks, attn_gym.mods
    return {
        "neutral_noop": (None, None),
        "neutral_causal": (masks.causal_mask, None),
        "neutral_alibi": (masks.causal_mask, mods.generate_alibi_bias(4)),
        "neutral_sliding_window": (masks.generate_sliding_window(2048), None),
        "neutral_document_mask": (masks.causal_mask, None),
        "neutral_prefix_lm": (masks.generate_prefix_lm_mask(512), None),
        "neutral_softcap": (masks.causal_mask, mods.generate_tanh_softcap(50)),
    }[name]


@pytest.mark.parametrize("path", NEUTRAL, ids=lambda path: path.stem)
def test_neutral_specs_are_those_of_attention_gym(path: Path) -> None:
    small, large = load_variants(path)
    problem = problem_of(small)
    assert [problem.head_qk, problem_of(large).head_qk] == [64, 128]
    assert (problem.name, problem.gqa) == (path.stem, "any")
    mask_mod, score_mod = _as_attention_gym(path.stem)
    length, heads = 2100, torch.arange(4)[:, None, None]
    q_idx, kv_idx = torch.arange(length)[:, None], torch.arange(length)
    env = {"SQ": length, "SK": length, "HQ": 4, "b": 0, "h": heads}
    env |= {"q_idx": q_idx, "kv_idx": kv_idx}
    assert (mask_mod is None) == (problem.mask_mod is None)
    assert (score_mod is None) == (problem.score_mod is None)
    if mask_mod is not None:
        found = evaluate(problem.mask_mod, env, torch)
        assert torch.equal(found, mask_mod(torch.tensor(0), heads, q_idx, kv_idx))
    if score_mod is not None:
        score = torch.randn(4, length, length) * 30
        found = evaluate(problem.score_mod, env | {"score": score}, torch, torch.float32)
        torch.testing.assert_close(found, score_mod(score, 0, heads, q_idx, kv_idx))


def test_every_mask_of_attention_gyms_configs_is_there() -> None:
    names = {path.stem.removeprefix("neutral_") for path in NEUTRAL}
    assert names >= {"noop", "causal", "alibi", "sliding_window", "document_mask"}
