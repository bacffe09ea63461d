"""Checks of the functions for serving: caches, misuse, and wrong lengths.

Each check is a function of a `Subject`. It raises `AssertionError`, or the error of the call, with
a message.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.attention.verify import serving
from kgen.kernels.attention.verify.cache import NO_PAGE
from kgen.kernels.attention.verify.problem import Problem
from kgen.kernels.attention.verify.schedules import CROWD, REQUESTS, keep_bits
from kgen.kernels.attention.verify.serving import Batch, Served
from kgen.verify import compare
from kgen.verify.families import NOT_NUMBERS, Subject, elsewhere, must_refuse
from kgen.verify.tensors import DTYPES

_SLOTS = (5, -1, 40, 0, 63, -1, 17, 16)
"""The slots of new tokens. The cache does not change for a slot of -1."""
_WRITTEN = [token for token, slot in enumerate(_SLOTS) if slot >= 0]
_STORED = ("number", "tensor", "head", "page", "token", "set")
"""The scales of a quantized cache, as in `Batch.scales`. With `set`, the call sets scales of
tokens.
"""


def check_serving(subject: Subject) -> None:
    """Run all checks of a spec with the pass `serve`."""
    if "serve" not in subject.problem.passes:
        return
    for layout in ("NHD", "HND"):
        for number in range(len(_STORED)):
            _writes_the_cache(subject, layout, number)
    _refuses_misuse(subject)
    _keeps_to_its_tensors(subject)
    if subject.problem.in_batches:
        on_cpu = subject.device == "cpu"
        keep_bits(subject, 3 if on_cpu else 20, REQUESTS if on_cpu else CROWD)


def replays_other_lengths(subject: Subject) -> None:
    """Check that a call allocates nothing, and that a CUDA graph serves other lengths."""
    problem, names = subject.problem, vars(subject.module)
    if "serve" not in problem.passes:
        return
    served = serving.drawn(problem, _batch(problem, lengths=_LENGTHS, given=False), subject.device)
    given = serving.room(names, problem, served)
    serving.call(names, problem, served, **given)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    serving.call(names, problem, served, **given)
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    # Views of the workspace need no memory.
    assert after == before, f"a call of serve allocates {after - before} tensors"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serving.call(names, problem, served, **given)
    for queries, keys in _REPLAYED:
        served.inputs.cu_seqlens[0].copy_(torch.tensor(queries, dtype=torch.int32))
        served.seq_lens.copy_(torch.tensor(keys, dtype=torch.int32))
        graph.replay()
        again = {name: torch.full_like(x, 7) for name, x in given.items()}
        serving.call(names, problem, served, **again)
        new = queries[-1]
        assert torch.equal(given["out"][:new], again["out"][:new]), f"a graph with {keys} keys"


_LENGTHS = ((1, 300), (20, 33), (1, 200))
_REPLAYED = (([0, 1, 21, 22], [40, 33, 200]), ([0, 5, 6, 20], [30, 9, 140]), ([0] * 4, [0] * 3))
"""Offsets of queries and numbers of keys, within the pages of `_LENGTHS`."""


def _batch(problem: Problem, **changes: Any) -> Batch:
    group = 2 if problem.gqa == "any" else int(problem.gqa)
    return replace(Batch("checks", ((1, 40), (20, 33)), 16, group=group), **changes)


def _writes_the_cache(subject: Subject, layout: str, number: int) -> None:
    """Check all bits of a cache after `NAME_append`."""
    problem, device, heads = subject.problem, subject.device, 3
    random = torch.Generator().manual_seed(number)
    dtype = DTYPES[problem.dtype]
    slots = torch.tensor(_SLOTS, dtype=(torch.int32, torch.int64)[number % 2], device=device)
    scales = _scales(number, heads, device) if problem.kv_dtype is not None else {}
    own_scales = {name: _of_slots(x) for name, x in scales.items()}
    setting = {"set_scales": True} if problem.kv_dtype and _STORED[number] == "set" else {}
    pools, wanted, given = [], [], []
    for x, width in (("k", problem.head_qk), ("v", problem.head_v)):
        new = 3 * torch.randn((len(_SLOTS), heads, width), generator=random)
        new = new.to(dtype).to(device)
        stored = new
        if problem.kv_dtype is not None:
            own, most = serving.QUANTIZED[problem.kv_dtype]
            if setting:
                largest = new.float().abs().amax(-1)
                # On CUDA, PyTorch divides by a number through its rounded inverse.
                own_scales[f"{x}_scale"] = largest / torch.full_like(largest, most)
            stored = serving.quantized(new, own_scales[f"{x}_scale"], problem.kv_dtype).to(own)
        pool = torch.zeros((4, 16, heads, width), device=device).to(stored.dtype)
        after = pool.clone()
        for token, slot in enumerate(_SLOTS):
            if slot >= 0:
                after[slot // 16, slot % 16] = stored[token]
        if layout == "HND":
            pool = pool.transpose(1, 2).contiguous()
        given.append(new)
        pools.append(pool)
        wanted.append(after)
    append = getattr(subject.module, f"{problem.name}_append")
    passed = dict(scales)
    if layout == "HND":
        passed = {name: x.transpose(1, 2) if _by_page(x) else x for name, x in scales.items()}
    append(*given, *pools, slot_mapping=slots, kv_layout=layout, **passed, **setting)
    for name in scales if setting else ():
        wrong = _of_slots(scales[name])[_WRITTEN] != own_scales[name][_WRITTEN]
        assert not bool(wrong.any()), f"append in {layout}: wrong {name}"
    for x, pool, after in zip("kv", pools, wanted, strict=True):
        found = pool.transpose(1, 2) if layout == "HND" else pool
        bits = torch.uint8 if found.element_size() == 1 else torch.int16
        same = torch.equal(found.contiguous().view(bits), after.view(bits))
        assert same, f"append in {layout}, scales {number}: wrong {x}"


def _scales(number: int, heads: int, device: str) -> dict[str, Any]:
    """Return scales of 4 pages of 16 tokens."""
    by_head = 0.004 * (1 + torch.arange(heads, dtype=torch.float32, device=device))
    by_page = by_head[0] * torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)[:, None, None]
    rows = 1 + torch.arange(16, dtype=torch.float32, device=device)[:, None]
    by_token = by_page * rows * by_head / by_head[0]
    found: dict[str, tuple[Any, Any]] = {
        "number": (0.01, 0.02),
        "tensor": (by_head[0], 0.01),
        "head": (by_head, by_head[:1]),
        "page": (by_page, by_head),
        "token": (by_token, by_page),
        "set": (by_token, by_token / 2),
    }
    return dict(zip(("k_scale", "v_scale"), (found[_STORED[number]]), strict=True))


def _by_page(scale: Any) -> bool:
    return isinstance(scale, Tensor) and scale.dim() == 3


def _of_slots(scale: Any) -> Any:
    """Return the scales of the new tokens."""
    if not _by_page(scale):
        return scale
    return torch.stack(
        [scale[slot // 16, slot % 16 if scale.shape[1] > 1 else 0] for slot in _SLOTS]
    )


def _refuses_misuse(subject: Subject) -> None:
    """Check that wrong shapes, dtypes and devices raise `ValueError` or `TypeError`."""
    problem = subject.problem
    served = serving.drawn(problem, _batch(problem), subject.device)
    right = {"q": served.inputs.q, "k_pages": served.k_pages, "v_pages": served.v_pages}
    right |= serving.keywords(served)
    function = getattr(subject.module, f"{problem.name}_serve")
    must_refuse(
        {
            f"serve: {what}": partial(function, **{**right, **change})
            for what, change in _misuses(served, right, subject.device).items()
        }
    )
    if served.scales:
        names = vars(subject.module)
        setting = {"set_scales": lambda one: True}
        must_refuse(
            {"append: one scale to set": partial(serving.append, names, problem, served, **setting)}
        )


def _misuses(served: Served, right: dict[str, Any], device: str) -> dict[str, dict[str, Any]]:
    q, k, v = right["q"], right["k_pages"], right["v_pages"]
    lens, offsets = served.seq_lens, right["cu_seqlens_q"]
    small = torch.empty(16, dtype=torch.uint8, device=device)
    found: dict[str, dict[str, Any]] = {
        "q with a dimension less": {"q": q[0]},
        "q with another head size": {"q": q[..., :-1]},
        "q in float64": {"q": q.double()},
        "a cache in float64": {"k_pages": k.float().double(), "v_pages": v.float().double()},
        "a cache with another head size": {"k_pages": k[..., :-1]},
        "k and v with other pages": {"v_pages": v[1:]},
        "an unknown layout": {"kv_layout": "HDN"},
        "a query head too many": {"q": torch.cat([q, q[:, :1]], 1)},
        "lengths of int64": {"seq_lens": lens.long()},
        "a length too many": {"seq_lens": torch.cat([lens, lens[:1]])},
        "offsets of int64": {"cu_seqlens_q": offsets.long()},
        "an offset less": {"cu_seqlens_q": offsets[:-1]},
        "offsets with gaps": {"cu_seqlens_q": offsets.repeat_interleave(2)[::2]},
        "a block table of int64": {"block_table": served.block_table.long()},
        "a block table of another batch": {"block_table": served.block_table[:1]},
        "out of another shape": {"out": served.out[1:]},
        "lse of another dtype": {"lse": served.lse.double()},
        "a workspace that is too small": {"workspace": small},
        "a workspace of another dtype": {"workspace": small.int()},
        "a negative max_seqlen_q": {"max_seqlen_q": -1},
        "an argument that does not exist": {"no_such_argument": 1},
    }
    found |= {f"scale is {what}": {"scale": x} for what, x in NOT_NUMBERS.items()}
    for name in served.scales:
        found[f"{name} of another shape"] = {name: torch.ones(7, device=device)}
        found[f"{name} in float64"] = {name: torch.ones((), dtype=torch.float64, device=device)}
        found[f"{name} of other pages"] = {name: torch.ones((len(k) + 1, 1, 1), device=device)}
        found[f"{name} of other tokens"] = {name: torch.ones((1, 3, 1), device=device)}
    tensors = {"k_pages": k, "seq_lens": lens, "block_table": served.block_table}
    return found | elsewhere({**tensors, **served.inputs.buffers}, device)


def _keeps_to_its_tensors(subject: Subject) -> None:
    """Check that kernels with wrong offsets and lengths write only to their tensors, and end."""
    problem = subject.problem
    served = serving.drawn(problem, _batch(problem), subject.device)
    pages = served.block_table.masked_fill(served.block_table == NO_PAGE, 0)
    served = replace(served, block_table=pages)
    right = served.inputs.cu_seqlens
    wrong: dict[str, Served] = {}
    for what, offsets in compare.wrong_offsets(right[0]).items():
        inputs = replace(served.inputs, cu_seqlens=(offsets, right[1]))
        wrong[f"offsets {what}"] = replace(served, inputs=inputs)
    for what, lengths in {"negative": -5, "too large": 2**30, "zero": 0}.items():
        wrong[f"lengths {what}"] = replace(
            served, seq_lens=torch.full_like(served.seq_lens, lengths)
        )
    for what, one in wrong.items():
        _, broken = compare.careful(
            partial(_outputs, subject, one), serving.tensors(one), subject.device
        )
        assert not broken, f"serve with {what}: {broken[0].message}"


def _outputs(subject: Subject, served: Served) -> dict[str, Tensor]:
    given = replace(served, batch=replace(served.batch, given=False))
    serving.call(vars(subject.module), subject.problem, given)
    if subject.device == "cuda":
        torch.cuda.synchronize()
    return {}
