"""The kernels for Hopper: compared with float64 in `kgen.verify.gluon` on the CPU, and compiled."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.interpreters.single_file import single
from support.running.linting import wrong_names

from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.schedules.hopper.cases import for_hopper
from kgen.kernels.attention.schedules.hopper.plan import plan_hopper
from kgen.kernels.attention.verify.inputs import Case
from kgen.spec.load import load, loads
from kgen.verify.families import problem_of
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parents[3]
ALL = {"forward", "dq", "dkdv"}
FUSED = {"forward", "dq", "backward"}

# Searched ranges, a window, a causal mask with grouped queries, and a bias of the keys. A mask in
# all tiles, no mask, and scores that use a function: of two, one is kept in the factor of dP.
# Ranges of a few tiles, and a range that depends on the tile of keys.
DENSE = [
    "document_causal",
    "batched_documents",
    "sliding_window",
    "llama3_gqa",
    "causal_alibi",
    "dilated",
    "full",
    "softcap_causal",
    "swish",
    "near",
    "prefix_lm",
]
# Keys past an end that the mask knows: of caches, with a window, from a buffer.
ENDING = ["decode_gqa", "decode_sliding_window", "padding"]
# Pages: two per tile, eight per tile, half a page per tile.
PAGED = ["decode_paged", "pages_of_16", "pages_of_256"]
# A causal mask. A bias, with ranges that begin past the keys of a sequence. A function of the
# score.
PACKED = ["varlen_causal", "packed_window", "packed_softcap"]
# A bias per pair of positions. First without a mask, then in windows, per batch, in 16 bits. Then
# in frames of several tiles: a half of the rows skips more tiles than the rings hold, at either
# end.
PAIRS = ["pair_bias", "biased_window", "biased_frames", "biased_frames_after"]
# Blocks of a block mask: per batch, and per head with grouped queries.
LISTED = ["causal_images", "block_sparse"]
# Keys wider than values: a causal mask, packed sequences with a window and a bias, keys past an
# end.
LATENT = ["mla_prefill", "packed_latent", "ragged_latent"]
# Heads of 256: bounded scores in a window with grouped queries, no mask, gradients of buffers, and
# packed sequences. Also keys past an end, with grouped queries and with a function, and a block
# mask.
BROAD = [
    "gemma2",
    "broad_full",
    "broad_learned",
    "broad",
    "broad_padded",
    "packed_broad",
    "broad_images",
]
# Heads with fewer columns than a tile: for two consumers, for three, and in the kernels for 256
# columns.
FILLED = {"filled": FUSED, "filled_narrow": {"forward", "dkdv"}, "filled_broad": ALL}
# Steps in a bias, a conditional derivative, promised lengths, open extents.
ODD = {
    "key_tables": FUSED,
    "steps": ALL,
    "leaky": FUSED,
    "promised_window": FUSED,
    "promised_full": FUSED,
}
# Gradients of buffers: per head, of one number, per head and query. The last also has a mask that
# hides NaN. Then packed sequences.
LEARNED = ["head_scale", "learned_slopes", "learned_logs", "learned_numbers", "packed_learned"]
# 64-bit integers: searched, and as ends of the keys.
WIDE = {"documents_of_64_bits": ALL, "lengths_of_64_bits": FUSED}
# Specs with separate backward kernels: a derivative of two values of a pair, documents.
TWO = ["swish", "document_causal", "batched_documents"]
KERNELS = {
    **dict.fromkeys([*DENSE, *PACKED, *LEARNED, *BROAD], ALL),
    **dict.fromkeys([name for name in [*DENSE, *LISTED] if name not in TWO], FUSED),
    # Heads of 64: a causal mask, no mask, a window, a function of packed sequences.
    "causal_d64": {"forward", "dkdv"},
    "full_d64_fp16": {"forward", "dkdv"},
    "gpt_oss": {"dkdv"},
    "packed_narrow": {"dkdv"},
    **dict.fromkeys(LATENT, ALL),
    **{name: {"forward"} for name in [*ENDING, *PAGED, *PAIRS, "ragged_latent"]},
    "padding": FUSED,
    **FILLED,
    **ODD,
    **WIDE,
}

SEEDS = range(1000, 1000 * int(os.environ.get("KGEN_ORDERS", "4")) + 1, 1000)
"""Seeds of the orders after the first. Each further program of a launch uses the next seed."""


@pytest.mark.parametrize("name", KERNELS)
def test_verified(name: str, tmp_path: Path, verdict: Any) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(single(_spec(name)))
    verdict(_problem(name), path)
    launched, wrong = interpreted(_verify, name, path)
    assert not wrong, "\n".join(wrong)
    assert launched.keys() == {f"_{kernel}_hopper_kernel" for kernel in KERNELS[name]}
    assert min(launched.values()) >= (1 if "frames" in name else 3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", KERNELS)
def test_verified_in_other_orders(name: str, verdict: Any) -> None:
    """Run the partitions and asynchronous operations in the orders of other seeds."""
    path = _rendered(name)
    verdict(_problem(name), path)
    wrong = {seed: found for seed in SEEDS if (found := interpreted(_verify, name, path, seed)[1])}
    assert not wrong


# Mistakes that let a neighbor's NaN in, because zero times NaN is NaN.
LEAKS = {
    "": ("", ""),
    "delta past the end": (
        "args.delta_ptr + h.to(gl.int64) * problem.TQ + q_begin + q_idx, mask=q_idx < SQ",
        (
            "args.delta_ptr + h.to(gl.int64) * problem.TQ + q_begin + q_idx, mask=q_begin + q_idx "
            "< problem.TQ"
        ),
    ),
    "dP of rows without keys": (
        "gl.where(mask, ds, 0.0)",
        "gl.where(mask, p, 0.0) * (dp - delta[:, None])",
    ),
    "keys past the end": (
        "k_desc, [FAR, kv_end, h_kv, FAR - SK + kv_start, 0]",
        "k_desc, [FAR, problem.TK, h_kv, FAR - problem.TK + kv_begin + kv_start, 0]",
    ),
    "queries past the end": (
        "do_desc, [FAR, q_end, h, FAR - SQ + q_start, 0]",
        "do_desc, [FAR, problem.TQ, h, FAR - problem.TQ + q_begin + q_start, 0]",
    ),
    "results past the end": (
        "o_desc, [FAR, q_end, h, FAR - SQ + q_start, 0]",
        "o_desc, [FAR, problem.TQ, h, FAR - problem.TQ + q_begin + q_start, 0]",
    ),
}


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("leak", LEAKS)
def test_packed_neighbours(leak: str, head_dim: int, tmp_path: Path, verdict: Any) -> None:
    """Results of a sequence are bitwise the same if neighboring sequences and tokens contain
    NaN.
    """
    right, wrong = LEAKS[leak]
    spec = (
        (ROOT / "specs" / "varlen_causal.yaml")
        .read_text()
        .replace("head_dim: 128", f"head_dim: {head_dim}")
    )
    text = single(loads(spec, "varlen_causal.yaml"))
    assert right in text
    path = tmp_path / "varlen_causal.py"
    path.write_text(text.replace(right, wrong))
    verdict(_problem("varlen_causal"), path)
    assert bool(interpreted(_changed_by_neighbours, path, head_dim)) == bool(leak)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        (
            "gl.minimum(gl.maximum(gl.load(cu_seqlens_ptr + b), 0), total)",
            "gl.load(cu_seqlens_ptr + b)",
        ),
        ("gl.minimum(gl.load(cu_others_ptr + after), others)", "gl.load(cu_others_ptr + after)"),
        ("gl.maximum(slot - begin // BLOCK - b, 0)", "slot - begin // BLOCK - b"),
    ],
    ids=["", "begin", "end of the others", "tile"],
)
def test_wrong_offsets_stay_in_their_tensors(
    right: str, wrong: str, tmp_path: Path, verdict: Any
) -> None:
    path = tmp_path / "varlen_causal.py"
    path.write_text(single(_spec("varlen_causal")))
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    verdict(_problem("varlen_causal"), path)
    assert bool(interpreted(_left_its_tensors, path)) == bool(right)


def _swapped(first: str, second: str, after: str = "") -> tuple[str, str]:
    """Return two lines, and the same lines in the wrong order."""
    return f"{first}\n{second}\n{after}", f"{second}\n{first}\n{after}"


def _release(ring: str, indent: int = 8, i: str = "n_used") -> str:
    return f"{' ' * indent}_consumer_release({ring}, {i})"


SCORES_OF_KEYS = "        qk_async = _async_dot_nt(q, _keys(kv_ring, n_used), SCORES)\n"
WAIT_FOR_KEYS = "        _consumer_wait(kv_ring, n_used)\n"
WAIT_FOR_DELTA = (
    "        gdc_wait()  # for delta; the next kernel starts after this, "
    "so it need not wait for delta"
)
ACC = "        acc = warpgroup_mma_wait(0, deps=[acc_async])"
DV_DK = "        dv, dk = warpgroup_mma_wait(0, deps=[dv_async, dk_async])"
DQ = "        dq = warpgroup_mma_wait(0, deps=[dq_async])"
# Each of these mistakes is a race on a GPU, which the interpreter must find.
EARLY = {
    "keys freed before they are read": _swapped(
        "    qk = warpgroup_mma_wait(PENDING, deps=[qk_async])",
        "    if PENDING == 0:\n"
        "        _consumer_release(kv_ring, i)  # the first slot has only K, "
        "because V is one tile behind",
    ),
    "keys and values freed before they are read": _swapped(
        ACC, _release("kv_ring"), "        acc = _res"
    ),
    "keys and values read before they are there": (
        f"{WAIT_FOR_KEYS}{SCORES_OF_KEYS}        acc_async",
        f"{SCORES_OF_KEYS}        acc_async",
    ),
    "keys and values of dq read before they are there": (
        f"{WAIT_FOR_KEYS}{SCORES_OF_KEYS}        dp_async",
        f"{SCORES_OF_KEYS}        dp_async",
    ),
    "the last values read before they are there": (
        f"{WAIT_FOR_KEYS}        acc_async =",
        "        acc_async =",
    ),
    "values overwritten before both consumers have used them": (
        "after = i + SLOTS - slots.shape[0]",
        "after = i",
    ),
    "delta read before it is there": (
        "gdc_wait()  # for delta",
        "pass  # for delta",
    ),
    "dq begins before delta is there": _swapped(
        WAIT_FOR_DELTA,
        "        gdc_launch_dependents()",
    ),
    "dq over before dk and dv": (
        "    gdc_wait()  # dq overlaps",
        "    pass  # dq overlaps",
    ),
    "tiles published before the counter is zero": (
        "            gdc_wait()  # forward",
        "            pass  # forward",
    ),
    "pairs read before they are there": (
        "_consumer_load(fixed.pair_ring, i - fixed.item, SCORES)",
        "(_slot(fixed.pair_ring.slots, (i - fixed.item) % 4).load(SCORES) + 0, "
        "_consumer_release(fixed.pair_ring, i - fixed.item))[0]",
    ),
    "pairs overtaken by the next": (
        "_consumer_load(fixed.pair_ring, i - fixed.item, SCORES)",
        "(_consumer_tile(fixed.pair_ring, i - fixed.item).load(SCORES), "
        "_consumer_release(fixed.pair_ring, i - fixed.item))[0]",
    ),
    "queries of few keys overtaken by the next": (
        "    fence_async_shared()\n    _consumer_release(ring",
        "    _consumer_release(ring",
    ),
    "queries freed before dk is there": _swapped(DV_DK, _release("q_ring")),
    "keys freed before dq is there": _swapped(
        DQ, _release("kv_ring", i="n_used - 1"), "        n_used"
    ),
    "dS stored before both consumers are done with the one before": (
        "    mbarrier.wait(ds_tiles.full.index(i & 1), i >> 1 & 1)",
        "    pass",
    ),
    "queries freed before dk and dq are there": _swapped(
        DV_DK, _release("q_ring"), "        n_used += 1\n        # Zero"
    ),
    "broad: values freed before dP is there": (
        "        ds = _dq_hopper_gradient(\n            qk_async, dp_async",
        (
            "        _consumer_release(v_ring, n_used)\n        ds = _dq_hopper_gradient(\n"
            "            qk_async, dp_async"
        ),
    ),
    "broad: factors read before they are there": (
        "mbarrier.wait(factors.full.index(slot), n_used // SLOTS & 1)",
        "pass",
    ),
    "broad: queries freed before dk is there": _swapped(
        "                dk = warpgroup_mma_wait(0, deps=[dk_async])", _release("q_ring", 16)
    ),
    "broad: keys freed before dq is there": _swapped(DQ, _release("k_ring")),
    "rope dims: queries freed before dk is there": _swapped(
        "            dk, dk_rope = warpgroup_mma_wait(0, deps=[dk_async, dk_rope_async])",
        _release("q_ring", 12),
    ),
    "rope dims: keys freed before dq is there": _swapped(
        "        dq, dq_rope = warpgroup_mma_wait(0, deps=[dq_async, dq_rope_async])",
        _release("kv_ring", i="n_used - 1"),
        "        n_used",
    ),
    "values freed before both halves have met p": _swapped(ACC, _release("kv_ring")),
    "queries freed before both halves have met dS": _swapped(DV_DK, _release("q_ring")),
    "results sent before TMA sees them": (
        "    _slot(slots, i).store(tile.to(desc.dtype))\n    fence_async_shared()\n",
        "    _slot(slots, i).store(tile.to(desc.dtype))\n",
    ),
    "dS multiplied before products see it": (
        ".store(ds)\n            fence_async_shared()\n",
        ".store(ds)\n",
    ),
    "barriers that TMA arrives at before it sees them": (
        "    scheduler = _tile_scheduler(2)\n    fence_async_shared()\n",
        "    scheduler = _tile_scheduler(2)\n",
    ),
    "values that are not wanted counted twice": (
        "count=1, pred=wanted ^ True",
        "count=2, pred=wanted ^ True",
    ),
    "barriers that nobody uses": (
        "        ds_tiles = ()\n",
        "        ds_tiles = _barriers(2, 2)\n",
    ),
    "dk stored where dv still leaves from": (
        "        tma.store_wait(0)\n        barrier()\n        _store_tile(args.dk_desc",
        "        barrier()\n        _store_tile(args.dk_desc",
    ),
}


def test_accumulators_follow_the_maximum(tmp_path: Path, verdict: Any) -> None:
    text = single(_spec("full"))
    right = "acc = _rescaled(acc, gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None])"
    assert right in text
    path = tmp_path / "full.py"
    path.write_text(text.replace(right, "pass"))
    verdict(_problem("full"), path)
    _, wrong = interpreted(_verify, "full", path)
    assert wrong
    assert all("steep" in message for message in wrong)


def test_documents_are_compared_where_there_are_several(tmp_path: Path, verdict: Any) -> None:
    text = single(_spec("document_causal"))
    right = "        if fixed.n_first_masked > 0:\n"
    assert text.count(right) == 1
    path = tmp_path / "document_causal.py"
    path.write_text(text.replace(right, "        if False:\n"))
    verdict(_problem("document_causal"), path)
    _, wrong = interpreted(_verify, "document_causal", path)
    assert any(message.startswith("forward long") for message in wrong)


@pytest.mark.parametrize(("name", "last"), [("decode_gqa", "forward"), ("padding", "backward")])
def test_keys_past_the_end_are_cleared(name: str, last: str, tmp_path: Path, verdict: Any) -> None:
    text = single(_spec(name))
    right = "if not last_live:"
    assert text.count(right) == 1
    path = tmp_path / f"{name}.py"
    path.write_text(text.replace(right, "if False:"))
    verdict(_problem(name), path)
    _, wrong = interpreted(_verify, name, path)
    assert {message.partition(":")[0] for message in wrong} >= {f"{last} ends", f"{last} short"}


def test_what_a_block_lists_past_the_end_is_added_nowhere_else(
    tmp_path: Path, verdict: Any
) -> None:
    text = single(_spec("causal_images"))
    right = "before = head + gl.minimum(q_start, fixed.SQ - 1) // BLOCK_M"
    assert text.count(right) == 1
    path = tmp_path / "causal_images.py"
    path.write_text(text.replace(right, "before = head + q_start // BLOCK_M"))
    verdict(_problem("causal_images"), path)
    with pytest.raises(AssertionError, match="an address outside of the tensor"):
        interpreted(_verify, "causal_images", path)


@pytest.mark.parametrize(
    ("name", "given", "one"),
    [
        ("causal", (2560, 512, None), True),
        ("causal", (2559, 512, None), False),
        ("causal", (8192, 198, None), True),
        ("causal", (8192, 197, None), False),
        ("full", (1024,), True),
        ("full", (1023,), False),
    ],
)
def test_where_one_kernel_has_all_gradients(
    name: str, given: tuple[Any, ...], one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_file(ROOT / "generated" / name / "triton.py", "kgen_test_one_kernel")
    module = importlib.import_module("kgen_test_one_kernel.hopper")
    monkeypatch.setattr(module, "_multiprocessors", lambda device: 132)
    assert module._in_one_kernel(*given) == one
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not module._in_one_kernel(*given)


def test_few_keys_have_two_backward_kernels(verdict: Any) -> None:
    verdict(_problem("full"), single(_spec("full")))
    assert interpreted(_launched, "full", 64) == {"dq": 1, "backward": 1}


@pytest.mark.parametrize("of", ["sum", "unaligned"])
def test_a_gradient_that_tma_cannot_load_has_the_same_kernels(of: str, verdict: Any) -> None:
    verdict(_problem("full_d64_fp16"), single(_spec("full_d64_fp16")))
    launched, wrong = interpreted(_gradient_beside_a_dense_one, of)
    assert launched == {"dkdv": 2}
    assert not wrong


@pytest.mark.parametrize("what", EARLY)
def test_races_are_found(what: str, tmp_path: Path, verdict: Any) -> None:
    right, wrong = EARLY[what]
    others = {
        "halves": "full_d64_fp16",
        "pairs read": "biased_window",
        "pairs overtaken": "pair_bias",
        "few keys": "sliding_window",
        "counter": "sliding_window",
        "broad": "broad_full",
        "rope dims": "mla_prefill",
    }
    name = next((spec for words, spec in others.items() if words in what), "full")
    text = single(_spec(name))
    assert right in text
    path = tmp_path / f"{name}.py"
    path.write_text(text.replace(right, wrong))
    verdict(_problem(name), path)
    assert any(_found(name, path, seed) for seed in range(3))


def _found(name: str, path: Path, seed: int) -> list[str]:
    """Return the failures in one order of warps."""
    try:
        return interpreted(_verify, name, path, seed, 1)[1]
    except (RuntimeError, AssertionError) as error:
        # A slot that is released twice or too early leaves its barrier incomplete, or with too many
        # arrivals.
        return re.findall(
            (
                "a barrier that nobody completes|more arrivals than|the launch ahead is "
                "known|without a fence"
            ),
            str(error),
        )


def _spec(name: str) -> Path:
    return next(
        p
        for p in (ROOT / folder / f"{name}.yaml" for folder in ("specs", "tests/specs"))
        if p.exists()
    )


def _rendered(name: str) -> Path:
    """Write the single file of a spec. Return its path."""
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(single(_spec(name)))
    return path


def _problem(name: str) -> Any:
    return problem_of(load(_spec(name)))


def _module(path: Path) -> Any:
    """Import an emitted file whose Hopper kernels run in the interpreter."""
    from kgen.kernels.attention.schedules.hopper.verify import imported
    from kgen.verify import interpreter

    torch.set_num_threads(1)
    interpreter.mend()
    return imported(path, "kgen_test_hopper")


def _verify(
    name: str, path: Path, seed: int = 0, enough: int = 2**31
) -> tuple[dict[str, int], list[str]]:
    """Return the number of runs of each kernel, and the failures. Stop after `enough` failures."""
    from kgen.kernels.attention.verify import cases
    from kgen.verify.families import Subject
    from kgen.verify.gluon.interpreter import Kernel
    from kgen.verify.gluon.running import explore

    explore(seed)
    module = _module(path)
    launched: dict[str, int] = {}
    kernels = {
        kernel: value
        for kernel, value in vars(module).items()
        if isinstance(value, Kernel) and kernel.endswith("_hopper_kernel")
    }
    for kernel, value in kernels.items():
        launched[kernel] = 0
        setattr(module, kernel, _Counted(value, kernel, launched))
    problem = _problem(name)
    group = 2 if problem.gqa == "any" else int(problem.gqa)
    drawn = for_hopper(problem)
    if name in WIDE:
        drawn += (Case("wide", 300, 300, 3, group=group, ints="wide", lse=True),)
    if "frames" in name:
        drawn = (Case("frames", 384, 1024, heads_kv=2, group=group, lse=True),)
    elif name in PAIRS:  # rows that TMA can load; of the other cases, only length 256 has them
        drawn += (
            Case("rows", 450, 456, 2, heads_kv=2, group=group, lse=True),
            Case("few", 3, 136, 2, group=group),
        )
    cases.cases = lambda problem, quick: drawn
    subject, wrong = Subject(problem, "triton", path, module, "cpu"), []
    for pass_ in cases.groups(problem):
        for case in drawn:
            checks = cases.run_case(subject, pass_, case.name)
            wrong += [f"{pass_} {case.name}: {c.message}" for c in checks if not c.ok]
            if len(wrong) >= enough:
                return launched, wrong
    return launched, wrong + [
        f"{name}: {x}" for name, kernel in kernels.items() for x in kernel.unused()
    ]


def _launched(name: str, length: int) -> dict[str, int]:
    """Return the number of runs of each backward kernel for one head."""
    module = _module(_rendered(name))
    launched = _backward_counted(module)
    q, k, v, dout = (torch.randn(1, 1, length, 128).bfloat16() for _ in range(4))
    getattr(module, name)(q.requires_grad_(), k.requires_grad_(), v.requires_grad_()).backward(dout)
    return launched


def _gradient_beside_a_dense_one(of: str) -> tuple[dict[str, int], list[str]]:
    """Run backward for two gradients with equal values: a dense one, and one that TMA cannot load.

    The second is the gradient of a sum (strides of 0), or its rows are not aligned. Return the
    number of runs of each backward kernel, and the inputs whose gradients differ.
    """
    module = _module(_rendered("full_d64_fp16"))
    launched = _backward_counted(module)
    inputs = [torch.randn(2, 2, 50, 64).half().requires_grad_() for _ in range(3)]
    one, wide = torch.ones(()).half(), torch.randn(2, 2, 50, 65).half()
    dout = one.expand(2, 2, 50, 64) if of == "sum" else wide[..., 1:]
    assert not module._by_tma(dout)
    out = module.full_d64_fp16(*inputs)
    got, want = (
        torch.autograd.grad(out, inputs, x, retain_graph=True) for x in (dout, dout.contiguous())
    )
    return launched, [
        name for name, x, y in zip("qkv", got, want, strict=True) if not torch.equal(x, y)
    ]


def _backward_counted(module: Any) -> dict[str, int]:
    """Return a dict that counts the runs of each backward kernel of a file."""
    launched: dict[str, int] = {}
    for kernel in ("dq", "dkdv", "backward"):
        attribute = f"_{kernel}_hopper_kernel"
        if found := getattr(module, attribute, None):
            launched[kernel] = 0
            setattr(module, attribute, _Counted(found, kernel, launched))
    return launched


def _changed_by_neighbours(path: Path, head_dim: int) -> list[str]:
    """Return the results that change if the third sequence and the tokens after the last contain
    NaN.
    """
    function = _module(path).varlen_causal
    cu_seqlens = torch.tensor([0, 90, 150, 230], dtype=torch.int32)
    third, after = slice(90, 150), slice(230, 250)

    def results(factor: float) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(0)
        q, k, v, dout = (
            torch.randn(250, 1, head_dim, generator=random).bfloat16() for _ in range(4)
        )
        for x in (q, k, v, dout):
            x[third] *= factor
            x[after] *= factor
        operands = [x.requires_grad_() for x in (q, k, v)]
        out, lse = function(*operands, cu_seqlens, cu_seqlens, return_lse=True)
        out.backward(dout)
        found = {"out": out, "lse": lse.T, "dq": q.grad, "dk": k.grad, "dv": v.grad}
        return {name: torch.cat([x[: third.start], x[third.stop :]]) for name, x in found.items()}

    beside, alone = results(torch.nan), results(1.0)
    return [name for name, expected in alone.items() if not torch.equal(beside[name], expected)]


def _left_its_tensors(path: Path) -> str:
    """Return the first error of forward and backward calls with wrong offsets, or ""."""
    from support.interpreters.wrong_offsets import OFFSETS, TOKENS

    function = _module(path).varlen_causal
    for what, numbers in OFFSETS.items():
        wrong = torch.tensor(numbers, dtype=torch.int32)
        plain = torch.linspace(0, TOKENS, len(numbers)).int()
        for sides in ((wrong, wrong), (plain, wrong)):
            operands = [torch.randn(TOKENS, 1, 128).bfloat16().requires_grad_() for _ in "qkv"]
            try:
                function(*operands, *sides).sum().backward()
            except Exception as error:
                return f"{what}: {error!r}"
    return ""


class _Counted:
    def __init__(self, kernel: Any, name: str, launched: dict[str, int]) -> None:
        self.kernel, self.name, self.launched = kernel, name, launched

    def __getitem__(self, grid: Any) -> Any:
        self.launched[self.name] += 1
        return self.kernel[grid]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("causal", FUSED),
        ("softcap_causal", FUSED),  # the derivative needs one value of a pair
        ("head_scale", ALL),  # gradient of a buffer
        ("prefix_lm", FUSED),  # the range of queries depends on the tile of keys
        ("longformer", set()),  # two ranges of keys
        ("causal_d64", {"forward", "dkdv"}),
        ("gpt_oss", {"dkdv"}),  # short ranges
        ("causal_fp32", set()),
        ("varlen_causal", ALL),
        ("decode_gqa", {"forward"}),  # one length per sequence
        ("decode_sliding_window", {"forward"}),  # one length per sequence, and a window
        ("pair_bias", {"forward"}),  # TMA loads rows of the bias
        ("relative_bias", set()),  # the bias is read by distance
        ("padding", FUSED),  # lengths from a buffer
        ("mla_prefill", ALL),  # keys wider than values
        ("gemma2", ALL),  # heads of 256
        ("causal_images", FUSED),  # listed blocks
        ("decode_paged", {"forward"}),
        ("varlen_alibi", {"dkdv"}),  # heads of 64, and the gradient of a buffer
    ],
)
def test_where_there_are_kernels_for_hopper(name: str, kernels: set[str]) -> None:
    text = single(ROOT / "specs" / f"{name}.yaml")
    assert {kernel for kernel in ALL | FUSED if f"_{kernel}_hopper_kernel" in text} == kernels


@pytest.mark.parametrize(
    ("more", "by_tma"),
    [
        ("score_mod: score + bias[q_idx, kv_idx]", True),
        ("score_mod: score + bias[kv_idx, q_idx]", False),
        ("score_mod: score + bias[q_idx, min(kv_idx, 7)]", False),
        ("mask_mod: bias[q_idx, kv_idx] > 0.0", False),
        ("score_mod: score + bias[q_idx, kv_idx]\nmask_mod: bias[q_idx, kv_idx] > 0.0", False),
    ],
)
def test_what_is_read_by_pair_comes_by_tma(more: str, by_tma: bool, tmp_path: Path) -> None:
    path = tmp_path / "pairs.yaml"
    buffers = "buffers:\n  bias: {shape: [SQ, SK], dtype: fp32}\n"
    head = (
        "kernel: attention\nname: pairs\ndtype: bf16\nhead_dim: 128\nblock_mask: never\n"
        "passes: [forward]\n"
    )
    path.write_text(f"{head}{buffers}{more}\n")
    assert ("pair_desc" in single(path)) == by_tma


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        (("", ""), True),
        # SQ and SK may differ in this spec, and a query past the keys has no document among them.
        (("shape: [SQ]", "shape: [1000]"), False),
        (("q_idx >= kv_idx", "q_idx >= kv_idx and q_idx - kv_idx < 100"), False),
        (("doc[q_idx] == doc[kv_idx]", "doc[q_idx] <= doc[kv_idx]"), False),
        ((" and q_idx >= kv_idx", ""), False),
    ],
)
def test_where_tiles_begin_with_a_document(
    change: tuple[str, str], begins: bool, tmp_path: Path
) -> None:
    text = (ROOT / "specs" / "document_causal.yaml").read_text()
    assert change[0] in text
    path = tmp_path / "document_causal.yaml"
    path.write_text(text.replace(*change, 1))
    emitted = single(path)
    assert "_hopper_producer" in emitted
    assert ("# Queries of several documents" in emitted) == begins


@pytest.mark.parametrize(
    ("change", "bounded"),
    [
        (("", ""), True),
        (("cap: 30.0", "cap: 55"), True),
        (("cap: 30.0", "cap: 56"), False),  # 2^81
        (("cap: 30.0", "cap: {type: float, runtime: true}"), False),  # unknown at compile time
        (("bf16", "fp16"), False),
        (("passes: [forward, backward]", "passes: [forward]\nsinks: true"), False),
        (("cap * tanh(score / cap)", "cap * tanh(score / cap) + 0.1 * (kv_idx - q_idx)"), False),
        (("cap * tanh(score / cap)", "cap * score"), False),
    ],
)
def test_where_the_maximum_is_not_followed(
    change: tuple[str, str], bounded: bool, tmp_path: Path
) -> None:
    text = (ROOT / "specs" / "softcap_causal.yaml").read_text()
    assert change[0] in text
    path = tmp_path / "softcap_causal.yaml"
    path.write_text(text.replace(*change, 1))
    emitted = single(path)
    forward = emitted[emitted.index("def _hopper_softmax(") : emitted.index("def _hopper_tiles(")]
    assert ("m_new" not in forward) == bounded


@pytest.mark.parametrize(
    ("head_dim", "more", "there"),
    [
        ("{qk: 192, v: 128}", "mask_mod: q_idx >= kv_idx and kv_idx < lens[b]", True),
        # K has two tiles, and both contain hidden keys.
        (
            "{qk: 192, v: 128}",
            "mask_mod: kv_idx < lens[b]\nscore_mod: 30 * tanh(score / 30)",
            False,
        ),
        ("{qk: 256, v: 128}", "mask_mod: kv_idx < lens[b]", False),
        (
            "128",
            "mask_mod: kv_idx < lens[b] and (q_idx * kv_idx) % 7 != 0\nblock_mask: never",
            False,
        ),
        ("128", "mask_mod: (lens[b] * q_idx * kv_idx) % 7 != 0\nblock_mask: always", True),
        # In a list, the last key and the keys that it hides can be in any block.
        (
            "128",
            "mask_mod: kv_idx < lens[b] and (q_idx * kv_idx) % 7 != 0\nblock_mask: always",
            False,
        ),
        ("64", "mask_mod: (lens[b] * q_idx * kv_idx) % 7 != 0\nblock_mask: always", False),
    ],
)
def test_what_forward_is_made_for(head_dim: str, more: str, there: bool) -> None:
    text = (
        f"kernel: attention\nname: n\ndtype: bf16\nhead_dim: {head_dim}\npasses: [forward]\n"
        f"{more}\n"
    )
    spec = loads(text + "buffers: {lens: {shape: [B], dtype: int32}}\n", "n.yaml")
    assert ("_forward_hopper_kernel" in single(spec)) == there


MASKS = [
    "q_idx >= kv_idx",
    "kv_idx < lens[b]",
    "kv_idx < lens[b] - 1",
    "kv_idx < min(lens[b], 300)",
    "kv_idx < ends[b, h]",
    "q_idx >= kv_idx or image[b, q_idx] == image[b, kv_idx]",
    "q_idx >= 3 * kv_idx and image[b, q_idx] == image[b, kv_idx]",
]
SCORES = [
    "",
    "score + table[h, min(abs(q_idx - kv_idx), 63)]",
    "score + bias[h, q_idx, kv_idx]",
    "30 * tanh(score / 30)",
]
LENGTHS = [
    "{q: any, kv: any}",
    "{q: {multiple_of: 128}, kv: any}",
    "{q: {multiple_of: 128}, kv: {multiple_of: 128}}",
]
SHAPES = {
    "lens": "[B]",
    "ends": "[B, HQ]",
    "image": "[B, SQ]",
    "table": "[HQ, 64]",
    "bias": "[HQ, SQ, SK]",
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_every_name_is_defined(mask: str, score: str, tmp_path: Path) -> None:
    """Includes kernels with fields of other kernels, promised lengths, and grouped queries."""
    buffers = "".join(
        f"  {name}: {{shape: {shape}, dtype: {'int32' if shape[1] == 'B' else 'fp32'}}}\n"
        for name, shape in SHAPES.items()
        if f"{name}[" in mask + score
    )
    text = "kernel: attention\nname: n\ndtype: bf16\nhead_dim: 128\npasses: [forward, backward]\n"
    text += f"mask_mod: {mask}\n" + (f"score_mod: {score}\n" if score else "")
    text += f"buffers:\n{buffers}" if buffers else ""
    for number, (lengths, group) in enumerate(zip(LENGTHS, (1, 2, "any"), strict=True)):
        spec = loads(f"{text}lengths: {lengths}\ngqa: {group}\n", "n.yaml")
        (tmp_path / f"n_{number}.py").write_text(single(spec))
    assert not wrong_names([tmp_path])


def test_ends_of_heads_that_share_keys_are_not_cleared() -> None:
    text = "kernel: attention\nname: n\ndtype: bf16\nhead_dim: 128\nmask_mod: kv_idx < ends[b, h]\n"
    text += "buffers: {ends: {shape: [B, HQ], dtype: int32}}\n"
    alone, shared = (
        plan_hopper(plan_attention(loads(f"{text}gqa: {gqa}\n", "n.yaml"))) for gqa in (1, 2)
    )
    assert alone is not None
    assert shared is not None
    assert alone.fused is not None
    assert (shared.forward is not None, shared.dkdv, shared.fused) == (True, None, None)
