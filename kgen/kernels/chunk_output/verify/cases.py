"""Verification of chunk_output: difficult cases on an emitted file, checks, and calls to
compile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.chunk_output.verify.checks import (
    finds_chunks,
    keeps_sequences_apart,
    keeps_to_its_tensors,
    reaches_far,
    refuses_misuse,
    takes_spare_chunks,
)
from kgen.kernels.chunk_output.verify.inputs import (
    Case,
    Inputs,
    call,
    cases,
    differentiable,
    draw,
    sized,
)
from kgen.kernels.chunk_output.verify.problem import Problem
from kgen.kernels.chunk_output.verify.reference import Call, Result, chunk_indices_of, chunk_output
from kgen.verify import compare
from kgen.verify.families import NO_SIZES, Example, Subject
from kgen.verify.tensors import DTYPES

CHECKS: Mapping[str, tuple[Callable[[Subject], None], bool]] = {
    "misuse": (refuses_misuse, False),
    "far-rows": (reaches_far, True),
    "wrong-offsets": (keeps_to_its_tensors, False),
    "chunks-apart": (keeps_sequences_apart, False),
    "spare-chunks": (takes_spare_chunks, False),
    "many-chunks": (finds_chunks, False),
}


def groups(problem: Problem) -> tuple[str, ...]:
    """Return `forward`, and `backward` if the spec has it."""
    return ("forward", "backward") if "backward" in problem.passes else ("forward",)


def case_names(problem: Problem, group: str, quick: bool) -> tuple[str, ...]:
    """Return the names of the cases, the same for each group."""
    return tuple(case.name for case in cases(problem, quick))


def example(subject: Subject, name: str) -> Example:
    """Return a call with gradients, if the spec has them.

    Packed sequences come without `chunk_indices`.
    """
    problem = subject.problem
    length = 5 if name in ("derivatives", "autocast") else 2 * problem.chunk_size + 5
    inputs = sized(problem, name, length, subject.device)
    inputs.keywords.pop("chunk_indices", None)
    wanted = differentiable(problem, inputs) if subject.backward else {}
    return Example(tuple(inputs.tensors.values()), inputs.keywords, wanted, (inputs.do,))


def run_case(subject: Subject, group: str, name: str) -> list[compare.Check]:
    """Return the verdict on each output of a call: `o`, or the gradients for `backward`."""
    problem, device = subject.problem, subject.device
    (case,) = (case for case in cases(problem, quick=False) if case.name == name)
    inputs = draw(problem, case, device)
    wanted = differentiable(problem, inputs) if group == "backward" else {}
    truth, yardstick = (reference(problem, inputs, tuple(wanted), exact=e) for e in (True, False))
    watched = inputs.tensors | {"do": inputs.do}
    got, broken = compare.careful(lambda: _outputs(subject, inputs, wanted), watched, device)
    return [*_compare(problem, got, truth, yardstick), *broken]


def reference(problem: Problem, inputs: Inputs, wanted: tuple[str, ...], *, exact: bool) -> Result:
    """Return the float64 truth or the eager computation, with gradients of `wanted` if it is not
    empty.
    """
    return chunk_output(
        inputs.tensors,
        inputs.chunks,
        Call(
            decay=problem.decay,
            gate_base=problem.gate_base,
            state_layout=problem.state_layout,
            padded=problem.padded,
            scale=inputs.case.scale,
            do=inputs.do if wanted else None,
            wanted=wanted,
        ),
        exact=exact,
    )


def _outputs(subject: Subject, inputs: Inputs, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    o = call(subject.function, inputs)
    if not wanted:
        return {"o": o}
    grads = torch.autograd.grad(o, list(wanted.values()), inputs.do)
    return {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def _compare(
    problem: Problem, got: Mapping[str, Tensor], truth: Result, yardstick: Result
) -> list[compare.Check]:
    allowed = compare.tolerance(problem.dtype)
    kinds = {"h": problem.state_dtype, "g": problem.gate_dtype}
    found = []
    for name, value in got.items():
        source = name[1:]
        dtype = DTYPES[kinds.get(source, problem.dtype)]
        want, eager = (r.grads[source] if source else r.o for r in (truth, yardstick))
        natural = None
        if source == "g":
            # One entry is one row.
            value, want, eager, natural = (
                value[..., None],
                want[..., None],
                eager[..., None],
                truth.natural,
            )
        parts = {}
        if (states := truth.from_states.get(source or name)) is not None:
            states = states.reshape(want.shape)
            parts = {"the term of the states": states, "the term of the tokens": want - states}
        found.append(
            compare.check(
                name,
                value,
                want,
                eager,
                allowed,
                compare.Traits(natural=natural, dtype=dtype, parts=parts),
            )
        )
    return found


def compile_calls(
    problem: Problem, sizes: Mapping[str, Sequence[int]] = NO_SIZES
) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield calls without and with gradients, aligned to 16 and not aligned.

    With `sizes`, for a package, offsets and indices of packed sequences have each of their dtypes.
    """
    length = 4 * problem.chunk_size
    heads = problem.heads or 2
    for case in (
        Case("aligned", (length,), heads=heads),
        Case("strided", (length - 1,), heads=heads, layout="guarded", do="strided"),
    ):
        yield case.name, partial(_compile, problem, case, bool(sizes))


def _compile(problem: Problem, case: Case, in_all_dtypes: bool, function: Any) -> None:
    inputs = draw(problem, case, "cpu")
    for keywords in _in_all_dtypes(problem, inputs) if in_all_dtypes else [inputs.keywords]:
        _compile_inputs(problem, replace(inputs, keywords=keywords), function)


def _in_all_dtypes(problem: Problem, inputs: Inputs) -> Iterator[dict[str, Any]]:
    keywords = inputs.keywords
    if "cu_seqlens" not in keywords:
        yield keywords
    else:
        table = torch.tensor(chunk_indices_of(inputs.case.lengths, problem.chunk_size)).reshape(
            -1, 2
        )
        for dtype, other in itertools.product((torch.int32, torch.int64), repeat=2):
            starts = keywords["cu_seqlens"].to(dtype)
            yield {**keywords, "cu_seqlens": starts}
            yield {**keywords, "cu_seqlens": starts, "chunk_indices": table.to(other)}


def _compile_inputs(problem: Problem, inputs: Inputs, function: Any) -> None:
    call(function, inputs)
    if "backward" in problem.passes:
        wanted = differentiable(problem, inputs)
        torch.autograd.grad(call(function, inputs), list(wanted.values()), inputs.do)
