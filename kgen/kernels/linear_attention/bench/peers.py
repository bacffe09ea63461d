"""The peers of a linear_attention kernel: flash-linear-attention and eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kgen.bench.peers import FLA, DoesNotApply
from kgen.kernels.linear_attention.verify.eager import eager
from kgen.kernels.linear_attention.verify.inputs import Case, gates_of
from kgen.kernels.linear_attention.verify.problem import Problem
from kgen.kernels.linear_attention.verify.reference import Call, gates
from kgen.verify.tensors import DTYPES


@dataclass(frozen=True)
class Workload:
    """Tensors by argument name, do [B, T, HV, V], and other arguments."""

    problem: Problem
    tensors: Mapping[str, Tensor]
    do: Tensor
    keywords: Mapping[str, Any]

    @property
    def learned(self) -> tuple[str, ...]:
        """The inputs with gradients.

        Buffers come last: peers take the gates that are computed from them.
        """
        return ("q", "k", "v", *(b.name for b in self.problem.buffers if b.grad))


def draw_workload(problem: Problem, shape: Any, tokens: int, batch: int, device: str) -> Workload:
    """Create `batch` sequences of N(0, 1) operands, and gates whose state lasts for about a
    chunk.
    """
    torch.manual_seed(0)
    H = problem.heads or shape.heads
    HV = problem.heads_v or (H * problem.group if problem.group else shape.heads_v)
    K, V = problem.head_qk, problem.head_v
    B, T = (1, batch * tokens) if problem.varlen else (batch, tokens)
    dtype = DTYPES[problem.dtype]

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device)

    keys = normal(B, T, H, K)
    keys = keys / keys.norm(dim=-1, keepdim=True) if problem.unit_keys else keys
    found = {"q": normal(B, T, H, K), "k": keys, "v": normal(B, T, HV, V)}
    found = {name: x.to(dtype) for name, x in found.items()}
    sizes, case = {"T": T, "HV": HV, "K": K, "V": V}, Case("bench", (T,))
    for buffer in problem.buffers:
        dims = [*([B] if buffer.tokens else []), *(sizes[size] for size in buffer.shape)]
        numbers = gates_of(problem, buffer, case, normal(*dims))
        found[buffer.name] = numbers.to(DTYPES[buffer.dtype])
    keywords: dict[str, Any] = {}
    if problem.varlen:
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
        keywords["cu_seqlens"] = ends * tokens
    return Workload(problem, found, normal(B, T, HV, V).to(dtype), keywords)


def nbytes(workload: Workload, backward: bool) -> int:
    """Return the bytes of all inputs and outputs, each counted once."""
    tensors, do = workload.tensors, workload.do
    inputs = sum(t.numel() * t.element_size() for t in tensors.values())
    gradients = sum(tensors[n].numel() * tensors[n].element_size() for n in workload.learned)
    return int(inputs + do.numel() * do.element_size() + (gradients if backward else 0))


def prepare(
    peer: str, workload: Workload, functions: Mapping[str, Any], backward: bool
) -> Callable[[], Any]:
    """Return a function to time. It returns [o], or the gradients of `learned` in order, perhaps
    without the last.

    Raise `DoesNotApply` if the peer cannot compute the spec.
    """
    if peer in functions:
        return _timed(functions[peer], workload, workload.learned, backward)
    return {"fla": _fla, "eager": _eager}[peer](workload, backward)


def prepare_steps(function: Any, workload: Workload, states: int) -> tuple[Callable[[], Any], int]:
    """Return a call that steps states in place by one token, and the bytes that it moves."""
    problem, do = workload.problem, workload.do
    state = torch.zeros(
        (states, do.shape[2], problem.head_qk, problem.head_v),
        dtype=DTYPES[problem.state_dtype],
        device=do.device,
    )
    moved = nbytes(workload, False) + 2 * state.numel() * state.element_size()
    return (
        lambda: [function(**workload.tensors, state=state, **workload.keywords)],
        moved,
    )


def _timed(
    function: Any, workload: Workload, learned: tuple[str, ...], backward: bool
) -> Callable[[], Any]:
    tensors = {
        n: t.detach().requires_grad_(backward and n in learned) for n, t in workload.tensors.items()
    }
    if not backward:
        return lambda: [function(**tensors, **workload.keywords)]
    o, wanted = function(**tensors, **workload.keywords), [tensors[n] for n in learned]
    return lambda: torch.autograd.grad(o, wanted, workload.do, retain_graph=True)


def _eager(workload: Workload, backward: bool) -> Callable[[], Any]:
    problem, starts = workload.problem, workload.keywords.get("cu_seqlens")
    lengths = None if starts is None else tuple(starts.diff().tolist())
    wanted = workload.learned if backward else ()
    call = Call(lengths, None, {"o": workload.do} if backward else {}, wanted)

    def run() -> list[Tensor]:
        result = eager(problem, workload.tensors, call)
        return list(result.grads.values()) if backward else [result.o]

    return run


def _fla(workload: Workload, backward: bool) -> Callable[[], Any]:
    """Return fla's kernels on the same numbers, with gates that are computed before."""
    problem, tensors = workload.problem, workload.tensors
    function, options = _of_fla(problem)
    H, HV = tensors["q"].shape[2], tensors["v"].shape[2]
    if H != HV and "gated_delta_rule" not in function.__name__:
        raise DoesNotApply
    decay, beta = gates(problem, tensors)
    if decay is not None:
        options["g"] = decay.expand(*decay.shape[:3], -1) if problem.by_column else decay[..., 0]
    if problem.delta:
        ones = torch.ones_like(workload.do[..., 0])
        options["beta"] = ones if beta is None else beta[..., 0].to(ones.dtype)
    if (starts := workload.keywords.get("cu_seqlens")) is not None:
        options["cu_seqlens"] = starts.long()
    options["scale"] = problem.head_qk**-0.5 if problem.scale is None else problem.scale
    plain = {n: tensors[n] for n in ("q", "k", "v")}
    own = Workload(problem, plain, workload.do, options)
    return _timed(lambda **given: function(**given)[0], own, ("q", "k", "v"), backward)


def _of_fla(problem: Problem) -> tuple[Any, dict[str, Any]]:
    """Return the function of fla for a spec, with its constant options."""
    maps = problem.q_map is not None or problem.k_map is not None
    more = problem.skip is not None or problem.finishes
    if maps or more or (problem.beta is not None and not problem.delta):
        raise DoesNotApply
    ops = FLA.load()
    if not problem.delta:
        if problem.norm_eps is not None:
            raise DoesNotApply
        return (ops.chunk_gla if problem.by_column else ops.chunk_simple_gla), {}
    options = {"use_qk_l2norm_in_kernel": problem.norm_eps is not None}
    if problem.by_column:
        return ops.chunk_kda, options
    return (ops.chunk_delta_rule if problem.decay is None else ops.chunk_gated_delta_rule), options
