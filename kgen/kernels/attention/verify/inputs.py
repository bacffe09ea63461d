"""Difficult cases for an attention kernel, drawn from its spec.

`draw` makes the tensors of a `Case`. The seed is the name of the case, so a failed case can be
drawn again anywhere.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.attention.verify.cache import beyond, lengths, paged, share_first_page
from kgen.kernels.attention.verify.case import Case
from kgen.kernels.attention.verify.deciding import shapes_that_decide
from kgen.kernels.attention.verify.problem import Problem
from kgen.kernels.attention.verify.unread import candidates, with_anything
from kgen.kernels.attention.verify.values import EDGES, drawn, edge
from kgen.verify.deciding import edges
from kgen.verify.evaluate import evaluate
from kgen.verify.tensors import DTYPES, arrange


@dataclass
class Inputs:
    """The tensors of a case.

    q [B, HQ, SQ, D], k [B, HKV, SK, D], v [B, HKV, SK, DV], dout [B, HQ, SQ, DV] have the spec's
    dtype. dlse is float32 [B, HQ, SQ] or None. Packed sequences have [TQ, HQ, D] etc., and dlse
    [HQ, TQ]. `clean_k` and `clean_v` are the reference's inputs: zeros instead of NaN in hidden
    keys. With pages, `k` and `v` are pools.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    clean_k: Tensor
    clean_v: Tensor
    buffers: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, int | float] = field(default_factory=dict)
    """All parameters of the spec, for the reference."""
    runtime: dict[str, int | float] = field(default_factory=dict)
    """The parameters of the emitted function."""
    cache: dict[str, Tensor] = field(default_factory=dict)
    """`kv_lens` and `block_table`, if the emitted function has these arguments."""
    cu_seqlens: tuple[Tensor, ...] = ()
    """Offsets of packed sequences, int32, for queries and keys."""

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The positional arguments of the emitted function."""
        return (self.q, self.k, self.v, *self.cu_seqlens)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a kernel must not write to."""
        named = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "dout": self.dout,
            **self.buffers,
            **self.cache,
        }
        return named | {f"cu_seqlens_{x}": t for x, t in zip("qk", self.cu_seqlens, strict=False)}


NO_TOKENS = Case("no-tokens", 0, 0, batch=2, lse=True, few=True)
"""The only case without tokens, if the spec requires equal numbers of queries and keys."""
NO_SEQUENCES = Case("no-sequences", 40, 40, batch=0, lse=True, few=True)


def cases(problem: Problem, quick: bool) -> tuple[Case, ...]:
    """Return the cases of a spec. `quick` cases are small enough for Triton's interpreter."""
    found: dict[str, Case] = {}
    wanted = (
        packed_cases(problem, quick)
        if problem.varlen
        else (*_wanted(problem, quick), NO_TOKENS, NO_SEQUENCES)
    )
    for number, case in enumerate(wanted):
        fitted = fit(problem, case, number)
        # With multiples of lengths, two cases may have the same shape.
        if not any(replace(fitted, name=name) == other for name, other in found.items()):
            found[fitted.name] = fitted
    return tuple(found.values())


