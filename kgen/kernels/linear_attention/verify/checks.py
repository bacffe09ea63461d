"""Checks of linear_attention: misuse of the launcher, and NaN in data that a call must not read.

Each check is a function of a `Subject`. It raises `AssertionError`, or the error of the call, with
a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kgen.kernels.linear_attention.schedules import CHOICES
from kgen.kernels.linear_attention.verify.inputs import (
    OUTPUTS,
    Case,
    Inputs,
    call,
    differentiable,
    draw,
    sized,
)
from kgen.kernels.linear_attention.verify.reference import STATE
from kgen.verify.compare import careful, same_bits, wrong_offsets
from kgen.verify.families import NOT_NUMBERS, Subject, elsewhere, must_refuse
from kgen.verify.tensors import arrange


def _results(subject: Subject, inputs: Inputs) -> dict[str, Tensor]:
    """Return the outputs, and the gradients as `dq` for the input `q`."""
    inputs = replace(inputs, tensors={n: x.detach() for n, x in inputs.tensors.items()})
    wanted = differentiable(subject.problem, inputs) if subject.backward else {}
    outputs = call(subject.function, inputs)
    found = {name: x.detach() for name, x in outputs.items()}
    if wanted:
        changes = [inputs.cotangents[name] for name in outputs]
        grads = torch.autograd.grad(
            list(outputs.values()), list(wanted.values()), changes, materialize_grads=True
        )
        found |= {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return found


def keeps_sequences_apart(subject: Subject) -> None:
    """Check that NaN in one sequence does not change a bit of the others or their gradients.

    The sequence before it ends in the middle of a chunk, so a load without a mask would read NaN.
    """
    problem = subject.problem
    C, heads = problem.chunk_size, problem.heads or 1
    case = Case("apart", (C - 3, 5, C + 2), heads=heads)
    if not problem.varlen:
        case = replace(case, lengths=(C - 3,), batch=3)
    clean = draw(problem, case, subject.device)
    tokens = {"q", "k", "v", "o", *(b.name for b in problem.buffers if b.tokens)}
    ill = (slice(None), slice(C - 3, C + 2)) if problem.varlen else (slice(1, 2),)

    def poisoned(name: str, x: Tensor) -> Tensor:
        x = x.clone()
        if name in (STATE, "final_state"):
            x[1] = torch.nan
        elif name in tokens:
            x[ill] = torch.nan
        return x

    other = replace(
        clean,
        tensors={n: poisoned(n, x) for n, x in clean.tensors.items()},
        cotangents={n: poisoned(n, x) for n, x in clean.cotangents.items()},
    )
    want, got = _results(subject, clean), _results(subject, other)
    for name in want:
        source = name if name in OUTPUTS else name[1:]
        if source not in (*tokens, STATE, "final_state"):
            continue  # a sum over all sequences
        at = ill if source in tokens else (slice(1, 2),)
        one, other_one = (x[name].detach().cpu().clone() for x in (want, got))
        one[at], other_one[at] = 0, 0
        assert same_bits(one, other_one), f"{name} depends on another sequence"


def continues_from_states(subject: Subject) -> None:
    """Check that two calls, the second from the final state of the first, agree with one call."""
    problem = subject.problem
    if problem.varlen:
        return
    inputs = draw(
        problem,
        Case("halves", (2 * problem.chunk_size,), heads=problem.heads or 1),
        subject.device,
    )
    tokens = {"q", "k", "v", *(b.name for b in problem.buffers if b.tokens)}

    def half(rows: slice, **more: Tensor) -> dict[str, Tensor]:
        cut = {n: x[:, rows] if n in tokens else x for n, x in inputs.tensors.items()}
        with torch.no_grad():
            return call(subject.function, replace(inputs, tensors={**cut, **more}))

    whole, middle = half(slice(None)), problem.chunk_size
    first = half(slice(0, middle))
    second = half(slice(middle, None), **{STATE: first["final_state"]})
    o = torch.cat([first["o"], second["o"]], 1)
    # In the dtype of the states, the state between the calls is rounded.
    bound = 3e-2 if problem.state_dtype == "bf16" else 1e-2
    for name, one, other in (
        ("o", whole["o"], o),
        ("final_state", whole["final_state"], second["final_state"]),
    ):
        error = float((one.double() - other.double()).norm() / one.double().norm().clamp_min(1e-9))
        assert error <= bound, f"{name} of two calls differs by {error:.1e} from one call"


def resumes_from_chunks(subject: Subject) -> None:
    """Check that a call from a state after a chunk agrees with the call that returned this state.

    In float32 the state is not rounded, and the chunks are the same, so all bits are.
    """
    problem = subject.problem
    C, lengths = problem.chunk_size, (2 * problem.chunk_size + 5, problem.chunk_size + 1)
    heads = problem.heads or 1
    inputs = draw(
        problem,
        Case("resumed", lengths if problem.varlen else lengths[:1], heads=heads),
        subject.device,
    )
    whole = _with_states(subject, inputs, {})
    # The second chunk of each sequence, and the slots of the states after the first one.
    starts = (C, lengths[0] + C) if problem.varlen else (C,)
    ends = (lengths[0], sum(lengths)) if problem.varlen else lengths[:1]
    rows = torch.cat([torch.arange(a, b) for a, b in zip(starts, ends, strict=True)])
    rows = rows.to(subject.device)
    tokens = {"q", "k", "v", *(b.name for b in problem.buffers if b.tokens)}
    change = {n: x[:, rows] for n, x in inputs.tensors.items() if n in tokens}
    states, keywords = whole["states"], dict(inputs.keywords)
    if problem.varlen:
        change[STATE] = states[[0, lengths[0] // C + 1]]
        left = torch.tensor([0, lengths[0] - C, lengths[0] - C + 1], device=subject.device)
        keywords["cu_seqlens"] = left.to(keywords["cu_seqlens"].dtype)
    else:
        change[STATE] = states[:, 0]
    second = _with_states(subject, replace(inputs, keywords=keywords), change)
    for name, one, other in (
        ("o", whole["o"][:, rows], second["o"]),
        ("final_state", whole["final_state"], second["final_state"]),
    ):
        if problem.state_dtype == "fp32":
            assert same_bits(one.contiguous(), other), f"{name} after a chunk has other bits"
        error = float((one.double() - other.double()).norm() / one.double().norm().clamp_min(1e-9))
        assert error <= 3e-2, f"{name} after a chunk differs by {error:.1e}"


def _with_states(
    subject: Subject, inputs: Inputs, change: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the outputs of a call without gradients, with its states."""
    inputs = replace(inputs, tensors={**inputs.tensors, **change})
    with torch.no_grad():
        return call(subject.function, inputs, return_states=True)


