"""Verification of linear_attention: difficult cases on an emitted file, checks, and calls to
compile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args
from unittest import mock

import torch
from torch import Tensor

from kgen.kernels.linear_attention.schedules import CHOICES
from kgen.kernels.linear_attention.verify.checks import CHECKS as CHECKS
from kgen.kernels.linear_attention.verify.eager import eager, eager_steps
from kgen.kernels.linear_attention.verify.inputs import (
    ASKED,
    OUTPUTS,
    Case,
    Inputs,
    States,
    call,
    cases,
    decode_cases,
    differentiable,
    draw,
    sized,
)
from kgen.kernels.linear_attention.verify.problem import Problem
from kgen.kernels.linear_attention.verify.reference import STATE, Result, linear_attention
from kgen.verify import compare
from kgen.verify.families import NO_SIZES, Example, Subject
from kgen.verify.tensors import DTYPES, arrange


def groups(problem: Problem) -> tuple[str, ...]:
    """Return the passes of the spec."""
    return problem.passes


def case_names(problem: Problem, group: str, quick: bool) -> tuple[str, ...]:
    """Return the names of the cases of a pass."""
    return tuple(case.name for case in _cases(problem, group, quick))


def _cases(problem: Problem, group: str, quick: bool) -> tuple[Case, ...]:
    return (decode_cases if group == "decode" else cases)(problem, quick)


def example(subject: Subject, name: str) -> Example:
    """Return a call with gradients, if the spec has them."""
    problem = subject.problem
    length = 5 if name in ("derivatives", "autocast") else problem.chunk_size + 5
    inputs = sized(problem, name, length, subject.device)
    wanted = differentiable(problem, inputs) if subject.backward else {}
    args = [inputs.tensors[n] for n in ("q", "k", "v")]
    rest = {n: x for n, x in inputs.tensors.items() if n not in ("q", "k", "v")}
    cotangents = tuple(inputs.cotangents.get(name) for name in OUTPUTS)
    return Example(tuple(args), {**rest, **inputs.keywords}, wanted, cotangents)


def run_case(subject: Subject, group: str, name: str) -> list[compare.Check]:
    """Return the verdict on each output of a call: `o` and `final_state`, the gradients for
    `backward`, or `o` and `state` for `decode`.
    """
    known = _cases(subject.problem, group, quick=False)
    (case,) = (case for case in known if case.name == name)
    return run_drawn(subject, group, case)


def run_drawn(subject: Subject, group: str, case: Case) -> list[compare.Check]:
    """Return the verdict on each output of a call with the inputs of a case."""
    problem, device = subject.problem, subject.device
    inputs = draw(problem, case, device)
    if group == "decode":
        return _run_steps(subject, inputs)
    wanted = differentiable(problem, inputs) if group == "backward" else {}
    every = problem.chunk_size if case.within else None
    options = inputs.call(problem, tuple(wanted), every)
    truth, yardstick = (of(problem, inputs.tensors, options) for of in (linear_attention, eager))
    terms = {} if wanted else _terms(problem, inputs, truth)
    watched = {**inputs.tensors, **{f"d{n}": x for n, x in inputs.cotangents.items()}}
    got, broken = compare.careful(lambda: _outputs(subject, inputs, wanted), watched, device)
    found = _compare(problem, got, truth, yardstick, terms, case.keys, case.within)
    return [*found, *broken]


def _outputs(subject: Subject, inputs: Inputs, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    outputs = call(subject.function, inputs)
    if not wanted:
        return outputs
    pairs = [(outputs[name], change) for name, change in inputs.cotangents.items()]
    of, changes = zip(*pairs, strict=True)
    grads = torch.autograd.grad(of, list(wanted.values()), changes, materialize_grads=True)
    return {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def _compare(
    problem: Problem,
    got: Mapping[str, Tensor],
    truth: Result,
    yardstick: Result,
    terms: Mapping[str, Result],
    keys: str = "random",
    within: str | None = None,
) -> list[compare.Check]:
    dtypes = {b.name: b.dtype for b in problem.buffers} | {STATE: problem.state_dtype}
    found = []
    own = ("o", *ASKED)
    for name, value in got.items():
        if name in own:
            dtype = {"o": problem.dtype, "states": within}.get(name) or problem.state_dtype
            want, eager_value = getattr(truth, name), getattr(yardstick, name).to(DTYPES[dtype])
        else:
            dtype = dtypes.get(name[1:], problem.dtype)
            want = truth.grads[name[1:]]
            eager_value = _without_luck(problem, name[1:], truth, yardstick, alike=keys != "random")
        linear = name in own and not (name == "o" and problem.finishes)
        parts = {n: getattr(term, name) for n, term in terms.items() if linear}
        found.append(_checked(problem, name, dtype, (value, want, eager_value), truth, parts))
    return found


def _terms(problem: Problem, inputs: Inputs, truth: Result) -> dict[str, Result]:
    """Return terms whose sum are the outputs: of the initial state, of the values, and `skip`.

    Outputs are linear in the initial state and the values. After a norm or an expression, only
    the states are.
    """
    every = problem.chunk_size if inputs.case.within else None
    plain = replace(problem, skip=None, output_gate=None, output_eps=None, output=None)
    options = inputs.call(problem, every=every)
    without = {**inputs.tensors, "v": torch.zeros_like(inputs.tensors["v"])}
    before = linear_attention(plain, without, options)
    both = linear_attention(plain, inputs.tensors, options)
    named = {
        "the initial state": before,
        "the tokens": _difference(both, before),
        "the skip": _difference(truth, both),
    }
    return {f"the term of {name}": term for name, term in named.items()}


def _difference(one: Result, other: Result) -> Result:
    """Return the differences of the outputs of two calls."""
    states = None if one.states is None or other.states is None else one.states - other.states
    return Result(one.o - other.o, one.final_state - other.final_state, states=states)


def _without_luck(
    problem: Problem, name: str, truth: Result, yardstick: Result, *, alike: bool
) -> Tensor:
    """Return the eager gradient of an input, with at least the error that it has without luck.

    - A buffer [T, HV] has at least the typical error of its chunks.
    - A buffer without tokens has few elements, each a sum over all tokens, whose errors may cancel
      by chance. If errors are independent, their sum has the size of the root of the sum of
      squares. Twice this size or the sum counts, as a share of the terms that is the same for all
      elements.
    - Tokens with equal keys are rounded `alike`: the sum of absolute errors counts.
    """
    want, eager_value = truth.grads[name], yardstick.grads[name]
    shape = {buffer.name: buffer.shape for buffer in problem.buffers}.get(name)
    if shape == ("T", "HV") and name in truth.natural:
        found = (eager_value, yardstick.unrounded.get(name, eager_value))
        return _typical(want, found, truth.natural[name], problem.chunk_size)
    if name not in truth.parts or shape is None:
        return eager_value
    errors = yardstick.parts[name].double() - truth.parts[name]
    if shape == ("HV",):
        errors = errors.movedim(1, -1).flatten(0, 1)
    if shape == ("V",):
        errors = errors.flatten(0, 1)
    if alike:
        least = errors.abs().sum(0).expand_as(want)
    else:
        terms = truth.natural[name].clamp_min(1e-300)
        found = torch.maximum(errors.sum(0).abs(), errors.norm(dim=0)).expand_as(want)
        least = 2 * terms * (found / terms).square().mean().sqrt()
    return want + torch.maximum((eager_value.double() - want).abs(), least)


def _typical(want: Tensor, eager_values: tuple[Tensor, ...], terms: Tensor, chunk: int) -> Tensor:
    """Return an eager gradient of a buffer [T, HV] with errors of at least the typical size.

    The gradient of a decay is a sum over later tokens of the chunk. So the tokens of a chunk and
    head share most of their error. The few large chunks decide the whole error, and may have a
    small one by chance. The typical error has the same share of the terms in every chunk and head.
    Rounding to the dtype of the buffer may cancel an error, so the larger one of `eager_values`
    counts.
    """
    errors = torch.stack([(one.double() - want).abs() for one in eager_values]).amax(0)
    found, sizes = (
        torch.stack([part.norm(dim=1) for part in x.split(chunk, 1)]) for x in (errors, terms)
    )
    there = sizes > 0
    if not there.any() or not errors.any():
        return eager_values[0]
    typical = (found[there] / sizes[there]).square().mean().sqrt() * terms.norm()
    return want + errors * (typical / errors.norm()).clamp_min(1.0)


def _checked(
    problem: Problem,
    name: str,
    dtype: str,
    values: tuple[Tensor, Tensor, Tensor],
    truth: Result,
    parts: Mapping[str, Tensor],
) -> compare.Check:
    """Compare a result, its truth and its eager value."""
    value, want, eager_value = values
    size = truth.natural.get(name[1:])
    shapes = {b.name: b.shape for b in problem.buffers}
    if shapes.get(name[1:], ("K",))[-1] == "HV":
        # Each entry is a row.
        value, want, eager_value = value[..., None], want[..., None], eager_value[..., None]
    elif size is not None:
        size = size.norm(dim=-1)
    # The terms of a gate's gradient are rounded before they cancel: eager errors are one to two
    # roundings of their size.
    rounding = 0.0 if size is None else float(size.norm())
    traits = compare.Traits(natural=size, rounding=rounding, dtype=DTYPES[dtype], parts=parts)
    return compare.check(name, value, want, eager_value, compare.tolerance(problem.dtype), traits)


# --- steps ------------------------


def _run_steps(subject: Subject, inputs: Inputs) -> list[compare.Check]:
    """Return the verdict on `o`, on the state that the call updates in place, and on states
    after each token.
    """
    problem, tensors, within = subject.problem, inputs.tensors, inputs.case.within
    options = inputs.call(problem, every=1 if within else None)
    truth, yardstick = (of(problem, tensors, options) for of in (linear_attention, eager_steps))
    state = tensors.pop(STATE)
    keywords = {n: x for n, x in inputs.keywords.items() if n not in ASKED.values()}
    function = getattr(subject.module, f"{problem.name}_decode")
    before = {"state": state}
    if truth.states is not None and within:
        empty = torch.full_like(truth.states, torch.nan, dtype=DTYPES[within])
        before["states"] = arrange(empty, inputs.case.layout, 8)

    def run() -> dict[str, Tensor]:
        own = {name: _with_surroundings(x) for name, x in before.items()}
        found = {"o": function(**tensors, **own, **keywords)}
        written = {name: _written(name, own[name], x) for name, x in before.items()}
        return found | {"final_state" if n == "state" else n: x for n, x in written.items()}

    got, broken = compare.careful(run, tensors, subject.device)
    return [*_compare(problem, got, truth, yardstick, {}, within=within), *broken]


def _with_surroundings(x: Tensor) -> Tensor:
    """Return a copy of a tensor together with the memory around it."""
    return _memory(x).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def _written(name: str, own: Tensor, before: Tensor) -> Tensor:
    """Return the values that a call wrote to `own`.

    Raise `AssertionError` if memory around them differs from that of `before`.
    """
    found = own.clone()
    own.copy_(before)
    assert compare.same_bits(_memory(own), _memory(before)), f"the function wrote next to `{name}`"
    return found


def _memory(x: Tensor) -> Tensor:
    """Return the memory of a tensor as a vector."""
    return x.as_strided((x.untyped_storage().size() // x.element_size(),), (1,), 0)


# --- calls to compile ------------------------


def compile_calls(
    problem: Problem, sizes: Mapping[str, Sequence[int]] = NO_SIZES
) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield calls without and with gradients, aligned to 16 and not aligned, and with states.

    With `sizes`, for a package, tensors are contiguous: strides of tokens are constants. Calls have
    every combination of states, and each dtype of offsets and of states after tokens.
    """
    for case in _compiled_cases(problem, bool(sizes)):
        yield case.name, partial(_compile, problem, case, bool(sizes))
    if "decode" in problem.passes:
        yield "decode", partial(_compile_steps, problem, bool(sizes))


