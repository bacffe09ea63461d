"""Checks of norms: misuse of the launcher, and distant rows.

Each check is a function of a `Subject`. It raises `AssertionError`, or the error of the call, with
a message.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.norm.verify.inputs import Inputs, arguments, call, differentiable, sized
from kgen.verify.families import NOT_NUMBERS, Subject, elsewhere, must_refuse


def reaches_far(subject: Subject) -> None:
    """Check rows that are more than 2**31 elements apart against adjacent rows, with gradients.

    All tensors share one storage of about 2.8e9 elements: 5.5 GB in 16-bit dtypes, 11 GB in fp32.
    """
    problem = subject.problem
    near = sized(problem, "far", subject.device)
    x = near.operands["x"]
    step = (5 * 2**29 // (len(x) - 1)) // 16 * 16  # the last row begins at 1.25 * 2**31
    storage = torch.empty(len(x) * step, dtype=x.dtype, device=subject.device)
    size = x[0].numel()
    same = {
        o.name
        for o in problem.operands
        if o.along == "element" and o.dtype == problem.dtypes["input"]
    }

    def far(t: Tensor, place: int) -> Tensor:
        inner = (t.shape[-1], 1) if t.ndim > 2 else (1,)
        return storage.as_strided(t.shape, (step, *inner), place * size).copy_(t)

    operands = {n: far(t, i) if n in same else t for i, (n, t) in enumerate(near.operands.items())}

    def run(inputs: Inputs) -> list[Tensor]:
        inputs = replace(inputs, operands={n: t.detach() for n, t in inputs.operands.items()})
        wanted = differentiable(problem, inputs) if subject.backward else {}
        outputs = call(problem, subject.function, inputs)
        if not wanted:
            return list(outputs.values())
        grads = torch.autograd.grad(
            [outputs[n] for n in inputs.cotangents],
            list(wanted.values()),
            list(inputs.cotangents.values()),
        )
        return [*outputs.values(), *grads]

    for got, want in zip(run(replace(near, operands=operands)), run(near), strict=True):
        torch.testing.assert_close(got.float(), want.float())


def refuses_misuse(subject: Subject) -> None:
    """Check that wrong shapes, dtypes and devices raise `ValueError` or `TypeError`."""
    inputs = sized(subject.problem, "misuse", subject.device)
    calls = {}
    for what, wrong in _misuses(subject, inputs).items():
        given = {n: wrong.get(n, t) for n, t in inputs.operands.items()}
        args, keywords = arguments(subject.problem, replace(inputs, operands=given))
        keywords |= {n: v for n, v in wrong.items() if n not in given}
        calls[what] = partial(subject.function, *args, **keywords)
    must_refuse(calls)


def _misuses(subject: Subject, inputs: Inputs) -> dict[str, dict[str, Any]]:
    problem = subject.problem
    x = inputs.operands["x"]
    found: dict[str, dict[str, Any]] = {
        "x in float64": {"x": x.double()},
        "x without dimensions": {"x": x.flatten()[0]},
        "rows without elements": {"x": x[..., :0]},
        "x as a list": {"x": x.tolist()},
        "an argument that does not exist": {"no_such_argument": 1},
    }
    for name in ("eps", *inputs.runtime):
        found |= {f"{name} is {what}": {name: x} for what, x in NOT_NUMBERS.items()}
        if isinstance(inputs.runtime.get(name), int):
            found[f"{name} beyond int32"] = {name: 2**32}
    found["eps is negative"] = {"eps": -1.0}
    if problem.widths:
        found["rows of another width"] = {"x": x[..., :-1]}
    for o in problem.operands[1:]:
        value = inputs.operands[o.name]
        found[f"{o.name} of another shape"] = {o.name: torch.cat([value, value])}
        found[f"{o.name} of another dtype"] = {o.name: value.to(torch.complex64)}
    return found | elsewhere(
        {o.name: inputs.operands[o.name] for o in problem.operands[1:]}, subject.device
    )
