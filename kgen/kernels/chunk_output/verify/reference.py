"""The output step of chunked linear attention on plain PyTorch, from the decay as written.

With `real=float64` it computes the truth. In fp32, with matrix products in the inputs' dtype, it
computes as eager PyTorch, for comparison of errors. Gradients come from autograd. Formula: Yang et
al., "Gated Delta Networks" (arXiv:2412.06464), section 3.3. Names: `chunk_fwd_o` of
flash-linear-attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kgen.expr.nodes import Node, Read, Type, Var, substitute
from kgen.verify.evaluate import evaluate

NAMES = ("q", "k", "v", "h", "g", "g_gamma")
"""Names of the inputs with real numbers, as in flash-linear-attention. `h` are the states."""

VALUES: dict[Node, Node] = {
    Read("g", (Var("i", Type.INT),), Type.FLOAT): Var("g", Type.FLOAT),
    Read("g_gamma", (Var("h", Type.INT),), Type.FLOAT): Var("g_gamma", Type.FLOAT),
}


@dataclass(frozen=True)
class Chunks:
    """Tokens of each chunk: their index in a row of T tokens, `rows` [NT, BT], and `live` [NT, BT]
    if they exist.
    """

    batch: Tensor
    """Row of the batch, [NT]."""
    rows: Tensor
    live: Tensor


def chunks_of(lengths: Sequence[int], size: int, batch: int = 1, device: Any = "cpu") -> Chunks:
    """Return the chunks of packed sequences of these lengths, in order, for each of `batch`
    rows.
    """
    starts: list[int] = []
    stops: list[int] = []
    begin = 0
    for length in lengths:
        starts += range(begin, begin + length, size)
        stops += [begin + length] * -(-length // size)
        begin += length
    first = torch.tensor(starts, dtype=torch.int64, device=device).reshape(-1, 1)
    last = torch.tensor(stops, dtype=torch.int64, device=device).reshape(-1, 1)
    rows = first + torch.arange(size, device=device)
    live = rows < last
    rows = rows.clamp(max=max(0, begin - 1))
    row = torch.arange(batch, device=device).repeat_interleave(len(starts))
    return Chunks(row, rows.repeat(batch, 1), live.repeat(batch, 1))


def chunk_indices_of(lengths: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return (sequence, chunk in the sequence) of every chunk, as `chunk_indices` of
    flash-linear-attention.
    """
    return [(n, c) for n, length in enumerate(lengths) for c in range(-(-length // size))]


@dataclass(frozen=True)
class Result:
    """The output `o` [B, T, HV, V] and gradients by name. `natural` [B, T, HV] is dg without
    cancellation.

    `from_states` has the term of the states in `o` and in gradients with two terms. The other term
    comes from the tokens of the chunk.
    """

    o: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)
    natural: Tensor | None = None
    from_states: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """The options of a call. With `do`, the gradients of the inputs in `wanted` are computed.

    With `padded`, v is [B, NT * BT, HV, V]. The padding of v does not contribute, even if it is
    NaN.
    """

    decay: Node | None = None
    gate_base: str | int = "e"
    state_layout: str = "kv"
    padded: bool = False
    scale: float | None = None
    do: Tensor | None = None
    wanted: Sequence[str] = ()


PLAIN = Call()


def chunk_output(
    inputs: Mapping[str, Tensor], chunks: Chunks, call: Call = PLAIN, *, exact: bool = True
) -> Result:
    """Compute the output, and the gradients in `call.wanted`.

    - q, k: [B, T, H, K]; v: [B, T, HV, V].
    - h: [B, NT, HV, K, V], or [B, NT, HV, V, K].
    - g: [B, T, HV], and g_gamma: [HV], if the decay reads them.
    - `exact`: compute in float64.
    """
    q, do, wanted = inputs["q"], call.do, call.wanted
    store, real = (torch.float64, torch.float64) if exact else (q.dtype, torch.float32)
    leaves = {
        n: t.detach().to(real if n in ("g", "g_gamma") else store).requires_grad_(n in wanted)
        for n, t in inputs.items()
    }
    o, natural, before = _output(leaves, chunks, call, real)
    if do is None:
        return Result(o.detach(), from_states={"o": before.detach()})

    def gradients(output: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(
            output, [leaves[n] for n in names], do.to(output.dtype), **options
        )
        return dict(zip(names, grads, strict=True))

    grads = {n: x if exact else x.to(inputs[n].dtype) for n, x in gradients(o, wanted).items()}
    of_both = [n for n in wanted if n in ("q", "g")]
    return Result(o.detach(), grads, natural, gradients(before, of_both) if exact else {})


def _output(
    t: Mapping[str, Tensor], chunks: Chunks, call: Call, real: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the output, `natural`, and the term of the states in the output."""
    (B, T, H, K), HV, store = t["q"].shape, t["v"].shape[2], t["q"].dtype
    scale = K**-0.5 if call.scale is None else call.scale
    q, k = (_tokens(t[n], chunks).repeat_interleave(HV // H, 1) for n in ("q", "k"))
    v = _values(t["v"], chunks, call.padded)
    state = t["h"].reshape(-1, HV, *t["h"].shape[3:])
    state = state.mT if call.state_layout == "vk" else state

    gamma, start = _decays(t, chunks, call, real)
    before = start * (q @ state.to(store)).to(real)
    scores = (q @ k.mT).to(real) * gamma
    within = (scores * scale).to(store) @ v
    o = (scale * before + within.to(real)).to(store)
    natural = None
    if call.do is not None and "g" in t:
        d = _tokens(call.do, chunks).to(real)
        terms = (scores * (d @ v.mT.to(real)) * scale).detach().abs()
        natural = terms.sum(-1) + terms.sum(-2) + (scale * before * d).detach().abs().sum(-1)
        natural = _scatter(natural.transpose(1, 2), chunks, B, T)
    o, states = (_scatter(x.transpose(1, 2), chunks, B, T) for x in (o, scale * before))
    return o, natural, states


def _decays(
    t: Mapping[str, Tensor], chunks: Chunks, call: Call, real: Any
) -> tuple[Tensor, Tensor]:
    """The decay from token to token of a chunk, [NT, HV, BT, BT], and from the state to each
    token.
    """
    BT, H, HV = chunks.rows.shape[1], t["q"].shape[2], t["v"].shape[2]
    i = torch.arange(BT, device=t["q"].device)
    exponent = torch.zeros(1, 1, 1, dtype=real, device=t["q"].device)
    if call.decay is not None:
        heads = torch.arange(HV, device=t["q"].device)[:, None]
        env: dict[str, Any] = {"i": i, "h": heads, "H": H, "HV": HV}
        env |= {"g": _tokens(t["g"], chunks)} if "g" in t else {}
        env |= {"g_gamma": t["g_gamma"][:, None]} if "g_gamma" in t else {}
        exponent = evaluate(substitute(call.decay, VALUES), env, torch, real)
        exponent = exponent * (1.0 if call.gate_base == "e" else math.log(2.0))
        shape = torch.broadcast_shapes(exponent.shape, (HV, BT))
        exponent = exponent.expand(shape)  # also where it is one number
    # A row behind the end has no exponent: its difference to one far down would be a power that
    # overflows.
    pair = (i[:, None] >= i[None, :]) & chunks.live[:, None, :, None]
    gamma = torch.where(pair, exponent[..., :, None] - exponent[..., None, :], -torch.inf).exp()
    return gamma, exponent.exp()[..., None]


def _tokens(x: Tensor, chunks: Chunks) -> Tensor:
    """Convert [B, T, heads, ...] to [NT, heads, BT, ...], with zeros for missing tokens."""
    found = x[chunks.batch[:, None], chunks.rows]
    live = chunks.live.reshape(*chunks.live.shape, *[1] * (x.ndim - 2))
    return torch.where(live, found, 0).transpose(1, 2)


def _values(v: Tensor, chunks: Chunks, padded: bool) -> Tensor:
    """The values of each chunk, [NT, HV, BT, V]."""
    if not padded:
        return _tokens(v, chunks)
    rows = v.reshape(-1, chunks.rows.shape[1], *v.shape[2:])
    return torch.where(chunks.live[:, :, None, None], rows, 0).transpose(1, 2)


def _scatter(x: Tensor, chunks: Chunks, B: int, T: int) -> Tensor:
    """Convert [NT, BT, ...] to [B, T, ...]. Every token is in one chunk."""
    out = torch.zeros(B, T, *x.shape[2:], dtype=x.dtype, device=x.device)
    rows = chunks.batch[:, None].expand_as(chunks.rows)[chunks.live], chunks.rows[chunks.live]
    return out.index_put(rows, x[chunks.live])