def _compiled_cases(problem: Problem, package: bool) -> Iterator[Case]:
    length, heads, dtype = 4 * problem.chunk_size, problem.heads or 2, problem.state_dtype
    aligned = Case("aligned", (length,), heads=heads)
    yield aligned
    if not package:
        odd = replace(aligned, name="strided", lengths=(length - 1,))
        yield replace(odd, layout="guarded", do="strided")
        yield replace(aligned, name="states", within=dtype)
        return
    # With few heads, a row of a buffer [T, HV] begins at a multiple of 16 only for some lengths.
    yield replace(aligned, name="odd", lengths=(length - 1,))
    for states, within in itertools.product(get_args(States), (None, dtype)):
        words = f"states-{states}" if within is None else f"states-{states}-within"
        yield replace(aligned, name=words, states=states, within=within)


def _compile_steps(problem: Problem, package: bool, function: Any) -> None:
    inputs = draw(problem, decode_cases(problem, quick=True)[0], "cpu")
    tensors = {"state" if n == STATE else n: x for n, x in inputs.tensors.items()}
    keywords = {n: x for n, x in inputs.keywords.items() if n not in ASKED.values()}
    function = function.__globals__[f"{problem.name}_decode"]
    shape = (*tensors["v"].shape[:3], problem.head_qk, problem.head_v)
    for kinds in _in_dtypes(keywords, package):
        function(**tensors, **kinds)
        for dtype in (torch.float32, torch.bfloat16)[: 1 + package]:
            function(**tensors, **kinds, states=torch.empty(shape, dtype=dtype))


