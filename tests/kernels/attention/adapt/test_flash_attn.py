"""The functions of FlashAttention with emitted kernels, argument by argument, against float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from exact_windows import (
    apart,
    gradients,
    imported,
    loaded,
    offsets,
    packed_reference,
    reference,
    run_example,
    spec,
    written,
)
from support.interpreters.own_process import interpreted
from torch import Tensor

from kgen.kernels.attention.adapt.flash import flash_attn_package

END = "q_idx + SK - SQ"
SLOPES = "buffers: {slopes: {shape: [HQ], dtype: fp32}}\n"
ALIBI = f"score_mod: score + slopes[h] * (kv_idx - ({END}))"
CACHE = "passes: [forward, decode]\ngqa: any\nmask_mod: q_idx >= kv_idx"
SPECS = (
    spec("causal", f"gqa: any\nmask_mod: {END} >= kv_idx"),
    spec("whole", "gqa: any", "fp32").replace("fp32", "[fp16, fp32]"),
    spec("window", f"mask_mod: {END} >= kv_idx and {END} - kv_idx < 6"),
    spec("near", f"mask_mod: {END} - kv_idx <= 4 and kv_idx - ({END}) <= 3"),
    spec("capped", f"score_mod: 2.0 * tanh(score / 2.0)\nmask_mod: {END} >= kv_idx"),
    spec("alibi", f"{SLOPES}score_mod: score - slopes[b, h] * abs({END} - kv_idx)").replace(
        "[HQ]", "[B, HQ]"
    ),
    spec("causal_alibi", f"{SLOPES}{ALIBI}\nmask_mod: {END} >= kv_idx"),
    spec("packed_alibi", f"varlen: true\n{SLOPES}{ALIBI}\nmask_mod: {END} >= kv_idx"),
    spec("packed", f"varlen: true\ngqa: any\nmask_mod: {END} >= kv_idx"),
    spec("packed_near", f"varlen: true\nmask_mod: {END} - kv_idx <= 4 and kv_idx - ({END}) <= 3"),
    spec("cache", f"{CACHE}\nlengths: {{q: any, kv: {{per_batch: true}}}}"),
    spec("pages", f"{CACHE}\npaged_kv: {{page_size: 16}}"),
)
HALF = 4e-3
"""Tolerance for float16, relative to the largest element."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("flash_attn")
    written(flash_attn_package(loaded(*SPECS), "own"), folder)
    return folder


