"""Batches of a serving engine: packed queries, and keys in pages.

A batch is drawn as packed sequences. Its keys and values then move into pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.attention.verify.cache import NO_PAGE, SPARE
from kgen.kernels.attention.verify.case import Case
from kgen.kernels.attention.verify.inputs import Inputs, draw
from kgen.kernels.attention.verify.problem import Problem
from kgen.kernels.attention.verify.reference import Result

Lengths = tuple[tuple[int, int], ...]
"""New queries and all keys of each sequence."""


@dataclass(frozen=True)
class Batch:
    """One call of the function for serving."""

    name: str
    lengths: Lengths
    page_size: int = 16
    layout: str = "NHD"
    """`NHD`, `HND`, or `joint`: keys and values in one tensor [2, pages, ...]."""
    heads_kv: int = 2
    group: int = 2
    tail: int = 0
    """Queries after the last sequence, which a CUDA graph may have."""
    longest: bool = False
    """True if the call passes `max_seqlen_q`."""
    given: bool = True
    """True if the call passes `out`, `lse` and `workspace`."""
    magnitude: float = 1.0
    scales: str = "number"
    """The scales of a quantized cache: `number`, `tensor` (one element), `head`, `page`, or
    `token` (each token and head).
    """
    processors: int | None = None
    """Number of multiprocessors that the launcher sees, if not the number of the device. With more
    of them, it splits more tiles.
    """


_MIXED = ((1, 77), (5, 40), (33, 200), (1, 1), (0, 20), (64, 64), (0, 0), (1, 131))
BATCHES = (
    Batch("mixed", _MIXED),
    Batch("mixed-hnd", _MIXED, 32, "HND", group=4, scales="token", processors=24),
    Batch("mixed-joint", _MIXED[::-1], 64, "joint", 1, 8, scales="head", processors=24),
    Batch("mixed-wide-pages", _MIXED, 128, tail=9, scales="token"),
    Batch("decodes", tuple((1, n) for n in (300, 64, 1, 129, 63)), 64, longest=True, scales="head"),
    Batch("one-long", ((1, 700),), 16, heads_kv=1, longest=True, scales="page", processors=24),
    Batch("speculative", ((4, 90), (4, 4), (3, 257)), 16, "joint", longest=True, given=False),
    Batch("prompts", ((130, 130), (70, 70), (1, 1)), 128, "HND", 1, scales="token", processors=24),
    Batch("chunk", ((40, 400),), 48, heads_kv=1, given=False, scales="page", processors=24),
    Batch("odd-pages", ((1, 90), (20, 33)), 10, tail=3, scales="tensor", processors=24),
    Batch("empty", ((0, 0), (0, 30)), 16, tail=5),
    Batch("more-queries", ((9, 4), (3, 0)), 16),
    Batch("large", ((1, 90), (30, 66)), 16, magnitude=16.0, processors=24),
    Batch("crowd", tuple((33, 40 + i) for i in range(70)), 16, heads_kv=1),
    Batch("many", tuple((i % 3, 7 * i % 40 + i % 3) for i in range(140)), 16, heads_kv=1),
)


UNREADABLE = 0x7F
"""The bits of NaN in FP8, and the largest number of int8."""
PREFIX = "serve-"
"""The beginning of the names of batches among the cases of a spec."""


def names(problem: Problem) -> tuple[str, ...]:
    """Return the names of the batches of a spec, if it has the pass `serve`."""
    own = batches(problem) if "serve" in problem.passes else ()
    return tuple(f"{PREFIX}{batch.name}" for batch in own)


def batches(problem: Problem) -> tuple[Batch, ...]:
    """Return the batches of a spec, with its number of query heads per KV head."""
    if problem.gqa == "any":
        return BATCHES
    return tuple(replace(batch, group=int(problem.gqa)) for batch in BATCHES)


def packed(problem: Problem) -> Problem:
    """Return the problem of the same attention over packed sequences."""
    return replace(
        problem,
        passes=("forward",),
        varlen=True,
        aligned_to_end=True,
        per_batch=False,
        page_size=None,
        q_multiple=1,
        kv_multiple=1,
    )


@dataclass
class Served:
    """The tensors of a batch."""

    batch: Batch
    inputs: Inputs
    """The same queries and keys as packed sequences."""
    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    seq_lens: Tensor
    out: Tensor
    lse: Tensor
    scales: Mapping[str, Any] = field(default_factory=dict)
    """The arguments `k_scale` and `v_scale`, for a quantized cache."""

    @property
    def new(self) -> int:
        """Number of queries of all sequences."""
        return sum(new for new, _ in self.batch.lengths)

    def rows_of(self, result: Result) -> Result:
        """Return a result without the queries after the last sequence."""
        return replace(
            result,
            out=result.out[: self.new],
            lse=result.lse[:, : self.new],
            row_max=result.row_max[:, : self.new],
            dead=result.dead[: self.new],
        )


def drawn(problem: Problem, batch: Batch, device: str) -> Served:
    """Return the tensors of a batch. Pages are in random order, and unused rows hold NaN."""
    sq, sk = (max(1, *(pair[i] for pair in batch.lengths), 1) for i in (0, 1))
    case = Case(
        batch.name,
        sq,
        sk,
        heads_kv=batch.heads_kv,
        group=batch.group,
        packed=batch.lengths,
        tail=(batch.tail, 0),
        magnitude=batch.magnitude,
        lse=True,
    )
    inputs = draw(packed(problem), case, device)
    table = _table(batch, device)
    rows, heads = len(inputs.q), inputs.q.shape[1]
    stored, scales = (inputs.k, inputs.v), dict[str, Any]()
    if problem.kv_dtype is not None:
        scales = _scales(batch, table)
        by_key = {name: _of_keys(batch, table, x) for name, x in scales.items()}
        stored, inputs = _quantized(problem.kv_dtype, inputs, by_key)
        scales = {name: _laid_out(batch, x) for name, x in scales.items()}
    k_pages, v_pages = _pages(batch, table, *stored)
    if problem.kv_dtype is not None:
        k_pages, v_pages = (_narrow(x, problem.kv_dtype) for x in (k_pages, v_pages))
    return Served(
        batch,
        inputs,
        k_pages,
        v_pages,
        table,
        torch.tensor([keys for _, keys in batch.lengths], dtype=torch.int32, device=device),
        inputs.q.new_full((rows, heads, problem.head_v), 7.0),
        torch.full((heads, rows), 7.0, device=device),
        scales,
    )


QUANTIZED = {
    "fp8_e4m3": (torch.float8_e4m3fn, 448.0),
    "fp8_e5m2": (torch.float8_e5m2, 57344.0),
    "int8": (torch.int8, 127.0),
}
"""The dtypes of a quantized cache, with their largest numbers."""


def _scales(batch: Batch, table: Tensor) -> dict[str, Any]:
    """Return the scales of a cache. Unused scales of pages and tokens are NaN."""
    heads, device = batch.heads_kv, table.device
    by_head = 0.01 * (1 + torch.arange(heads, dtype=torch.float32, device=device))
    if batch.scales == "number":
        return {"k_scale": 0.013, "v_scale": 0.02}
    if batch.scales == "tensor":
        return {"k_scale": by_head[0], "v_scale": by_head[:1]}
    if batch.scales == "head":
        return {"k_scale": by_head, "v_scale": by_head.flip(0) / 2}
    by_token = batch.scales == "token"
    sizes = (batch.page_size, heads) if by_token else (1, 1)
    pool = torch.full((_count(table), *sizes), torch.nan, device=device)
    for b, (_, keys) in enumerate(batch.lengths):
        at = torch.arange(keys if by_token else -(-keys // batch.page_size), device=device)
        page = at // batch.page_size if by_token else at
        rows = 0.01 * 2.0 ** (at % 5 - 2).float()
        own = by_head / by_head[0] if by_token else by_head.new_ones(1)
        pool[table[b].long()[page], at % sizes[0]] = rows[:, None] * own
    return {"k_scale": pool, "v_scale": pool / 2}


def _of_keys(batch: Batch, table: Tensor, scale: Any) -> Tensor:
    """Return the scales of packed keys, [TK, HKV] or by head."""
    x = torch.as_tensor(scale, dtype=torch.float32, device=table.device)
    if x.dim() < 3:
        return x.reshape(-1)
    size, found = batch.page_size, []
    for b, (_, keys) in enumerate(batch.lengths):
        at = torch.arange(keys, device=table.device)
        found.append(x[table[b].long()[at // size], at % size if x.shape[1] > 1 else 0])
    return torch.cat(found)


def _laid_out(batch: Batch, scale: Any) -> Any:
    """Return a scale in the order of the pages."""
    if batch.layout != "HND" or not isinstance(scale, Tensor) or scale.dim() < 3:
        return scale
    return scale.transpose(1, 2).contiguous()


def quantized(x: Tensor, scale: Any, kv_dtype: str) -> Tensor:
    """Return stored values of x [T, HKV, D], as float32. Scales are numbers, [HKV] or [T, HKV]."""
    dtype, most = QUANTIZED[kv_dtype]
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    values = (x.float() / scale[..., None]).clamp(-most, most)
    return values.round() if kv_dtype == "int8" else values.to(dtype).float()


def _quantized(
    kv_dtype: str, inputs: Inputs, scales: Mapping[str, Tensor]
) -> tuple[tuple[Tensor, Tensor], Inputs]:
    """Return the stored keys and values, and inputs whose reference has their dequantized
    values.
    """
    stored, clean = [], []
    for x, scale in ((inputs.k, scales["k_scale"]), (inputs.v, scales["v_scale"])):
        stored.append(quantized(x, scale, kv_dtype))
        clean.append(stored[-1].double() * scale[..., None].double())
    k, v = stored
    return (k, v), replace(inputs, clean_k=clean[0], clean_v=clean[1])


def _narrow(pool: Tensor, kv_dtype: str) -> Tensor:
    """Return a pool in the dtype of a quantized cache, with its view of a joint tensor lost."""
    dtype, _ = QUANTIZED[kv_dtype]
    unused = pool.isnan()
    found = pool.nan_to_num(0.0).to(dtype)
    found.view(torch.uint8)[unused] = UNREADABLE
    return found


def _table(batch: Batch, device: str) -> Tensor:
    """Return a block table. Entries past the last page of a sequence must not be read."""
    size = batch.page_size
    counts = [-(-keys // size) for _, keys in batch.lengths]
    order = torch.randperm(sum(counts) + SPARE, generator=torch.Generator().manual_seed(size))
    table = torch.full((len(counts), max(*counts, 0) + 1), NO_PAGE, dtype=torch.int32)
    for b, count in enumerate(counts):
        first = sum(counts[:b])
        table[b, :count] = order[first : first + count]
    return table.to(device)


def _count(table: Tensor) -> int:
    """Return the number of pages of a cache."""
    return int((table != NO_PAGE).sum()) + SPARE


def _pages(batch: Batch, table: Tensor, *packed: Tensor) -> list[Tensor]:
    """Return pools of pages [pages, page_size, HKV, D], in the memory order of the batch."""
    size, count = batch.page_size, _count(table)
    pools = []
    for x in packed:
        pool = x.new_full((count, size, *x.shape[1:]), torch.nan)
        for b, rows in enumerate(x.split([keys for _, keys in batch.lengths])):
            at = torch.arange(len(rows), device=x.device)
            pool[table[b].long()[at // size], at % size] = rows
        pools.append(pool)
    if batch.layout == "HND":
        return [pool.transpose(1, 2).contiguous() for pool in pools]
    if batch.layout == "joint" and pools[0].shape == pools[1].shape:
        return [*torch.stack(pools)]
    # Other strides than the strides of keys.
    values = pools[1]
    heads = values.shape[2]
    wider = values.new_full((count, size + 1, heads + 1, values.shape[3]), torch.nan)
    pools[1] = wider[:, :size, :heads].copy_(values)
    return pools


def hide(served: Served, seen: Tensor) -> None:
    """Fill the keys that no query of a KV head sees with NaN. `seen` is [TK, HKV]."""
    batch = served.batch
    for x in (served.k_pages, served.v_pages):
        pool = x.transpose(1, 2) if batch.layout == "HND" else x
        bits = pool.view(torch.uint8) if pool.element_size() == 1 else pool
        shown = seen.split([keys for _, keys in batch.lengths])
        for b, rows in enumerate(shown):
            token, head = (~rows).nonzero(as_tuple=True)
            page = served.block_table[b].long()[token // batch.page_size]
            nothing = torch.nan if bits is pool else UNREADABLE
            bits[page, token % batch.page_size, head] = nothing
            _hide_scales(served, page, token % batch.page_size, head)


def _hide_scales(served: Served, page: Tensor, at: Tensor, head: Tensor) -> None:
    """Fill the scales of tokens of pages with NaN, if each token has a scale."""
    if served.batch.scales != "token":
        return
    for x in served.scales.values():
        pool = x.transpose(1, 2) if served.batch.layout == "HND" else x
        pool[page, at, head] = torch.nan


def call(names: Mapping[str, Any], problem: Problem, served: Served, **more: Any) -> Any:
    """Call the function for serving among the `names` of an emitted file, as an engine does."""
    function = names[f"{problem.name}_serve"]
    given = {**keywords(served), **(room(names, problem, served) if served.batch.given else {})}
    if not served.batch.given:
        given["return_lse"] = True
    return function(served.inputs.q, served.k_pages, served.v_pages, **{**given, **more})


@contextlib.contextmanager
def processors(names: dict[str, Any], batch: Batch) -> Iterator[None]:
    """Let the launcher see the multiprocessors of the batch within the context."""
    count, own = batch.processors, names["_multiprocessors"]
    names["_serve_lists"].cache_clear()
    if count is not None:
        names["_multiprocessors"] = lambda device: count
    try:
        yield
    finally:
        names["_multiprocessors"] = own
        names["_serve_lists"].cache_clear()


def keywords(served: Served) -> dict[str, Any]:
    """Return the keyword arguments of a call, except the tensors that it writes to."""
    batch, inputs = served.batch, served.inputs
    found = {
        "block_table": served.block_table,
        "seq_lens": served.seq_lens,
        "cu_seqlens_q": inputs.cu_seqlens[0],
        "scale": inputs.case.scale,
        "kv_layout": "HND" if batch.layout == "HND" else "NHD",
        **served.scales,
        **inputs.buffers,
        **inputs.runtime,
    }
    longest = max((new for new, _ in batch.lengths), default=0)
    return {**found, **({"max_seqlen_q": longest} if batch.longest else {})}


def room(names: Mapping[str, Any], problem: Problem, served: Served) -> dict[str, Tensor]:
    """Return the tensors to which a call writes."""
    batch, (rows, heads, _) = served.batch, served.inputs.q.shape
    longest = keywords(served).get("max_seqlen_q")
    device = served.inputs.q.device
    size = names[f"{problem.name}_serve_workspace"](
        rows, len(batch.lengths), heads, batch.heads_kv, max_seqlen_q=longest, device=device
    )
    workspace = torch.full((size,), 0xA5, dtype=torch.uint8, device=device)
    return {"out": served.out, "lse": served.lse, "workspace": workspace}


def results(found: tuple[Tensor, Tensor], served: Served) -> dict[str, Tensor]:
    """Return the rows of the sequences. Rows after the last one must keep their values."""
    new, (out, lse) = served.new, found
    if served.batch.given and served.batch.tail:
        assert bool((out[new:] == 7.0).all() and (lse[:, new:] == 7.0).all()), "rows after the end"
    return {"out": out[:new].clone(), "lse": lse[:, :new].clone()}


def tensors(served: Served) -> dict[str, Tensor]:
    """Return the tensors that kernels must not write to."""
    cache = {"k_pages": served.k_pages, "v_pages": served.v_pages}
    own = {**cache, "block_table": served.block_table, "seq_lens": served.seq_lens}
    return {**served.inputs.tensors, **own}


def compiled(group: int) -> tuple[Batch, ...]:
    """Return batches that together launch all kernels: of few and of many rows, in small and large
    pages, with and without a log-sum-exp.
    """
    few = Batch("serve-few", ((1, 128), (1, 64)), 64, group=group, longest=True, scales="head")
    long = ((256, 256), (2, 77))
    many = Batch("serve-many", long, 128, group=group, given=False, scales="token")
    return (few, many, replace(few, name="serve-small-pages", page_size=16, scales="page"))


def compile_batch(problem: Problem, batch: Batch, function: Any) -> None:
    """Call the functions for serving in the file of `function`."""
    served, names = drawn(problem, batch, "cpu"), function.__globals__
    call(names, problem, served)
    call(names, problem, replace(served, batch=replace(batch, given=False)), return_lse=False)
    if problem.row_max:
        call(names, problem, served, return_max=True)
    append(names, problem, served)


def append(names: Mapping[str, Any], problem: Problem, served: Served, **changes: Any) -> None:
    """Write a new key and value for each query of a batch into the cache of a function."""
    q, heads = served.inputs.q, served.batch.heads_kv
    k, v = (
        q[:, :heads, :1].expand(-1, -1, width).contiguous()
        for width in (problem.head_qk, problem.head_v)
    )
    slots = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    given = {"k": k, "v": v, "k_pages": served.k_pages, "v_pages": served.v_pages}
    given |= {"slot_mapping": slots, **served.scales}
    if served.scales:
        given["set_scales"] = served.batch.scales == "token"
    changed = {name: change(given[name]) for name, change in changes.items()}
    names[f"{problem.name}_append"](**{**given, **changed})