def keeps_to_its_tensors(subject: Subject) -> None:
    """Check that kernels with wrong offsets write only to their tensors, and end."""
    if not subject.problem.varlen:
        return
    inputs = sized(subject.problem, "offsets", subject.problem.chunk_size + 5, subject.device)
    wrong = wrong_offsets(inputs.keywords["cu_seqlens"])
    tried = [*wrong] if subject.device == "cuda" else ["past the tokens", "far"]
    for what in tried:
        change = {"cu_seqlens": wrong[what]}
        given = replace(inputs, keywords={**inputs.keywords, **change})
        _, broken = careful(partial(_results, subject, given), inputs.tensors | change, "cpu")
        if subject.device == "cuda":
            torch.cuda.synchronize()
        assert not broken, f"cu_seqlens {what}: {broken[0].message}"


KEPT = ("contiguous", "guarded", "padded", "spaced", "offset", "stepped")
"""Layouts of one tensor, while the others are contiguous."""


class _Launches:
    """Launches that run nothing. They fail if the launch of a call would be reused wrongly.

    `_launch` keeps a compiled kernel by the layouts of tensors and the constants of the launch.
    Triton compiled it for the dtype and alignment of its tensors, and for some numbers.
    """

    def __init__(self) -> None:
        self.kept: dict[Any, Mapping[str, Any]] = {}

    def __call__(
        self, kernel: Any, programs: int, layouts: tuple[Any, ...], *args: Any, **meta: Any
    ) -> None:
        # The interpreter keeps the options of the decorator.
        options = vars(kernel).get("kwargs", vars(kernel))
        any_number = options.get("do_not_specialize") or ()
        found = {
            name: _kind(x, name in any_number)
            for name, x in zip(kernel.arg_names, args, strict=False)
        }
        kept = self.kept.setdefault((kernel, layouts, *meta.values()), found)
        wrong = [name for name, kind in found.items() if kind != kept[name]]
        assert not wrong, f"{kernel.__name__}: `_layouts` has no part for {', '.join(wrong)}"


def _kind(x: Any, any_number: bool) -> Any:
    """Return the properties of an argument for which Triton compiles."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int) and not isinstance(x, bool):
        inside = -(2**31) <= x < 2**31
        return inside if any_number else (x == 1, x % 16 == 0, inside)
    return None if x is None else type(x)


def keeps_launches_apart(subject: Subject) -> None:
    """Check that a compiled kernel is reused only for arguments for which it was compiled.

    Each tensor in turn gets each layout. No kernel runs.
    """
    problem, names = subject.problem, vars(subject.module)
    size = problem.chunk_size + 5
    inputs = sized(problem, "layouts", size, subject.device)
    on_paper = {"_launch": _Launches(), "_arch": lambda device: 90}
    # Kernels for one chip are launched with the same record of layouts as those for every chip.
    on_paper |= {name: lambda *_: False for name in CHOICES if name in names}
    with mock.patch.dict(names, on_paper):
        for changed in _each_laid_out(inputs):
            _results(subject, changed)
        if "decode" in problem.passes:
            decode, right = _steps(subject, inputs)
            states = _states(subject, inputs)
            kept = {n: x for n, x in right.items() if isinstance(x, Tensor)}
            for of in (None, states, states.bfloat16()):
                for name, layout in itertools.product((*kept, "states"), KEPT):
                    call_of = {**right, "states": of}
                    if isinstance(call_of[name], Tensor):
                        decode(**call_of | {name: arrange(call_of[name], layout, 1)})


def _each_laid_out(inputs: Inputs) -> Iterator[Inputs]:
    """Yield calls with one tensor in one layout, and with offsets of the other dtype."""
    for layout in KEPT:
        for name, x in inputs.tensors.items():
            yield replace(inputs, tensors={**inputs.tensors, name: arrange(x, layout, 1)})
        for name, x in inputs.cotangents.items():
            yield replace(inputs, cotangents={**inputs.cotangents, name: arrange(x, layout, 1)})
    starts = inputs.keywords.get("cu_seqlens")
    if starts is not None:
        for other in (starts.long(), arrange(starts, "offset", 1)):
            yield replace(inputs, keywords={**inputs.keywords, "cu_seqlens": other})


def _steps(subject: Subject, inputs: Inputs) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function that steps states, and the arguments of a call."""
    decode = getattr(subject.module, f"{subject.problem.name}_decode")
    right = {"state" if n == STATE else n: x for n, x in inputs.tensors.items()} | inputs.keywords
    right.pop("output_final_state")
    return decode, right