def _wanted(problem: Problem, quick: bool) -> Iterator[Case]:
    yield Case("tile", 64, 64, batch=2)
    # With one key, only the log-sum-exp depends on the score.
    yield Case("one", 1, 1, lse=True)
    yield Case("one-query", 1, 77, lse=True)
    yield Case("one-key", 45, 1, lse=True)
    yield Case("no-keys", 40, 0, batch=2, lse=True)
    yield Case("no-queries", 0, 40, batch=2, lse=True)
    yield Case("off-tile", 129, 129, lse=True)
    yield Case("q-shorter", 33, 100, batch=2, heads_kv=2, layout="mixed", dout="strided", lse=True)
    yield Case(
        "q-longer", 130, 66, lse=True
    )  # a whole tile of queries; one of them sees all keys except the last
    # More heads than a group of programs shares.
    yield Case("bshd", 70, 70, batch=2, heads_kv=3, layout="bshd", dout="strided")
    yield Case("guarded", 65, 67, batch=2, heads_kv=2, layout="guarded", lse=True)
    yield Case(
        "broadcast", 40, 72, batch=2, heads_kv=2, layout="broadcast", dout="expanded", lse=True
    )
    yield Case("stepped", 50, 34, layout="stepped")
    yield Case("large", 66, 66, heads_kv=4, magnitude=16.0, lse=True)
    # The score is far below zero, the score of keys past the end.
    yield Case("one-key-large", 45, 1, magnitude=16.0, lse=True)
    for place in range(3):  # TMA cannot load one operand, because of one stride
        # too many queries to decode
        yield Case(f"odd-{place}", 70, 40, layout=f"odd-{place}", few=True)
    yield Case("scale", 67, 67, scale=0.37, lse=True)
    if problem.exact_scores:
        yield Case("ties", 130, 130, heads_kv=2, magnitude=256.0, ties=True, lse=True)
        yield Case("far-ties", 66, 130, magnitude=2.0**16, ties=True, lse=True, few=True)
        if problem.decodes:
            yield Case("decode-ties", 3, 300, batch=2, magnitude=2.0**12, ties=True, lse=True)
    ints = [
        b
        for b in problem.buffers
        if b.dtype in ("int32", "int64", "uint8", "bool") and not b.sorted
    ]
    if ints:
        yield Case("ints-zero", 70, 70, batch=2, ints="zero", lse=True)
        # no sequence without keys
        yield Case("ints-past", 70, 70, batch=2, layout="guarded", ints="past")
        # several tiles of keys without a mask
        yield Case("ints-far", 20, 160, ints="past", few=True)
    if any(b.dtype == "int64" for b in problem.buffers):
        yield Case("ints-wide", 150, 150, batch=3, ints="wide", lse=True)
    if problem.may_have_no_elements:
        yield Case("no-elements", 40, 70, batch=2, heads_kv=2, lse=True, any_size=0)
    if problem.block_mask:
        yield Case("blocks", 300, 417, batch=2, heads_kv=2, lse=True)
        yield Case("blocks-in-runs", 520, 390, ints="runs", lse=True)
    if problem.key_conjuncts:
        yield Case("nan-hidden", 68, 90, batch=2, heads_kv=2, hidden=True)
    if problem.runtime_params:
        for number in range(1, EDGES):
            yield Case(f"params-{number}", 71, 71, edge=number)
    yield from _small_of_parts(problem)
    if not quick:
        yield from _large(problem, bool(ints))