def _in_dtypes(keywords: Mapping[str, Any], package: bool) -> Iterator[dict[str, Any]]:
    """Yield the keywords, for a package with each dtype of the offsets of packed sequences."""
    starts = keywords.get("cu_seqlens")
    if starts is None or not package:
        yield {**keywords}
        return
    for dtype in (torch.int32, torch.int64):
        yield {**keywords, "cu_seqlens": starts.to(dtype)}


def _compile(problem: Problem, case: Case, package: bool, function: Any) -> None:
    drawn = draw(problem, case, "cpu")
    for keywords in _in_dtypes(drawn.keywords, package):
        inputs = replace(drawn, keywords=keywords)
        _call_with_gradients(problem, inputs, function)
        choices = [name for name in CHOICES if name in function.__globals__]
        if package and choices:
            # C, and Python with tensors that TMA cannot load, run the kernels for every chip.
            declined = dict.fromkeys(choices, lambda *_: False)
            with mock.patch.dict(function.__globals__, declined):
                _call_with_gradients(problem, inputs, function)


def _call_with_gradients(problem: Problem, inputs: Inputs, function: Any) -> None:
    call(function, inputs)
    if "backward" in problem.passes and inputs.case.within is None:
        wanted = differentiable(problem, inputs)
        outputs = call(function, inputs)
        torch.autograd.grad(
            [outputs[name] for name in inputs.cotangents],
            list(wanted.values()),
            list(inputs.cotangents.values()),
            allow_unused=True,
        )