def _states(subject: Subject, inputs: Inputs) -> Tensor:
    """Return zeros for the state after each token."""
    v = inputs.tensors["v"]
    (B, T, HV, V), K = v.shape, subject.problem.head_qk
    return v.new_zeros((B, T, HV, K, V), dtype=torch.float32)


def refuses_misuse(subject: Subject) -> None:
    """Check that wrong shapes, dtypes and devices raise `ValueError` or `TypeError`."""
    inputs = sized(subject.problem, "misuse", 7, subject.device)
    right = {**inputs.tensors, **inputs.keywords}
    wrong = _misuses(subject, inputs)
    must_refuse(
        {what: partial(subject.function, **{**right, **change}) for what, change in wrong.items()}
        | (_misused_steps(subject, inputs) if "decode" in subject.problem.passes else {})
    )


def _misused_steps(subject: Subject, inputs: Inputs) -> dict[str, Callable[[], Any]]:
    """Return wrong calls of the function that steps states, by their mistakes."""
    t = inputs.tensors
    decode, right = _steps(subject, inputs)
    states = _states(subject, inputs)
    tensors = {n: x for n, x in right.items() if isinstance(x, Tensor)} | {"states": states}
    wrong: dict[str, dict[str, Any]] = {
        **{f"steps of a sparse {n}": {n: x.to_sparse()} for n, x in tensors.items()},
        "steps from a state of other columns": {"state": t[STATE][..., :-1]},
        "steps without a state": {"state": None},
        "states for fewer tokens": {"states": states[:, :-1]},
        "states without a batch": {"states": states[0]},
        "states in float16": {"states": states.half()},
        "states that are no tensor": {"states": True},
    }
    return {what: partial(decode, **{**right, **change}) for what, change in wrong.items()}


def _misuses(subject: Subject, inputs: Inputs) -> dict[str, dict[str, Any]]:
    problem, t = subject.problem, inputs.tensors
    found: dict[str, dict[str, Any]] = {
        "q with three dimensions": {"q": t["q"][0]},
        "q with another head size": {"q": t["q"][..., :-1]},
        "k with fewer tokens": {"k": t["k"][:, :-1]},
        "k with more heads": {"k": torch.cat([t["k"], t["k"]], 2)},
        "v with another head size": {"v": t["v"][..., :-1]},
        "v with fewer tokens": {"v": t["v"][:, :-1]},
        "k in float64": {"k": t["k"].double()},
        "a state too many": {STATE: torch.cat([t[STATE], t[STATE][:1]])},
        "a state with other columns": {STATE: t[STATE][..., :-1]},
        "a state in float64": {STATE: t[STATE].double()},
        "an argument that does not exist": {"no_such_argument": 1},
        **{f"a sparse {name}": {name: x.to_sparse()} for name, x in t.items()},
    }
    found |= {f"scale is {what}": {"scale": x} for what, x in NOT_NUMBERS.items()}
    for buffer in problem.buffers:
        x = t[buffer.name]
        found[f"{buffer.name} of another shape"] = {buffer.name: x[..., :-1]}
        found[f"{buffer.name} in float64"] = {buffer.name: x.double()}
        found[f"{buffer.name} with another dimension"] = {buffer.name: x[None]}
    if problem.varlen:
        tokens = {"q", "k", "v", *(b.name for b in problem.buffers if b.tokens)}
        found["two rows of packed sequences"] = {n: torch.cat([t[n], t[n]]) for n in tokens}
        found["cu_seqlens of reals"] = {"cu_seqlens": inputs.keywords["cu_seqlens"].float()}
    return found | elsewhere({n: x for n, x in t.items() if n != "q"}, subject.device)


CHECKS: Mapping[str, tuple[Callable[[Subject], None], bool]] = {
    "misuse": (refuses_misuse, False),
    "launches": (keeps_launches_apart, False),
    "wrong-offsets": (keeps_to_its_tensors, False),
    "sequences-apart": (keeps_sequences_apart, False),
    "in-two-calls": (continues_from_states, False),
    "from-a-chunk": (resumes_from_chunks, False),
}