def _small_of_parts(problem: Problem) -> Iterator[Case]:
    """Small cases for optional features: decoding, masks, gradients, sorted buffers."""
    if problem.decodes:
        yield Case("decode", 1, 300, batch=5, lse=True)
        yield Case("decode-some", 5, 333, batch=4, lse=True)
        yield Case("decode-guarded", 3, 67, batch=3, heads_kv=2, layout="guarded", lse=True)
        yield Case("decode-most", 64, 60)
        yield Case("decode-no-more", 65, 60)
        yield Case("decode-no-keys", 2, 0, batch=2, lse=True)
        # More tiles of keys than splits that are merged at once.
        yield Case("decode-splits", 2, 1300, batch=5, lse=True, few=True)
        yield Case(
            "stepped-again", 70, 34, layout="stepped", few=True
        )  # more queries than decoding kernels support
    if candidates(problem) and (problem.mask_mod is not None or problem.per_batch):
        yield Case("unread", 70, 90, batch=2, heads_kv=2, lse=True, unread=True)
    if "backward" in problem.passes:
        yield Case("lse-alone", 40, 50, dout="none", lse=True, few=True)
        yield Case("k-alone", 50, 40, learned=("k",), few=True)
    if any(b.sorted and b.per_token for b in problem.buffers):
        yield Case(
            "long-documents", 330, 330, ints="runs", few=True
        )  # tiles inside of one document, and across two
    for number, (sq, sk) in enumerate(shapes_that_decide(problem)):
        yield Case(f"decided-{number}", sq, sk, few=True)
    most = {name: max(edges(problem.trees, name), default=0) for name in "bh"}
    if max(most.values()) > 1:
        # Two more sequences and heads than the constants that their indices are compared with.
        group = 1 if problem.gqa == "any" else int(problem.gqa)
        batch, heads = (n + 2 if n > 1 else 1 for n in most.values())
        yield Case("numbers", 2, 20, batch=batch, heads_kv=-(-heads // group), few=True)


def _large(problem: Problem, ints: bool) -> Iterator[Case]:
    """Cases that are too large for the interpreter.

    `ints` is true for a spec with unsorted integer buffers.
    """
    if problem.decodes:
        yield Case("decode-long", 1, 20_000, batch=8, heads_kv=4, lse=True)
        yield Case("decode-bshd", 1, 4099, batch=33, heads_kv=2, layout="bshd", lse=True)
        yield Case("decode-many", 16, 5000, batch=6, heads_kv=3)
        yield Case("decode-large", 4, 3000, batch=3, magnitude=16.0, lse=True)
        yield Case("decode-crowd", 1, 700, batch=100)
        yield Case("decode-alone", 1, 70_000, heads_kv=1, lse=True)
    if problem.per_batch:
        yield Case("ragged", 333, 700, batch=5, heads_kv=2, lse=True)
    yield Case("padded", 130, 130, batch=2, heads_kv=2, layout="padded", dout="strided")
    yield Case("offset", 99, 131, layout="offset")
    if problem.block_mask:
        yield Case("long-blocks", 5000, 4500, heads_kv=2, ints="runs", lse=True)
    yield Case("127", 127, 127, batch=3, heads_kv=2)
    yield Case("257", 257, 257, batch=2, heads_kv=3, lse=True)
    # several short items for each multiprocessor
    yield Case("crowd", 256, 256, batch=16, heads_kv=16)
    yield Case("1000", 1000, 1000, batch=2, heads_kv=2)
    yield Case("2048", 2048, 2048, batch=2, heads_kv=2, lse=True)
    yield Case("2047", 2047, 2047, layout="guarded", heads_kv=2)
    yield Case("wide", 127, 2049, batch=2, heads_kv=2, lse=True)
    yield Case("tall", 2049, 127, batch=2, heads_kv=2)
    # Tiles of queries past the keys, without a mask.
    yield Case("whole-keys", 300, 128, batch=2, heads_kv=2, lse=True)
    # whole tiles of queries see one key more
    yield Case("one-key-more", 320, 129, batch=2, heads_kv=2)
    yield Case("few-queries", 7, 1537, batch=3, heads_kv=2, lse=True)
    yield Case("long-bshd", 1025, 1025, batch=2, heads_kv=4, layout="bshd")
    yield Case(
        "long-broadcast", 513, 1537, batch=3, heads_kv=3, layout="broadcast", dout="expanded"
    )
    yield Case("long-large", 515, 515, heads_kv=2, magnitude=8.0, lse=True)
    if ints:
        yield Case("long-ints-zero", 700, 700, batch=2, ints="zero", lse=True)
        yield Case("long-ints-past", 700, 700, batch=2, ints="past")
    if problem.key_conjuncts:
        yield Case("long-nan-hidden", 513, 1030, batch=3, heads_kv=2, hidden=True)
    if problem.runtime_params:
        for number in range(EDGES):
            yield Case(f"long-params-{number}", 771, 771, edge=number)


def packed_cases(problem: Problem, quick: bool) -> Iterator[Case]:
    """Cases of packed sequences."""

    def case(name: str, *lengths: tuple[int, int], **more: Any) -> Case:
        sq, sk = (max(1, *(pair[i] for pair in lengths)) for i in (0, 1))
        return Case(name, sq, sk, packed=lengths, **more)

    several = ((64, 64), (33, 100), (1, 77), (45, 1), (70, 70))
    yield case("one", (1, 1), lse=True)
    yield case("several", *several, lse=True)
    yield case("empty", (0, 0), (17, 0), (0, 23), (40, 40), (0, 0), heads_kv=2, lse=True)
    yield case("no-tokens", (0, 0), (0, 0), lse=True)
    yield case("tail", (30, 50), (65, 67), heads_kv=2, tail=(70, 68), layout="mixed", lse=True)
    yield case("bshd", (70, 70), (3, 9), heads_kv=2, layout="bshd", dout="strided")
    yield case("guarded", (65, 67), (20, 10), heads_kv=2, tail=(1, 2), layout="guarded", lse=True)
    yield case(
        "broadcast", (40, 72), (9, 9), heads_kv=2, layout="broadcast", dout="expanded", lse=True
    )
    yield case("many", *((i % 4, i % 3) for i in range(130)), lse=True)
    yield case("stepped", (50, 34), (5, 60), layout="stepped")
    yield case("large", (66, 66), (2, 2), (45, 1), magnitude=16.0, lse=True)
    for place in range(3):
        yield case(f"odd-{place}", (20, 30), layout=f"odd-{place}", few=True)
    yield case("scale", (67, 67), (31, 20), scale=0.37, lse=True)
    if problem.exact_scores:
        yield case("ties", (130, 130), (20, 70), heads_kv=2, magnitude=256.0, ties=True, lse=True)
    if problem.may_have_no_elements:
        yield case("no-elements", (33, 20), (0, 9), (7, 0), heads_kv=2, lse=True, any_size=0)
    if problem.runtime_params:
        for number in range(1, EDGES):
            yield case(f"params-{number}", (71, 71), (8, 8), edge=number)
    if candidates(problem):
        yield case(
            "unread", (40, 40), (0, 23), (17, 0), (33, 50), heads_kv=2, lse=True, unread=True
        )
    if "backward" in problem.passes:
        yield case("lse-alone", (20, 30), (9, 7), dout="none", lse=True, few=True)
        yield case("k-alone", (30, 20), (9, 7), learned=("k",), few=True)
    yield case("whole-tiles", (5, 3), (140, 140), few=True)
    for number, (sq, sk) in enumerate(shapes_that_decide(problem)):
        yield case(f"decided-{number}", (9, 7), (sq, sk), few=True)
    if quick:
        return
    yield case("long", (1000, 1000), (1, 1), (2047, 2047), (513, 1537), heads_kv=2, lse=True)
    yield case("documents", *[(512, 512)] * 8, heads_kv=2)
    yield case("wide", (127, 2049), (300, 5), heads_kv=2, layout="padded", dout="strided", lse=True)
    yield case("tall", (2049, 127), (5, 300), heads_kv=2, tail=(1000, 900), layout="offset")
    yield case("short", *((i % 9, i % 7) for i in range(1, 2000)), lse=True)
    yield case("long-large", (515, 515), (300, 300), heads_kv=2, magnitude=8.0, lse=True)
    yield case(
        "long-guarded", (1025, 1025), (129, 640), heads_kv=3, layout="guarded", dout="strided"
    )


def fit(problem: Problem, case: Case, number: int) -> Case:
    """Fit lengths to the spec's multiples, and the group of query heads to its grouping."""
    sq, sk = case.sq, case.sk
    if problem.tied_lengths:
        sq = sk = max(sq, sk)
    group = (
        (1 if case.few else (1, 2, 3, 4)[number % 4]) if problem.gqa == "any" else int(problem.gqa)
    )
    sq = -(-sq // problem.q_multiple) * problem.q_multiple
    # SK is the capacity of the pages.
    whole = problem.page_size if problem.reads_sk else None
    multiple = math.lcm(problem.kv_multiple, whole or 1)
    sk = -(-sk // multiple) * multiple
    if problem.tied_lengths:
        sq = sk = max(sq, sk)
    return replace(case, sq=sq, sk=sk, group=group)


def draw(problem: Problem, case: Case, device: str) -> Inputs:
    """Return the tensors of a case, with the same values on every device."""
    random = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    size = case.sizes
    rows, columns = _extents(case)
    q, k, v, dout = _operands(problem, case, random)
    dlse = torch.randn(rows[::-1] if case.packed else rows, generator=random) if case.lse else None
    runtime = {p.name: edge(p.type, case) for p in problem.runtime_params}
    params = {p.name: p.value for p in problem.params if p.value is not None} | runtime
    buffers = _buffers(problem, case, random)
    if case.layout == "broadcast":
        q, k, v = q[:, :1].expand_as(q), k[:1].expand_as(k), v[:, :1].expand_as(v)
    if case.dout == "expanded":
        dout = dout.flatten()[0].expand_as(dout)
        dlse = None if dlse is None else dlse.flatten()[0].expand_as(dlse)

    hidden = (
        _hidden(problem, case, buffers, params)
        if case.hidden
        else torch.zeros(columns, dtype=torch.bool)
    )
    cache: dict[str, Tensor] = {}
    if problem.page_size is not None:
        k, v = share_first_page(k, problem.page_size), share_first_page(v, problem.page_size)
        # A key of the shared page is hidden only if all sequences hide it.
        hidden[:, :, : problem.page_size] = hidden[:, :, : problem.page_size].all(0)
    if problem.per_batch:
        cache["kv_lens"] = kv_lens(case)
        hidden = hidden | beyond(cache["kv_lens"], case.sk)
    if case.unread:
        keys = cache["kv_lens"].tolist() if problem.per_batch else [case.sk] * size["B"]
        lengths = [(sq, sk, sk) for sq, sk in case.packed] or [
            (case.sq, case.sk, own) for own in keys
        ]
        buffers = with_anything(problem, buffers, {**size, **params, **cache}, lengths)
    clean = k, v
    if hidden.any():
        clean = k.masked_fill(hidden[..., None], 0.0), v.masked_fill(hidden[..., None], 0.0)
        k, v = (x.masked_fill(hidden[..., None], torch.nan) for x in (k, v))
    if problem.page_size is not None:
        k, cache["block_table"] = paged(k, cache["kv_lens"], problem.page_size, share=True)
        v, _ = paged(v, cache["kv_lens"], problem.page_size, share=True)
    if any(case.tail):
        # Tokens after the last sequence are never read.
        ends = [cu[-1] for cu in case.cu_seqlens]
        q[ends[0] :], dout[ends[0] :], k[ends[1] :], v[ends[1] :] = (torch.nan,) * 4
        if dlse is not None:
            dlse[:, ends[0] :] = torch.nan
    contiguous = Inputs(case, q, k, v, dout, dlse, *clean, buffers, params, runtime, cache)
    return _arranged(contiguous, device)


def _extents(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of q and k without the head dimension: [B, H, S], or [T, H] for packed
    sequences.
    """
    size = case.sizes
    if case.packed:
        ends = [cu[-1] for cu in case.cu_seqlens]
        return (ends[0] + case.tail[0], size["HQ"]), (ends[1] + case.tail[1], size["HKV"])
    return (size["B"], size["HQ"], size["SQ"]), (size["B"], size["HKV"], size["SK"])


def _operands(problem: Problem, case: Case, random: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and dout, contiguous, on the CPU."""
    dtype = DTYPES[problem.dtype]

    def normal(*shape: int, magnitude: float = 1.0, whole: bool = False) -> Tensor:
        numbers = torch.randn(shape, generator=random)
        return ((numbers.round().clamp(-2, 2) if whole else numbers) * magnitude).to(dtype)

    rows, columns = _extents(case)
    q = normal(*rows, problem.head_qk, magnitude=case.magnitude, whole=case.ties)
    k = normal(*columns, problem.head_qk, magnitude=case.magnitude, whole=case.ties)
    v = normal(*columns, problem.head_v)
    dout = normal(*rows, problem.head_v)
    return q, k, v, torch.zeros_like(dout) if case.dout == "none" else dout


def _buffers(problem: Problem, case: Case, random: Any) -> dict[str, Tensor]:
    """Return the buffers of a spec, including sinks, contiguous, on the CPU."""
    buffers = {
        b.name: drawn(
            b, case, random, edges(problem.trees, b.name), problem.sinks and b.name == "sinks"
        )
        for b in problem.buffers
    }
    if problem.sinks:
        # As large as scores. The first quarter of the heads has no sink.
        heads = case.sizes["HQ"]
        none = torch.arange(heads) < heads // 4
        sinks = (30 * case.magnitude**2 * buffers["sinks"]).masked_fill(none, -torch.inf)
        buffers["sinks"] = sinks.bfloat16() if case.layout == "bshd" else sinks
    return buffers


def _arranged(inputs: Inputs, device: str) -> Inputs:
    """Return the tensors on a device, in the layouts of the case."""
    case, dlse = inputs.case, None if inputs.dlse is None else inputs.dlse.to(device)
    ours = case.layout if case.layout in ("guarded", "stepped") else "contiguous"
    grads = {"strided": "guarded", "none": "contiguous"}.get(case.dout, case.dout)
    offsets = case.cu_seqlens if case.packed else ()
    return replace(
        inputs,
        q=arrange(inputs.q.to(device), case.layout, 0),
        k=arrange(inputs.k.to(device), case.layout, 1),
        v=arrange(inputs.v.to(device), case.layout, 2),
        dout=arrange(inputs.dout.to(device), grads, 3),
        dlse=_by_token(dlse) if dlse is not None and case.dout == "strided" else dlse,
        clean_k=inputs.clean_k.to(device),
        clean_v=inputs.clean_v.to(device),
        buffers={
            n: arrange(t.to(device), ours, 5 + i) for i, (n, t) in enumerate(inputs.buffers.items())
        },
        cu_seqlens=tuple(torch.tensor(cu, dtype=torch.int32, device=device) for cu in offsets),
        cache={
            n: arrange(t.to(device), ours, 3 + i) for i, (n, t) in enumerate(inputs.cache.items())
        },
    )


def kv_lens(case: Case) -> Tensor:
    """Return keys per sequence, int32 [B]. The name selects the first length."""
    return lengths(case.batch, case.sk, len(case.name))


def _by_token(dlse: Tensor) -> Tensor:
    """Return dlse with the heads of a token adjacent. autograd keeps dense gradients, and copies
    others.
    """
    return dlse.mT.contiguous().mT


def _hidden(
    problem: Problem, case: Case, buffers: Mapping[str, Tensor], params: Mapping[str, int | float]
) -> Tensor:
    """Return the keys that the mask hides at all query positions, bool [B, HKV, SK]."""
    size = case.sizes
    env: dict[str, Any] = {**size, **params, **buffers, "inf": torch.inf}
    env |= {"kv_lens": kv_lens(case)} if problem.per_batch else {}
    env["b"] = torch.arange(size["B"])[:, None, None]
    env["h"] = torch.arange(size["HQ"])[None, :, None]
    env["kv_idx"] = torch.arange(size["SK"])[None, None, :]
    shape = (size["B"], size["HQ"], size["SK"])
    shown = torch.ones(shape, dtype=torch.bool)
    for part in problem.key_conjuncts:
        shown = shown & evaluate(part, env, torch).expand(shape)
    return ~shown.unflatten(1, (case.heads_kv, case.group)).any(2)


def sized(problem: Problem, name: str, sq: int, sk: int, device: str, **more: Any) -> Inputs:
    """Return inputs of about this shape, fitted to the spec. The name is the seed.

    `more` has other fields of the case.
    """
    template = cases(problem, quick=True)[0]
    if problem.tied_lengths:
        sq = sk = max(sq, sk)
    sq, sk = (
        -(-sq // problem.q_multiple) * problem.q_multiple,
        -(-sk // problem.kv_multiple) * problem.kv_multiple,
    )
    lengths = ((sq - sq // 3, sk - sk // 3), (sq // 3, sk // 3)) if problem.varlen else ()
    changed: dict[str, Any] = {
        "name": name,
        "sq": sq,
        "sk": sk,
        "packed": lengths,
        "lse": False,
    } | more
    return draw(problem, replace(template, **changed), device)


def call(function: Any, inputs: Inputs, **more: Any) -> Any:
    """Call the emitted function on inputs as a user does."""
    keywords = {**inputs.cache, **inputs.buffers, **inputs.runtime, **more}
    return function(*inputs.operands, scale=inputs.case.scale, **keywords)


def differentiable(problem: Problem, inputs: Inputs) -> dict[str, Tensor]:
    """Return the inputs that need gradients by name, with `requires_grad` set."""
    names = [b.name for b in problem.buffers if b.grad]
    wanted = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | {
        name: inputs.buffers[name] for name in names
    }
    learned = inputs.case.learned or (*wanted,)
    return {name: tensor.requires_grad_() for name, tensor in wanted.items() if name in learned}
