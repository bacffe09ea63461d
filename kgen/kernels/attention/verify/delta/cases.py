"""Verification of the delta of attention backward: difficult cases against float64, and calls to
compile.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.attention.verify.delta.problem import Problem
from kgen.verify import compare
from kgen.verify.families import NO_SIZES, Example, Subject, must_refuse
from kgen.verify.tensors import DTYPES, arrange


@dataclass(frozen=True)
class Case:
    """Shapes and layouts (`kgen.verify.tensors.arrange`); `magnitude` multiplies both operands."""

    name: str
    shape: tuple[int, int, int]
    out: str = "contiguous"
    dout: str = "contiguous"
    dlse: str = ""
    """The layout of the gradient of the log-sum-exp; empty for none."""
    magnitude: float = 1.0


CASES = (
    Case("one", (1, 1, 1)),
    Case("odd", (2, 3, 131), dlse="contiguous"),
    Case("bshd", (2, 4, 70), out="bshd", dlse="stepped"),
    Case("guarded", (2, 2, 67), out="guarded", dout="guarded", dlse="guarded"),
    Case("padded", (2, 2, 130), out="padded", dout="bshd"),
    Case("offset", (1, 2, 33), out="offset"),
    Case("stepped", (1, 2, 40), out="stepped", dout="stepped"),
    Case("no-rows", (2, 2, 0), dlse="contiguous"),
    Case("huge", (1, 2, 50), magnitude=2.0**7),
    Case("tiny", (1, 2, 50), magnitude=2.0**-7),
    Case("long", (1, 1, 100_003), dlse="contiguous"),
    Case("many-heads", (300, 300, 3), dout="bshd"),
)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call."""

    out: Tensor
    dout: Tensor
    dlse: Tensor | None


def draw(problem: Problem, case: Case, device: str) -> Inputs:
    """Return random inputs. The name of the case is the seed."""
    random = torch.Generator().manual_seed(zlib.crc32(f"{problem.name} {case.name}".encode()))
    shape = (*case.shape, problem.width)
    out, dout = (
        torch.randn(shape, generator=random).mul(case.magnitude).to(DTYPES[problem.dtype])
        for _ in range(2)
    )
    dlse = torch.randn(case.shape, generator=random) if case.dlse else None
    return Inputs(
        arrange(out.to(device), case.out),
        arrange(dout.to(device), case.dout),
        None if dlse is None else arrange(dlse.to(device), case.dlse),
    )


def reference(inputs: Inputs) -> Tensor:
    """Return delta [B, H, S] in float64: the sum of out * dout over d, minus dlse."""
    delta = (inputs.out.double() * inputs.dout.double()).sum(-1)
    return delta if inputs.dlse is None else delta - inputs.dlse.double()


def run_case(subject: Subject, group: str, name: str) -> list[compare.Check]:
    """Return the verdict on delta, on writes outside of it, and on repeated runs."""
    (case,) = (case for case in CASES if case.name == name)
    inputs = draw(subject.problem, case, subject.device)
    tensors = {n: t for n, t in vars(inputs).items() if t is not None}
    outputs, broken = compare.careful(
        lambda: {"delta": subject.function(inputs.out, inputs.dout, inputs.dlse)},
        tensors,
        subject.device,
    )
    got = outputs["delta"]
    want = reference(inputs)
    eager = (inputs.out.float() * inputs.dout.float()).sum(-1) - (
        0 if inputs.dlse is None else inputs.dlse
    )
    # An entry is one sum. Its rounding error has the size of the terms, which may cancel.
    natural = (inputs.out.double() * inputs.dout.double()).norm(dim=-1)
    allowed = compare.tolerance("fp32")
    found = compare.check(
        "delta",
        got[..., None],
        want[..., None],
        eager[..., None],
        allowed,
        compare.Traits(natural=natural, dtype=torch.float32),
    )
    return [found, *broken]


def groups(problem: Problem) -> tuple[str, ...]:
    """Return the only group, because delta has no gradient."""
    return ("delta",)


def case_names(problem: Problem, group: str, quick: bool) -> tuple[str, ...]:
    """Return all cases. They are fast on a GPU."""
    return tuple(case.name for case in CASES)


def example(subject: Subject, name: str) -> Example:
    """Return a small call."""
    inputs = draw(subject.problem, Case(name, (2, 2, 40), dlse="contiguous"), subject.device)
    return Example((inputs.out, inputs.dout, inputs.dlse))


def compile_calls(
    problem: Problem, sizes: Mapping[str, Sequence[int]] = NO_SIZES
) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield calls with rows that can be read 16 bytes at a time, and with others."""
    for name, layout in (("aligned", "contiguous"), ("strided", "offset")):
        inputs = draw(problem, Case(name, (1, 2, 32), layout, layout), "cpu")
        yield name, lambda function, inputs=inputs: function(inputs.out, inputs.dout)  # type: ignore[misc]


def refuses_misuse(subject: Subject) -> None:
    """Check that wrong shapes, dtypes and devices raise `ValueError` or `TypeError`."""
    inputs = draw(subject.problem, Case("misuse", (2, 2, 8), dlse="contiguous"), subject.device)
    out, dout, dlse = inputs.out, inputs.dout, inputs.dlse
    wrong: dict[str, tuple[Any, ...]] = {
        "three dimensions": (out[0], dout[0]),
        "another length": (out, dout[:, :, :-1]),
        "another width": (out[..., :-1], dout[..., :-1]),
        "float64": (out.double(), dout.double()),
        "dlse of another shape": (out, dout, dlse[:, :1] if dlse is not None else None),
        "dlse in float64": (out, dout, dlse.double() if dlse is not None else None),
        "the CPU": (out.cpu(), dout.cpu()),
    }
    must_refuse({what: partial(subject.function, *arguments) for what, arguments in wrong.items()})


def reaches_far(subject: Subject) -> None:
    """Check rows that are more than 2**31 elements apart against adjacent rows."""
    near = draw(subject.problem, Case("far", (1, 1, 129)), subject.device)
    step = (2**31 // 100) // 16 * 16  # the last of 129 rows starts at 1.28 * 2**31
    storage = torch.empty(129 * step, dtype=near.out.dtype, device=subject.device)
    out, dout = (
        storage.as_strided(t.shape, (step, step, step, 1), i * step // 2).copy_(t)
        for i, t in enumerate((near.out, near.dout))
    )
    assert compare.same_bits(subject.function(out, dout), subject.function(near.out, near.dout))


CHECKS: Mapping[str, tuple[Callable[[Subject], None], bool]] = {
    "misuse": (refuses_misuse, True),
    "far-rows": (reaches_far, True),
}
