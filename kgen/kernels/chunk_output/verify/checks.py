"""Checks of chunk_output: misuse of the launcher, and NaN in data that a chunk must not read.

Each check is a function of a `Subject`. It raises `AssertionError`, or the error of the call, with
a message.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.chunk_output.verify.inputs import Case, Inputs, call, differentiable, draw, sized
from kgen.kernels.chunk_output.verify.reference import chunk_indices_of
from kgen.verify.compare import careful, same_bits, wrong_offsets
from kgen.verify.families import NOT_NUMBERS, Subject, elsewhere, must_refuse

FAR = 2**31
"""Number of elements from which an offset needs 64 bits."""


def reaches_far(subject: Subject) -> None:
    """Check sequences, tokens and heads more than 2**31 elements apart against adjacent ones, with
    gradients.

    Needs 2**32 to 3 * 2**31 elements at a time: 9 to 13 GB in 16 bits, twice as much in float32.
    """
    problem = subject.problem
    # Enough tokens for the launcher to accept these strides.
    lengths = (86, 173) if problem.varlen else (259,)
    batch, heads = 1 if problem.varlen else 2, problem.heads or 2
    near = draw(
        problem,
        Case("far", lengths, batch=batch, heads=heads, indices=problem.varlen),
        subject.device,
    )
    want = _results(subject, near)
    for name, tensor in (near.tensors | {"do": near.do}).items():
        for axis in range(3 if tensor.dim() > 2 else 0):
            if tensor.shape[axis] == 1:
                continue
            far = {name: _apart(tensor, axis)}
            given = (
                replace(near, **far) if name == "do" else replace(near, tensors=near.tensors | far)
            )
            for output, got in _results(subject, given).items():
                where = f"{output} with dimension {axis} of {name} far apart"
                torch.testing.assert_close(
                    got, want[output], msg=lambda said, where=where: f"{where}: {said}"
                )
            del far, given
            if subject.device == "cuda":
                torch.cuda.empty_cache()  # other workers need as much


def _apart(tensor: Tensor, axis: int) -> Tensor:
    """Return a copy whose second half along an axis is at least `FAR` elements from the first
    element.

    Other elements are as close as possible.
    """
    strides, room = [0] * tensor.dim(), 1
    for i in (i for i in reversed(range(tensor.dim())) if i != axis):
        strides[i], room = room, room * tensor.shape[i]
    strides[axis] = max(FAR // (tensor.shape[axis] // 2) // 16 * 16 + 16, -(-room // 16) * 16)
    storage = torch.empty(
        strides[axis] * tensor.shape[axis], dtype=tensor.dtype, device=tensor.device
    )
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


def keeps_sequences_apart(subject: Subject) -> None:
    """Check that a chunk of NaN does not change a bit of other chunks or their gradients.

    The chunk before it ends in the middle of a tile, so a load without a mask would read NaN.
    """
    problem = subject.problem
    BT, heads = problem.chunk_size, problem.heads or 1
    case = Case("apart", (BT - 3, 2 * BT) if problem.varlen else (3 * BT - 3,), heads=heads)
    clean = draw(problem, case, subject.device)
    sick = 1  # index of the chunk of NaN
    rows = clean.chunks.rows[sick][clean.chunks.live[sick]]

    def poisoned(name: str, t: Tensor) -> Tensor:
        t = t.clone()
        if name == "h":
            t[:, sick] = torch.nan
        elif name == "v" and problem.padded:
            t[:, sick * BT : (sick + 1) * BT] = torch.nan
        elif name != "g_gamma":
            t[:, rows] = torch.nan
        return t

    other = replace(
        clean,
        tensors={n: poisoned(n, t) for n, t in clean.tensors.items()},
        do=poisoned("do", clean.do),
    )
    for (name, want), got in zip(
        _results(subject, clean).items(), _results(subject, other).values(), strict=True
    ):
        if name == "h":
            want, got = (torch.cat([t[:, :sick], t[:, sick + 1 :]], 1) for t in (want, got))
        elif name == "v" and problem.padded:
            want, got = (
                torch.cat([t[:, : sick * BT], t[:, (sick + 1) * BT :]], 1) for t in (want, got)
            )
        else:
            kept = torch.ones(want.shape[1], dtype=torch.bool)
            kept[rows.cpu()] = False
            want, got = want[:, kept.to(want.device)], got[:, kept.to(want.device)]
        assert same_bits(want, got), (
            f"{'o' if name == 'o' else 'd' + name} depends on another chunk"
        )


def _results(subject: Subject, inputs: Inputs) -> dict[str, Tensor]:
    """Return the output, and the gradients by the names of their inputs."""
    inputs = replace(inputs, tensors={n: t.detach() for n, t in inputs.tensors.items()})
    wanted = differentiable(subject.problem, inputs) if subject.backward else {}
    o = call(subject.function, inputs)
    grads = torch.autograd.grad(o, list(wanted.values()), inputs.do) if wanted else ()
    return {"o": o.detach(), **dict(zip(wanted, grads, strict=True))}


def takes_spare_chunks(subject: Subject) -> None:
    """Check states and chunk_indices that are longer than necessary.

    Spare states get zero gradients.
    """
    if not subject.problem.varlen:
        return
    inputs = sized(subject.problem, "spare", 3 * subject.problem.chunk_size, subject.device)
    del inputs.keywords["chunk_indices"]
    want = _results(subject, inputs)
    tensors = dict(inputs.tensors)
    spare = torch.full_like(tensors["h"][:, :2], torch.nan)
    tensors["h"] = torch.cat([tensors["h"], spare], 1)
    if subject.problem.padded:
        tail = torch.full_like(tensors["v"][:, : 2 * subject.problem.chunk_size], torch.nan)
        tensors["v"] = torch.cat([tensors["v"], tail], 1)
    got = _results(subject, replace(inputs, tensors=tensors))
    for name, value in want.items():
        own, rest = got[name][:, : value.shape[1]], got[name][:, value.shape[1] :]
        assert same_bits(own, value), f"{name} depends on spare chunks"
        assert not rest.numel() or bool((rest == 0).all()), f"{name} of spare chunks is not zero"


def keeps_to_its_tensors(subject: Subject) -> None:
    """Check that kernels with wrong offsets and chunk indices write only to their tensors, and
    end.
    """
    if not subject.problem.varlen:
        return
    inputs = sized(subject.problem, "offsets", subject.problem.chunk_size + 5, subject.device)
    right = {name: inputs.keywords[name] for name in ("cu_seqlens", "chunk_indices")}
    wrong = {(name, what): x for name, t in right.items() for what, x in wrong_offsets(t).items()}
    tried = (
        [*wrong]
        if subject.device == "cuda"
        else [("cu_seqlens", "past the tokens"), ("chunk_indices", "far")]
    )
    for name, what in tried:
        change = {name: wrong[name, what]}
        given = replace(inputs, keywords={**inputs.keywords, **change})
        _, broken = careful(partial(_results, subject, given), inputs.tensors | change, "cpu")
        if subject.device == "cuda":
            torch.cuda.synchronize()
        assert not broken, f"{name} {what}: {broken[0].message}"


def finds_chunks(subject: Subject) -> None:
    """Check chunks of more sequences than a program reads at once, and of sequences with as many
    chunks.
    """
    if not (subject.problem.varlen and hasattr(subject.module, "_chunk_indices")):
        return
    size = subject.problem.chunk_size
    for lengths in (
        [1],
        [0, 3, 0],
        [max(0, i % 3 * size - i % 2) for i in range(290)] + [140 * size, 0, 290 * size],
    ):
        ends = torch.tensor([0, *lengths], dtype=torch.int32, device=subject.device).cumsum(
            0, dtype=torch.int32
        )
        want = torch.tensor(chunk_indices_of(lengths, size), dtype=torch.int32).reshape(-1, 2)
        got = subject.module._chunk_indices(ends, len(want))
        assert torch.equal(got.cpu(), want), f"chunks of {len(lengths)} sequences are not found"


def refuses_misuse(subject: Subject) -> None:
    """Check that wrong shapes, dtypes and devices raise `ValueError` or `TypeError`."""
    inputs = sized(subject.problem, "misuse", 3 * subject.problem.chunk_size, subject.device)
    right, wrong = {**inputs.tensors, **inputs.keywords}, _misuses(subject, inputs)
    must_refuse(
        {what: partial(subject.function, **{**right, **change}) for what, change in wrong.items()}
    )


def _misuses(subject: Subject, inputs: Inputs) -> dict[str, dict[str, Any]]:
    t = inputs.tensors
    found: dict[str, dict[str, Any]] = {
        "q with three dimensions": {"q": t["q"][0]},
        "q with another head size": {"q": t["q"][..., :-1]},
        "k with fewer tokens": {"k": t["k"][:, :-1]},
        "v with another head size": {"v": t["v"][..., :-1]},
        "v with fewer tokens": {"v": t["v"][:, :-1]},
        "a state too few for v": {"h": t["h"][:, :, :-1]},
        "a state in float64": {"h": t["h"].double()},
        "k in float64": {"k": t["k"].double()},
        "an argument that does not exist": {"no_such_argument": 1},
    }
    found |= {f"scale is {what}": {"scale": x} for what, x in NOT_NUMBERS.items()}
    if subject.problem.gates:
        gate = subject.problem.gates[0]
        found[f"{gate} of another shape"] = {gate: t[gate][..., :-1]}
        found[f"{gate} in float64"] = {gate: t[gate].double()}
    if subject.problem.varlen:
        found["two rows of packed sequences"] = {
            n: torch.cat([x, x]) for n, x in t.items() if n != "g_gamma"
        }
        found["cu_seqlens of reals"] = {"cu_seqlens": inputs.keywords["cu_seqlens"].float()}
        found["chunk_indices of another length"] = {
            "chunk_indices": inputs.keywords["chunk_indices"][:-1]
        }
    else:
        found["a chunk too few"] = {"h": t["h"][:, :-1]}
    return found | elsewhere({n: x for n, x in t.items() if n != "q"}, subject.device)
