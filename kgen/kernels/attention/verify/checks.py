"""Checks of attention: misuse of the launcher, and distant rows.

Each check is a function of a `Subject`. It raises `AssertionError`, or the error of the call, with
a message.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.attention.spec import ANY
from kgen.kernels.attention.verify.inputs import Inputs, call, differentiable, sized
from kgen.kernels.attention.verify.problem import Problem
from kgen.verify import compare
from kgen.verify.families import NOT_NUMBERS, Subject, elsewhere, must_refuse


def reaches_far(subject: Subject) -> None:
    """Check rows that are more than 2**31 elements apart against adjacent rows, with gradients.

    All tensors share one storage of about 2.8e9 elements: 5.5 GB in 16-bit dtypes, 11 GB in fp32.
    """
    for sq in (129, *([3] if subject.problem.decodes else [])):
        _reaches_far(subject, sq)
    if subject.device == "cuda":
        torch.cuda.empty_cache()  # other workers need as much


def _reaches_far(subject: Subject, sq: int) -> None:
    near = sized(subject.problem, "far", sq, 129, subject.device)
    packed = subject.problem.varlen
    tensors = {"q": near.q, "k": near.k, "v": near.v, "dout": near.dout}
    rows = max(t.shape[0 if packed else 2] for t in tensors.values())
    # The last of 129 rows starts at 1.28 * 2**31. In pages, dimension 2 is the head.
    step = (2**31 // 100) // 16 * 16
    storage = torch.empty(rows * step, dtype=near.q.dtype, device=subject.device)
    offset, views = 0, {}
    for name, t in tensors.items():
        heads, width = t.shape[1], t.shape[-1]
        strides = (step, width, 1) if packed else (heads * width, width, step, 1)
        views[name] = storage.as_strided(t.shape, strides, offset).copy_(t)
        offset += heads * width * (1 if packed else len(t))
    far = replace(near, **views)

    def run(inputs: Inputs) -> list[Tensor]:
        inputs = replace(inputs, **{n: getattr(inputs, n).detach() for n in ("q", "k", "v")})
        wanted = differentiable(subject.problem, inputs) if subject.backward else {}
        out = call(subject.function, inputs)
        return [
            out,
            *(torch.autograd.grad(out, list(wanted.values()), inputs.dout) if wanted else ()),
        ]

    for got, want in zip(run(far), run(near), strict=True):
        torch.testing.assert_close(got, want)


def refuses_misuse(subject: Subject) -> None:
    """Check that wrong shapes, dtypes and devices raise `ValueError` or `TypeError`."""
    inputs = sized(subject.problem, "misuse", 48, 48, subject.device)
    offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), inputs.cu_seqlens, strict=False))
    right = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **offsets}
    right |= {**inputs.cache, **inputs.buffers, **inputs.runtime}
    wrong = _misuses(subject, inputs)
    must_refuse(
        {what: partial(subject.function, **{**right, **change}) for what, change in wrong.items()}
    )


def _misuses(subject: Subject, inputs: Inputs) -> dict[str, dict[str, Any]]:
    problem, q, k, v = subject.problem, inputs.q, inputs.k, inputs.v
    length = 0 if problem.varlen else 2
    found: dict[str, dict[str, Any]] = {
        "q with a dimension less": {"q": q[0]},
        "k with another head size": {"k": k[..., :-1]},
        "q and k with another head size": {"q": q[..., :-1], "k": k[..., :-1]},
        "v with another head size": {"v": v[..., :-1]},
        "k and v of different lengths": {"v": v.narrow(length, 0, v.shape[length] - 1)},
        "k in float64": {"k": k.double()},
        "all in float64": {"q": q.double(), "k": k.double(), "v": v.double()},
        "an argument that does not exist": {"no_such_argument": 1},
    }
    found |= {
        f"scale is {what}": {"scale": x} for what, x in {**NOT_NUMBERS, **_NOT_SCALES}.items()
    }
    for name, value in inputs.runtime.items():
        found |= {f"{name} is {what}": {name: x} for what, x in NOT_NUMBERS.items()}
        if isinstance(value, int):
            found[f"{name} beyond int32"] = {name: 2**32 + value}
    if problem.tied_lengths and not problem.varlen:
        found["fewer keys than queries"] = {
            "k": k[:, :, :-1],
            "v": v[:, :, :-1],
            **_without_last_key(problem, inputs),
        }
    if problem.varlen:
        found |= _wrong_offsets(*inputs.cu_seqlens)
    else:
        found["another batch size in k and v"] = {"k": torch.cat([k, k]), "v": torch.cat([v, v])}
    if problem.gqa == "any":
        found["heads that do not divide"] = {
            "q": torch.cat([q[:, :1]] * 3, 1),
            "k": torch.cat([k[:, :1]] * 2, 1),
            "v": torch.cat([v[:, :1]] * 2, 1),
        }
    else:
        found["a query head too many"] = {"q": torch.cat([q, q[:, :1]], 1)}
    if problem.q_multiple > 1:
        found["a q length that breaks its promise"] = {"q": q[:, :, :-1]}
    if problem.kv_multiple > 1 and not problem.page_size:
        found["a kv length that breaks its promise"] = {"k": k[:, :, :-1], "v": v[:, :, :-1]}
    for name, value in inputs.cache.items():
        found[f"{name} of another shape"] = {name: torch.cat([value, value])}
        found[f"{name} of another dtype"] = {name: value.long()}
    if problem.page_size:
        found["pages of another size"] = {"k": k[:, 1:], "v": v[:, 1:]}
        del found["another batch size in k and v"]
    for buffer in problem.buffers:
        value = inputs.buffers[buffer.name]
        told = next((axis for axis, size in enumerate(buffer.shape) if size != ANY), None)
        other = value[None] if told is None else torch.cat([value, value], told)
        found[f"{buffer.name} of another shape"] = {buffer.name: other}
        found[f"{buffer.name} of another dtype"] = {buffer.name: value.to(torch.complex64)}
    offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), inputs.cu_seqlens, strict=False))
    found |= elsewhere(
        {"k": k, "v": v, **offsets, **inputs.cache, **inputs.buffers}, subject.device
    )
    return found


def keeps_to_its_tensors(subject: Subject) -> None:
    """Check that kernels with wrong offsets write only to their tensors, and end."""
    if not subject.problem.varlen:
        return
    inputs = sized(subject.problem, "offsets", 90, 90, subject.device)
    right = inputs.cu_seqlens[0]
    for what, wrong in compare.wrong_offsets(right).items():
        given = replace(inputs, cu_seqlens=(wrong, wrong))
        _, broken = compare.careful(partial(_with_gradients, subject, given), inputs.tensors, "cpu")
        assert not broken, f"offsets {what}: {broken[0].message}"


def _with_gradients(subject: Subject, inputs: Inputs) -> dict[str, Tensor]:
    inputs = replace(inputs, **{n: getattr(inputs, n).detach() for n in ("q", "k", "v")})
    wanted = differentiable(subject.problem, inputs) if subject.backward else {}
    out = call(subject.function, inputs)
    grads = torch.autograd.grad(out, list(wanted.values()), inputs.dout) if wanted else ()
    if subject.device == "cuda":
        torch.cuda.synchronize()
    return {"out": out, **dict(zip(wanted, grads, strict=True))}


_NOT_SCALES: dict[str, Any] = {
    "zero": 0.0,
    "negative": -1.0,
    "zero in float32": 1e-60,
    "inf times log2(e)": 2.5e38,
    "a tensor": torch.tensor(0.1),
}


def _without_last_key(problem: Problem, inputs: Inputs) -> dict[str, Tensor]:
    """Return the buffers without the last key."""
    cut = {}
    for buffer in problem.buffers:
        value = inputs.buffers[buffer.name]
        for axis, size in enumerate(buffer.shape):
            value = value.narrow(axis, 0, value.shape[axis] - (size == "SK"))
        cut[buffer.name] = value
    return cut


def _wrong_offsets(cu_q: Tensor, cu_k: Tensor) -> dict[str, dict[str, Any]]:
    return {
        "offsets of int64": {"cu_seqlens_q": cu_q.long(), "cu_seqlens_k": cu_k.long()},
        "more sequences of keys than of queries": {"cu_seqlens_q": cu_q[:-1]},
        "offsets of no sequence": {"cu_seqlens_q": cu_q[:1], "cu_seqlens_k": cu_k[:1]},
        "offsets with two dimensions": {"cu_seqlens_q": cu_q[None], "cu_seqlens_k": cu_k[None]},
        "offsets with gaps": {"cu_seqlens_q": cu_q.repeat_interleave(2)[::2]},
    }
