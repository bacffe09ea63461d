"""Verification of norms: difficult cases on an emitted file, checks, and calls to compile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kgen.kernels.norm.verify.checks import reaches_far, refuses_misuse
from kgen.kernels.norm.verify.inputs import (
    MAX_WIDTH_OF_HEADS,
    Case,
    Inputs,
    arguments,
    call,
    cases,
    differentiable,
    draw,
    sized,
)
from kgen.kernels.norm.verify.problem import Problem
from kgen.kernels.norm.verify.reference import Result, eager, exact
from kgen.verify import compare
from kgen.verify.families import NO_SIZES, Example, Subject
from kgen.verify.tensors import DTYPES

MANY = 140
"""Number of programs: more than twice the number of partial sums that are added at once."""


def sums_many_parts(subject: Subject) -> None:
    """Check results in Triton's interpreter with one program, and with several rounds of partial
    sums.
    """
    if subject.device != "cpu" or not hasattr(subject.module, "_schedule"):
        return
    schedule = subject.module._schedule
    most = max(cases(subject.problem, True), key=lambda case: math.prod(case.rows))
    for wanted in (1, MANY):

        def scheduled(*args: Any, wanted: int = wanted) -> tuple[int, int, Any]:
            groups, programs, constants = schedule(*args)
            # Tiles of one row, so that each part has rows.
            alone = {"ROWS": 1} if "PARTS" in constants else {}
            return wanted, programs // max(1, groups) * wanted, {**constants, **alone}

        with mock.patch.object(subject.module, "_schedule", scheduled):
            for group in groups(subject.problem):
                for check in run_case(subject, group, most.name):
                    assert check.ok, f"{group} in {wanted} parts: {check.message}"


CHECKS: Mapping[str, tuple[Callable[[Subject], None], bool]] = {
    "misuse": (refuses_misuse, False),
    "parts": (sums_many_parts, False),
    "far-rows": (reaches_far, True),
}


def groups(problem: Problem) -> tuple[str, ...]:
    """Return `forward`, and `backward` if the spec has it."""
    return ("forward", "backward") if "backward" in problem.passes else ("forward",)


def case_names(problem: Problem, group: str, quick: bool) -> tuple[str, ...]:
    """Return the names of the cases, the same for each group."""
    return tuple(case.name for case in cases(problem, quick))


def example(subject: Subject, name: str) -> Example:
    """Return a call with gradients, if the spec has them."""
    problem = subject.problem
    inputs = sized(problem, name, subject.device)
    wanted = differentiable(problem, inputs) if subject.backward else {}
    args, keywords = arguments(problem, inputs)
    return Example(args, keywords, wanted, tuple(inputs.cotangents.get(n) for n in problem.outputs))


def run_case(subject: Subject, group: str, name: str) -> list[compare.Check]:
    """Return the verdict on each output of a call, or on the gradients for `backward`."""
    problem, device = subject.problem, subject.device
    (case,) = (case for case in cases(problem, quick=False) if case.name == name)
    inputs = draw(problem, case, device)
    backward = group == "backward"
    truth, yardstick = _references(problem, inputs, backward)
    got, broken = compare.careful(
        lambda: _outputs(subject, inputs, backward), inputs.tensors, device
    )
    return [*_compare(problem, got, truth, yardstick, inputs.scale), *broken]


def _references(problem: Problem, inputs: Inputs, backward: bool) -> tuple[Result, Result]:
    """Return the float64 truth and the eager computation, with gradients for `backward`."""
    options: dict[str, Any] = {"eps": inputs.eps, "params": inputs.params, "scale": inputs.scale}
    if backward:
        options["cotangents"] = inputs.cotangents
    return exact(problem, inputs.operands, **options), eager(problem, inputs.operands, **options)


def _outputs(subject: Subject, inputs: Inputs, backward: bool) -> dict[str, Tensor]:
    """Call the emitted function. Return its outputs, or the gradients (`dx`, ...)."""
    problem = subject.problem
    wanted = differentiable(problem, inputs) if backward else {}
    outputs = call(problem, subject.function, inputs)
    if not backward:
        return {name: value.detach() for name, value in outputs.items()}
    pairs = [(outputs[n], c) for n, c in inputs.cotangents.items()]
    grads = torch.autograd.grad(
        [o for o, _ in pairs], list(wanted.values()), [c for _, c in pairs], materialize_grads=True
    )
    return {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def _compare(
    problem: Problem,
    got: Mapping[str, Tensor],
    truth: Result,
    yardstick: Result,
    scale: Tensor | None = None,
) -> list[compare.Check]:
    dtypes = {"out": problem.dtypes["output"], "h": problem.dtypes["residual"], "scale": "fp32"}
    dtypes |= {f"d{o.name}": o.dtype for o in problem.operands}
    found = []
    for name, value in got.items():
        want = truth.outputs[name] if name in truth.outputs else truth.grads[name[1:]]
        plain = yardstick.outputs[name] if name in yardstick.outputs else yardstick.grads[name[1:]]
        stored = dtypes[name]
        allowed = compare.tolerance(stored, None, problem.fast_math)
        natural = truth.natural.get(name)
        found.append(
            compare.check(
                *(name, value, want, plain, allowed),
                compare.Traits(
                    natural=natural,
                    dtype=DTYPES[stored],
                    apart=True,
                    terms=_terms(problem, truth, scale) if name == "out" else None,
                ),
            )
        )
    return found


def _terms(problem: Problem, truth: Result, scale: Tensor | None) -> Tensor | None:
    """Return the row norms of a quantized output before cancellation.

    None if other values are rounded, too.
    """
    if (
        not problem.quantize
        or problem.fast_math
        or problem.round_x_hat
        or problem.residual == "in_out"
    ):
        return None
    step = truth.outputs["scale"].squeeze(-1) if "scale" in truth.outputs else scale
    return truth.natural["out"] / step


def compile_calls(
    problem: Problem, sizes: Mapping[str, Sequence[int]] = NO_SIZES
) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield calls for every row of the tile tables, with sizes divisible by 16, and one unaligned
    call.

    With `sizes`, for a package, there are also calls without a gradient of the returned h.
    """
    every = sizes.get("width", (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536))
    widths = problem.widths or tuple(
        w for w in every if problem.heads is None or w <= MAX_WIDTH_OF_HEADS
    )
    given = sizes.get("heads", (8,)) if problem.heads == "any" else (int(problem.heads or 0),)
    chosen = [Case(f"width-{w}", w, (4,), heads) for heads in given for w in widths]
    if sizes and "h" in problem.outputs and "backward" in problem.passes:
        chosen += [replace(case, name=f"out-alone-{case.width}", h=False) for case in chosen]
    odd = chosen[0].width if problem.widths or "width" in sizes else 1000
    chosen += [Case("strided", odd, (3,), heads, layout="guarded") for heads in given]
    for case in chosen:
        yield case.name, partial(_compile, problem, case)


def _compile(problem: Problem, case: Case, function: Any) -> None:
    inputs = draw(problem, case, "cpu")
    if case.layout == "contiguous":
        # Vectors are drawn with an offset; copies are aligned.
        operands, cotangents = (
            {name: x.clone() for name, x in some.items()}
            for some in (inputs.operands, inputs.cotangents)
        )
        inputs = replace(inputs, operands=operands, cotangents=cotangents)
    call(problem, function, inputs)
    if "backward" in problem.passes:
        wanted = differentiable(problem, inputs)
        outputs = call(problem, function, inputs)
        torch.autograd.grad(
            [outputs[n] for n in inputs.cotangents],
            list(wanted.values()),
            list(inputs.cotangents.values()),
        )