def turned(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def exact(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return out [B, S, H, D] and lse of [B, S, H, D] tensors."""
    out, lse = reference(*turned(*tensors), **options)
    return out.transpose(1, 2), lse


TWO, FOUR = torch.tensor([0.5, 0.1]), torch.tensor([[0.5, 0.1], [0.2, 0.3]])
"""Slopes of two heads, and of two heads of two sequences."""
FUNC: dict[str, tuple[tuple[int, int], dict[str, Any], dict[str, Any]]] = {
    "defaults": ((20, 33), {}, {}),
    "softmax_scale": ((20, 33), {"softmax_scale": 0.4}, {"scale": 0.4}),
    "causal, fewer queries": ((20, 33), {"causal": True}, {"window": (-1, 0)}),
    "causal, more queries": ((33, 20), {"causal": True}, {"window": (-1, 0)}),
    "causal as a window": ((20, 33), {"window_size": (-1, 0)}, {"window": (-1, 0)}),
    "causal, one query": ((1, 33), {"causal": True}, {}),
    "window_size": ((20, 33), {"window_size": (5, 0)}, {"window": (5, 0)}),
    "window_size, causal": (
        (20, 33),
        {"window_size": (5, 9), "causal": True},
        {"window": (5, 0)},
    ),
    "window_size to both sides": ((20, 33), {"window_size": (4, 3)}, {"window": (4, 3)}),
    "window_size beyond the keys": ((20, 33), {"window_size": (32, 19)}, {}),
    "softcap": (
        (20, 33),
        {"softcap": 2.0, "causal": True},
        {"softcap": 2.0, "window": (-1, 0)},
    ),
    "deterministic": ((20, 33), {"deterministic": True}, {}),
    "alibi_slopes": (
        (20, 33),
        {"alibi_slopes": TWO, "causal": True},
        {"slopes": TWO, "window": (-1, 0)},
    ),
    "alibi_slopes of each sequence": ((20, 33), {"alibi_slopes": FOUR}, {"slopes": FOUR}),
}
"""Numbers of queries and keys; arguments of flash_attn_func; arguments of the reference."""


def test_flash_attn_func_is_the_reference(package: Path) -> None:
    found = interpreted(_func, package)
    assert len(found) == 2 * len(FUNC) + 2
    assert {name: error for name, error in found.items() if not error < HALF} == {}


def _func(folder: Path) -> dict[str, float]:
    function = imported(folder, "own_flash_attn").flash_attn_func
    found = {}
    torch.use_deterministic_algorithms(True)
    for name, ((sq, sk), given, options) in FUNC.items():
        torch.manual_seed(0)
        q, k, v = (2.0 * torch.randn(2, n, 2, 16) for n in (sq, sk, sk))
        q, k, v = (x.half() for x in (q, k, v))
        out, lse, weights = function(q, k, v, **given, return_attn_probs=True)
        assert weights is None
        found[name] = apart((out, lse), exact(q, k, v, **options))
        dout, doubles = torch.randn_like(q), [x.double() for x in (q, k, v)]
        wanted = gradients(lambda *x, o=options: exact(*x, **o)[0], doubles, dout)
        found[f"{name}: gradients"] = apart(
            gradients(partial(function, **given), (q, k, v), dout), wanted
        )
    q, k, v = (torch.randn(2, n, h, 16) for n, h in ((20, 4), (33, 2), (33, 2)))
    found["grouped heads of float32"] = 100 * apart([function(q, k, v)], exact(q, k, v)[:1])
    q, k, v = (x.half() for x in (q, k, v))
    out = function(q, k, v, 0.0, None, True)
    assert out.is_contiguous()
    found["by position"] = apart([out], exact(q, k, v, window=(-1, 0))[:1])
    return found


LENGTHS = [(9, 9), (1, 30), (20, 4), (0, 7), (30, 33)]


def test_flash_attn_varlen_func_is_the_reference(package: Path) -> None:
    found = interpreted(_varlen, package)
    assert len(found) == 8
    assert {name: error for name, error in found.items() if not error < HALF} == {}


def _varlen(folder: Path) -> dict[str, float]:
    function = imported(folder, "own_flash_attn").flash_attn_varlen_func
    cum_q, cum_k = (offsets([pair[side] for pair in LENGTHS]) for side in (0, 1))
    cases: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
        "causal": (1, {"causal": True}, {"window": (-1, 0)}),
        "window_size": (2, {"window_size": (4, 3)}, {"window": (4, 3)}),
        "alibi_slopes": (
            2,
            {"causal": True, "alibi_slopes": TWO},
            {"window": (-1, 0), "slopes": TWO},
        ),
        "softmax_scale": (
            2,
            {"causal": True, "softmax_scale": 0.4, "deterministic": True},
            {"window": (-1, 0), "scale": 0.4},
        ),
    }
    found = {}
    for name, (kv_heads, given, options) in cases.items():
        torch.manual_seed(0)
        q = torch.randn(int(cum_q[-1]), 2, 16).half()
        k, v = (torch.randn(int(cum_k[-1]), kv_heads, 16).half() for _ in range(2))
        call = partial(
            function,
            cu_seqlens_q=cum_q,
            cu_seqlens_k=cum_k,
            max_seqlen_q=30,
            max_seqlen_k=33,
            **given,
        )
        wanted = partial(packed_reference, lengths=LENGTHS, **options)
        out, lse, _ = call(q, k, v, return_attn_probs=True)
        found[name] = apart((out, lse), wanted(q, k, v))
        dout, doubles = torch.randn_like(q), [x.double() for x in (q, k, v)]
        expected = gradients(lambda *x, f=wanted: f(*x)[0], doubles, dout)
        found[f"{name}: gradients"] = apart(gradients(call, (q, k, v), dout), expected)
    return found


Cached = dict[str, Any]
CACHES: dict[str, Cached] = {
    "a whole cache": {"causal": True},
    "without a mask": {},
    "cache_seqlens, a number": {"cache_seqlens": 25, "causal": True},
    "cache_seqlens": {"cache_seqlens": [25, 7], "causal": True},
    "several queries": {"cache_seqlens": [25, 7], "causal": True, "queries": 3},
    "a scale": {"cache_seqlens": [25, 7], "causal": True, "softmax_scale": 0.4},
    "one query without a mask": {"cache_seqlens": [25, 7]},
    "k and v": {"cache_seqlens": [25, 7], "causal": True, "queries": 3, "new": 3},
    "k and v after a number": {"cache_seqlens": 9, "causal": True, "queries": 2, "new": 2},
    "block_table": {"cache_seqlens": [25, 7], "causal": True, "pages": True},
    "block_table, without lengths": {"causal": True, "pages": True},
    "block_table, k and v": {
        "cache_seqlens": [15, 30],
        "causal": True,
        "pages": True,
        "queries": 3,
        "new": 3,
    },
    "a window": {"window_size": (5, 0), "heads": 2, "queries": 3},
}
"""Arguments of flash_attn_with_kvcache. `queries` and `new` are numbers of tokens."""


def test_flash_attn_with_kvcache_is_the_reference(package: Path) -> None:
    found = interpreted(_caches, package)
    assert len(found) == len(CACHES)
    assert {name: error for name, error in found.items() if not error < HALF} == {}


def _caches(folder: Path) -> dict[str, float]:
    function = imported(folder, "own_flash_attn").flash_attn_with_kvcache
    return {name: _cached(function, **case) for name, case in CACHES.items()}


def _cached(
    function: Callable[..., Any],
    *,
    queries: int = 1,
    new: int = 0,
    pages: bool = False,
    heads: int = 4,
    cache_seqlens: Any = None,
    **given: Any,
) -> float:
    """Return the difference of a call from the reference, sequence by sequence."""
    torch.manual_seed(0)
    q = torch.randn(2, queries, heads, 16, requires_grad=True).half()
    cache = [torch.randn(2, 48, 2, 16).half() for _ in range(2)]
    fresh = [torch.randn(2, new, 2, 16).half() if new else None for _ in range(2)]
    lengths = [cache_seqlens] * 2 if isinstance(cache_seqlens, int) else cache_seqlens or [48] * 2
    if isinstance(cache_seqlens, list):
        cache_seqlens = torch.tensor(cache_seqlens, dtype=torch.int32)
    wanted = [x.clone() for x in cache]
    for whole, part in zip(wanted, fresh, strict=True):
        for b, length in enumerate(lengths):
            whole[b, length : length + new] = part[b] if part is not None else whole[b, :0]
    more: dict[str, Any] = {}
    stored = cache
    if pages:
        more["block_table"] = table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
        stored = [torch.zeros(6, 16, 2, 16).half() for _ in cache]
        for pool, whole in zip(stored, cache, strict=True):
            pool[table.flatten().long()] = whole.reshape(6, 16, 2, 16)
    out, lse = function(
        q, *stored, *fresh, cache_seqlens=cache_seqlens, return_softmax_lse=True, **more, **given
    )
    assert not out.requires_grad
    if pages:
        stored = [pool[table.flatten().long()].reshape(2, 48, 2, 16) for pool in stored]
    assert all(torch.equal(a, b) for a, b in zip(stored, wanted, strict=True))
    window = (-1, 0) if given.get("causal") else given.get("window_size", (-1, -1))
    options = {"window": window, "scale": given.get("softmax_scale")}
    parts = [
        exact(q[b : b + 1].detach(), *(x[b : b + 1, : n + new] for x in wanted), **options)
        for b, n in enumerate(lengths)
    ]
    return apart((out, lse), [torch.cat(x) for x in zip(*parts, strict=True)])


def dense(**given: Any) -> Callable[[ModuleType], Any]:
    heads, kv_heads, dim = (given.pop(name, n) for name, n in SIZES.items())
    dtype, n = given.pop("dtype", torch.float16), given.pop("queries", 8)
    q, k = torch.randn(1, n, heads, dim).to(dtype), torch.randn(1, 9, kv_heads, dim).to(dtype)
    q.requires_grad_(given.pop("requires_grad", False))
    return lambda own: own.flash_attn_func(q, k, k, **given)


def varlen(**given: Any) -> Callable[[ModuleType], Any]:
    q, cum = torch.randn(9, 2, 16).half(), offsets([9])
    return lambda own: own.flash_attn_varlen_func(q, q, q, cum, cum, 9, 9, **given)


def cached(**given: Any) -> Callable[[ModuleType], Any]:
    q, k = torch.randn(2, 1, 2, 16).half(), torch.randn(2, 48, 2, 16).half()
    return lambda own: own.flash_attn_with_kvcache(q, k, k, **given)


SIZES = {"heads": 2, "kv_heads": 2, "dim": 16}
ONES = torch.ones(2, dtype=torch.int32)
REFUSED: dict[str, tuple[Callable[[ModuleType], Any], str]] = {
    "dropout_p": (dense(dropout_p=0.1), r"no kernels support `dropout_p`, got 0\.1"),
    "alibi_slopes": (
        dense(alibi_slopes=torch.ones(2), window_size=(5, 0)),
        r"softcap=0\.0, ALiBi for(?s:.*)window: the kernels have no ALiBi",
    ),
    "alibi_slopes of other axes": (
        dense(alibi_slopes=torch.ones(1, 2), causal=True),
        r"causal_alibi: the kernels have ALiBi slopes \[HQ\]",
    ),
    "softcap": (dense(softcap=9.0, causal=True), r"capped: the kernels have softcap 2\.0"),
    "window_size": (
        dense(window_size=(2, 0)),
        r"causal=False, window_size=\(2, 0\)(?s:.*)window: .* window_size \(5, 0\)",
    ),
    "window_size without the first key of the last query": (
        dense(window_size=(7, -1)),
        "whole: the kernels compute full attention",
    ),
    "window_size without the last key of the first query": (
        dense(window_size=(-1, 6)),
        "whole: the kernels compute full attention",
    ),
    "causal of capped scores": (dense(softcap=2.0), "capped: the kernels compute causal attention"),
    "a dtype": (dense(dtype=torch.bfloat16), r"whole: the kernels are for torch\.float32"),
    "a head dim": (dense(dim=32), "heads of 32 (?s:.*)whole: the kernels are for heads of 16"),
    "heads": (dense(heads=3), "the query heads are no multiple of the key heads"),
    "groups": (
        dense(heads=4, window_size=(5, 0)),
        "window: the kernels are for 1 query heads per key head",
    ),
    "deterministic": (
        dense(deterministic=True, requires_grad=True),
        r"needs torch\.use_deterministic_algorithms\(True\)",
    ),
    "packed dropout_p": (varlen(dropout_p=0.1, causal=True), "`dropout_p`"),
    "packed alibi_slopes": (varlen(alibi_slopes=torch.ones(2)), "packed: the kernels have no ALiB"),
    "packed without a mask": (varlen(), "packed: the kernels compute causal attention"),
    "rotary_cos": (cached(rotary_cos=torch.ones(9, 8)), "`rotary_cos`"),
    "rotary_sin": (cached(rotary_sin=torch.ones(9, 8)), "`rotary_sin`"),
    "cache_batch_idx": (cached(cache_batch_idx=ONES), "`cache_batch_idx`"),
    "cache_leftpad": (cached(cache_leftpad=ONES), "`cache_leftpad`"),
    "cached alibi_slopes": (
        cached(alibi_slopes=torch.ones(2), cache_seqlens=ONES, causal=True),
        "cache: the kernels have no ALiBi",
    ),
    "block_table of packed sequences": (
        varlen(block_table=ONES[None], causal=True),
        r"no kernels support `block_table`, got a tensor \[1, 2\]",
    ),
    "num_splits": (cached(num_splits=2), "no kernels support `num_splits`, got 2"),
    "cached window_size": (
        cached(window_size=(2, 0), cache_seqlens=ONES),
        "cache: the kernels compute causal attention",
    ),
    "pages of another size": (
        cached(block_table=ONES[:, None], cache_seqlens=ONES),
        "pages: the kernels are for pages of 16 keys",
    ),
    "keys without lengths": (
        cached(k=torch.ones(2, 1, 2, 16).half(), v=torch.ones(2, 1, 2, 16).half()),
        "pass `k`, `v` and `cache_seqlens` together",
    ),
}


def test_other_arguments_are_refused(package: Path) -> None:
    assert interpreted(_refusals, package) == len(REFUSED)


def _refusals(folder: Path) -> int:
    own = imported(folder, "own_flash_attn")
    k_cache, k = torch.zeros(2, 48, 2, 16).half(), torch.ones(2, 1, 2, 16).half()
    with pytest.raises(ValueError, match="no kernels support causal=True, window_size"):
        own.flash_attn_with_kvcache(
            k, k_cache, k_cache, k, k, cache_seqlens=ONES, window_size=(2, 0), causal=True
        )
    assert not k_cache.any(), "a refused call writes nothing"
    for call, said in REFUSED.values():
        with pytest.raises(ValueError, match=f"^own_flash_attn: (?s:.*){said}"):
            call(own)
    return len(REFUSED)


ARGUMENTS = {
    "flash_attn_func": "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes "
    "deterministic return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
    "softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs "
    "block_table",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap "
    "rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}
"""The arguments of flash-attn 2.8."""


def test_each_argument_of_flash_attn_has_its_place(package: Path) -> None:
    assert interpreted(_arguments, package) == ARGUMENTS


def _arguments(folder: Path) -> dict[str, str]:
    own = imported(folder, "own_flash_attn")
    return {name: " ".join(inspect.signature(getattr(own, name)).parameters) for name in ARGUMENTS}


@pytest.mark.thorough
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    run_example("FlashAttention's functions", tmp_path)
