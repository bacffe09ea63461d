"""Verification of attention: difficult cases on an emitted file, checks, and calls to compile."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kgen.family import Chip
from kgen.kernels.attention.schedules import CHIPS
from kgen.kernels.attention.verify import row_max, serving
from kgen.kernels.attention.verify.block_mask import BLOCK_MASKS
from kgen.kernels.attention.verify.case import Case
from kgen.kernels.attention.verify.checks import keeps_to_its_tensors, reaches_far, refuses_misuse
from kgen.kernels.attention.verify.inputs import Inputs, call, cases, differentiable, draw, sized
from kgen.kernels.attention.verify.launches import launches_what_it_compiled_for
from kgen.kernels.attention.verify.problem import Problem
from kgen.kernels.attention.verify.reference import Call, Result, attention, eager
from kgen.kernels.attention.verify.serve_checks import check_serving, replays_other_lengths
from kgen.spec.common import REALS
from kgen.verify import compare
from kgen.verify.families import NO_SIZES, Example, Subject, chip_cases
from kgen.verify.tensors import DTYPES

_EXAMPLES = {"twice": (40, 40), "opcheck": (24, 40), "derivatives": (24, 40), "autocast": (24, 40)}
_DECODED = {**_EXAMPLES, "compile": (2, 300), "graph": (1, 300), "graph-replay": (1, 300)}


def groups(problem: Problem) -> tuple[str, ...]:
    """Return `forward`, and `backward` if the spec has it."""
    return ("forward", "backward") if "backward" in problem.passes else ("forward",)


def case_names(problem: Problem, group: str, quick: bool) -> tuple[str, ...]:
    """Return the names of the cases, the same for each group.

    `forward` also has the checks of block masks, and the batches of the pass `serve`.
    """
    more = tuple(BLOCK_MASKS) if problem.block_mask and group == "forward" else ()
    more += serving.names(problem) if group == "forward" else ()
    return (*(case.name for case in cases(problem, quick)), *more)


def example(subject: Subject, name: str) -> Example:
    """Return a call with gradients, if the spec has them."""
    problem = subject.problem
    sizes = _DECODED if problem.decodes else _EXAMPLES
    inputs = sized(problem, name, *sizes.get(name, (129, 129)), subject.device)
    wanted = differentiable(problem, inputs) if subject.backward else {}
    keywords = {"scale": inputs.case.scale, **inputs.cache, **inputs.buffers, **inputs.runtime}
    return Example(inputs.operands, keywords, wanted, (inputs.dout,))


def run_case(subject: Subject, group: str, name: str) -> list[compare.Check]:
    """Return the verdict on each output of a call: `out` and `lse`, or the gradients for
    `backward`.
    """
    if name in BLOCK_MASKS:
        BLOCK_MASKS[name](subject)
        return []
    if name in serving.names(subject.problem):
        return _run_served(subject, name)
    (case,) = (case for case in cases(subject.problem, quick=False) if case.name == name)
    return run_drawn(subject, group, case)


def _run_served(subject: Subject, name: str) -> list[compare.Check]:
    """Return the verdicts of a batch of the pass `serve`."""
    problem, device = subject.problem, subject.device
    plain = serving.packed(problem)
    (batch,) = (b for b in serving.batches(problem) if f"{serving.PREFIX}{b.name}" == name)
    served = serving.drawn(problem, batch, device)
    truth, rounded = map(served.rows_of, references(plain, served.inputs, ()))
    serving.hide(served, truth.seen)
    names = vars(subject.module)
    with serving.processors(names, batch):
        run, broken = compare.careful(
            lambda: {
                **serving.results(serving.call(names, problem, served), served),
                **row_max.served(names, problem, served),
            },
            serving.tensors(served),
            device,
            fixed={"out", "lse", *row_max.NAMES}.__contains__,
        )
    return [*_compare(plain, run, truth, rounded, False), *broken]


def run_drawn(subject: Subject, group: str, case: Case) -> list[compare.Check]:
    """Return the verdicts of one case."""
    problem, device = subject.problem, subject.device
    inputs = draw(problem, case, device)
    wanted = differentiable(problem, inputs) if group == "backward" else {}
    known: list[tuple[Tensor, tuple[Result, Result]]] = []

    def compared_with(stored: Tensor) -> tuple[Result, Result]:
        if not known or not compare.same_bits(known[-1][0], stored):
            known.append(
                (stored, references(problem, inputs, tuple(wanted), stored if wanted else None))
            )
        return known[-1][1]

    def verdicts(fixed: set[str]) -> list[compare.Check]:
        run, broken = compare.careful(
            lambda: _outputs(subject, inputs, wanted),
            inputs.tensors,
            device,
            fixed=fixed.__contains__,
        )
        got = {name: value for name, value in run.items() if not (wanted and name == "out")}
        found = _compare(problem, got, *compared_with(run["out"]), inputs.case.ties)
        return [*found, *_in_another_order(inputs, got), *broken]

    # Gradients of buffers may be sums of atomics. All others have one order of summation, except dq
    # of the kernel for all three gradients without deterministic algorithms.
    fixed = {"out", "lse", *row_max.NAMES, "dq", "dk", "dv"}
    if not (wanted and _may_sum_dq_by_atomics(subject, inputs)):
        return verdicts(fixed)
    # Here that kernel runs for any number of keys.
    with _in_one_kernel(vars(subject.module)):
        found = verdicts(fixed - {"dq"})
    with _deterministic():
        for check in verdicts(fixed):
            message = check.message and f"deterministic: {check.message}"
            found.append(replace(check, name=f"{check.name} (deterministic)", message=message))
    return found


def _may_sum_dq_by_atomics(subject: Subject, inputs: Inputs) -> bool:
    names = vars(subject.module)
    serving = (
        chip
        for chip in CHIPS
        if chip.choice in names and names[chip.choice](inputs.q, inputs.k, inputs.v)
    )
    return any("_in_one_kernel" in _names_for(chip, names) for chip in serving)


def _names_for(chip: Chip, names: dict[str, Any]) -> dict[str, Any]:
    """Return the namespace that calls the kernels for one chip: the file with these kernels, or the
    emitted file.

    With an unsupported Triton version, it is the emitted file, because the kernels cannot be
    imported.
    """
    if chip.module not in names or chip_cases(chip).unable(names) is not None:
        return names
    file: ModuleType = names[chip.module]()
    return vars(file)


def _with_one_kernel(names: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the namespaces of an emitted file that have one kernel for all three gradients."""
    found = [_names_for(chip, names) for chip in CHIPS]
    return [of for of in found if "_in_one_kernel" in of]


@contextlib.contextmanager
def _in_one_kernel(names: dict[str, Any]) -> Iterator[None]:
    """Use one kernel for all three gradients within the context, where the file has it, for any
    number of keys.
    """
    chosen = [(of, of["_in_one_kernel"]) for of in _with_one_kernel(names)]
    try:
        # Change one name. Triton's interpreter adds others, which must stay.
        for of, _ in chosen:
            of["_in_one_kernel"] = lambda *_: True
        yield
    finally:
        for of, function in chosen:
            of["_in_one_kernel"] = function


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Set `torch.use_deterministic_algorithms` within the context."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def fits_other_chips(subject: Subject) -> None:
    """Check the tiles of other GPUs in Triton's interpreter: other shapes, and loads by TMA."""
    if subject.device != "cpu" or not hasattr(subject.module, "_tile"):
        return
    names = ["several"] if subject.problem.varlen else ["off-tile", "q-shorter"]
    chosen = subject.module._tile
    for chip in (80, 90):

        def tile(table: Any, arch: int, *tensors: Tensor, chip: int = chip) -> Any:
            return chosen(table, chip, *tensors)

        with mock.patch.object(subject.module, "_tile", tile):
            for group, name in itertools.product(groups(subject.problem), names):
                for check in run_case(subject, group, name):
                    assert check.ok, f"tiles for {chip}, {group} {name}: {check.message}"


def merges_many_splits(subject: Subject) -> None:
    """Check decoding with other numbers of splits: two, and the maximum."""
    if not (subject.problem.decodes and hasattr(subject.module, "_splits")):
        return
    for wanted in (2, 128):
        with mock.patch.object(
            subject.module,
            "_splits",
            lambda programs, most, at_once, wanted=wanted: min(most, wanted),
        ):
            for check in run_case(subject, "forward", "decode-splits"):
                assert check.ok, f"in {wanted} splits or fewer: {check.message}"


CHECKS: Mapping[str, tuple[Callable[[Subject], None], bool]] = {
    "misuse": (refuses_misuse, False),
    "splits": (merges_many_splits, False),
    "wrong-offsets": (keeps_to_its_tensors, False),
    "tiles": (fits_other_chips, False),
    "launches": (launches_what_it_compiled_for, False),
    "serve": (check_serving, False),
    "serve-graph": (replays_other_lengths, True),
    "far-rows": (reaches_far, True),
}


def references(
    problem: Problem, inputs: Inputs, wanted: tuple[str, ...], stored: Tensor | None = None
) -> tuple[Result, Result]:
    """Return the float64 truth and the eager computation, with gradients of `wanted` if it is not
    empty.

    `stored` is the output that a kernel's backward pass read.
    """
    of_call = Call(
        score_mod=problem.score_mod,
        mask_mod=problem.mask_mod,
        buffers={n: t for n, t in inputs.buffers.items() if not (problem.sinks and n == "sinks")},
        sinks=inputs.buffers["sinks"] if problem.sinks else None,
        params=inputs.params,
        cu_seqlens=inputs.case.cu_seqlens if problem.varlen else None,
        scale=inputs.case.scale,
        kv_lens=inputs.cache.get("kv_lens"),
        aligned_to_end=problem.aligned_to_end,
    )
    if wanted:
        of_call = replace(of_call, dout=inputs.dout, dlse=inputs.dlse, wanted=wanted)
    operands = (inputs.q, inputs.clean_k, inputs.clean_v)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        rounded = eager(*operands, of_call, tf32=problem.precision == "tf32")
        return attention(*operands, of_call, stored=stored), rounded
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _outputs(subject: Subject, inputs: Inputs, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Call the emitted function.

    Return its outputs, or the output and gradients (`dq`, ...) if some are wanted.
    """
    problem, asks_lse = subject.problem, inputs.dlse is not None
    asked: dict[str, Any] = {"return_lse": True} if asks_lse else {}
    asked |= {"return_max": True} if problem.row_max and asks_lse and wanted else {}
    result = call(subject.function, inputs, **asked)
    out, lse, *_ = result if asks_lse else (result, None)
    if not wanted:
        found = {"out": out} if lse is None else {"out": out, "lse": lse}
        return found | row_max.results(problem, subject.function, inputs)
    pairs = [(out, inputs.dout)] if inputs.case.dout != "none" else []
    pairs += [(lse, inputs.dlse)] if lse is not None else []
    outputs, cotangents = ([pair[i] for pair in pairs] for i in (0, 1))
    grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents, materialize_grads=True)
    return {"out": out.detach()} | {
        f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)
    }


def _in_another_order(inputs: Inputs, got: Mapping[str, Tensor]) -> Iterator[compare.Check]:
    """Yield failures of outputs and gradients whose memory order differs from the order of q or
    k.
    """
    like = {"out": inputs.q, "dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    for name, x in got.items():
        if inputs.case.layout == "bshd" and name in like and x.dim() == 4 and min(x.shape[1:3]) > 1:
            by_token, wanted = (t.stride(1) < t.stride(2) for t in (x, like[name]))
            if by_token != wanted:
                message = (
                    f"{name} has strides {x.stride()}, and what it is like {like[name].stride()}"
                )
                yield compare.Check(f"{name} (order)", False, math.nan, math.nan, math.nan, message)


def _compare(
    problem: Problem, got: Mapping[str, Tensor], truth: Result, yardstick: Result, exact: bool
) -> list[compare.Check]:
    """Return the verdict on each output.

    With `exact` scores, the error of P does not grow with them.
    """
    finite = truth.lse.nan_to_num(0.0, 0.0, 0.0).abs()
    reach = float(finite.max()) if finite.numel() and not exact else 0.0
    allowed = compare.tolerance(problem.dtype, problem.precision, problem.fast_math, reach)
    of_logs = compare.of_log_sums(allowed, problem.fast_math, reach)
    dtype = DTYPES[problem.dtype]
    dead, unseen = truth.dead, ~truth.seen
    buffers = {b.name for b in problem.buffers}
    found = []
    for name, value in got.items():
        if name == "out":
            found.append(compare.check(
                name, value, truth.out, yardstick.out, allowed,
                compare.Traits(empty=dead, dtype=dtype),
            ))  # fmt: skip
        elif name == "lse":
            # One entry is one row.
            values = value[..., None], truth.lse[..., None], yardstick.lse[..., None]
            natural = torch.ones_like(truth.lse)
            found.append(
                compare.check(
                    name, *values, of_logs, compare.Traits(natural=natural, dtype=torch.float32)
                )
            )
        elif name in row_max.NAMES:
            found.append(row_max.verdict(name, value, truth, yardstick, of_logs))
        else:
            source = name[1:]
            empty = {"q": dead, "k": unseen, "v": unseen}.get(source)
            expected = dtype if source in ("q", "k", "v") else yardstick.grads[source].dtype
            limit = allowed
            if source in buffers:
                # delta uses the rounded output, an independent error in each row. A sum over rows
                # averages it.
                summed = max(1.0, truth.lse.numel() / max(1, value.numel()))
                limit = replace(
                    allowed, noise=max(allowed.noise, allowed.row_noise / 2 / math.sqrt(summed))
                )
            traits = compare.Traits(
                natural=truth.natural.get(source),
                empty=empty,
                dtype=expected,
                rounding=truth.rounding.get(source, 0.0),
            )
            both = truth.grads[source], yardstick.grads[source]
            plain = compare.check(name, value, *both, limit, traits)
            shift = truth.shifts.get(source)
            if plain.ok and shift is not None and problem.dtype in ("bf16", "fp16"):
                want, rounded = (x + shift for x in both)
                finer = _of_its_output(name, value, want, rounded, allowed, traits)
                plain = plain if finer.ok else replace(plain, ok=False, message=finer.message)
            found.append(plain)
    return found


def _of_its_output(
    name: str,
    value: Tensor,
    want: Tensor,
    eager: Tensor,
    allowed: compare.Tolerance,
    traits: compare.Traits,
) -> compare.Check:
    """Return the verdict on dq or dk without the rounding of the output.

    `want` and `eager` use the delta of the output that the kernel stored. The error of a row is
    then one rounding of dS: half a unit in the last place of the row's terms.
    """
    limit = replace(allowed, row_noise=allowed.unit)
    traits = replace(traits, rounding=0.0, parts={"all of it": want})
    return compare.check(f"{name} with the delta of its output", value, want, eager, limit, traits)


def compile_calls(
    problem: Problem, sizes: Mapping[str, Sequence[int]] = NO_SIZES
) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield calls without and with gradients and log-sum-exp, with different alignments.

    All sizes are divisible by 16, none is, or all except rows of buffers are. With `sizes`, for a
    package, other calls have one unaligned operand, or each dtype of buffers and sinks.
    """
    dtypes = [DTYPES[d] for d in REALS] if sizes and _open(problem) else [None]
    for group in sizes.get("gqa", (2,)) if problem.gqa == "any" else (int(problem.gqa),):
        found = _compiled_cases(problem, group, sizes.get("batch", ()))
        if sizes:  # two of q, k and v are loaded by TMA
            found += [replace(found[0], name=f"odd-{i}", layout=f"odd-{i}") for i in range(3)]
        for case, dtype in itertools.product(found, dtypes):
            yield case.name, partial(_compile, problem, case, dtype)
        if "serve" in problem.passes and not sizes:
            for batch in serving.compiled(group):
                yield batch.name, partial(serving.compile_batch, problem, batch)


def _compiled_cases(problem: Problem, group: int, batches: Sequence[int]) -> list[Case]:
    step = math.lcm(problem.q_multiple, problem.kv_multiple)
    length = -(-256 // step) * step
    odd = length + step
    found = [
        Case("aligned", length, length, batch=2, heads_kv=2, group=group),
        Case("strided", odd, odd, 2, 2, group, layout="guarded", dout="strided"),
    ]
    if any(len(buffer.shape) > 1 and buffer.shape[-1] == "SK" for buffer in problem.buffers):
        # q, k and v are loaded by TMA; rows of these buffers are not.
        found.append(Case("odd", odd, odd, 2, 2, group))
    if problem.varlen:
        found = [replace(case, packed=((case.sq, case.sk),) * 2) for case in found]
    if problem.decodes:
        found += [
            replace(case, name=f"{case.name}-{sq}", sq=sq) for case in found for sq in (1, 64)
        ]
        one_tile = min(length, 16)
        aligned = found[0]
        found.append(replace(aligned, name="one-tile", sq=1, sk=one_tile))
        # The rows of a tile are query heads of a KV head: numbers that make tiles of 16, 32 and 64.
        queries = dict.fromkeys(max(1, rows // group) for rows in (16, 32, 64))
        found += [
            replace(aligned, name=f"{batch}-of-{sq}-{sk}", batch=batch, heads_kv=1, sq=sq, sk=sk)
            for batch in batches
            for sq in queries
            for sk in (length, one_tile)
        ]
    return found


def _open(problem: Problem) -> list[str]:
    """Return the buffers that may have several dtypes."""
    sinks = ["sinks"] if problem.sinks else []
    return [*(b.name for b in problem.buffers if len(b.dtypes) > 1), *sinks]


def _compile(problem: Problem, case: Case, dtype: torch.dtype | None, function: Any) -> None:
    inputs = draw(problem, case, "cpu")
    if dtype is not None:
        inputs.buffers |= {name: inputs.buffers[name].to(dtype) for name in _open(problem)}
    with torch.no_grad():
        call(function, inputs)
    call(function, inputs, return_lse=True)
    if problem.row_max:
        call(function, inputs, return_max=True)
    if "backward" in problem.passes:
        wanted = list(differentiable(problem, inputs).values())
        names = function.__globals__
        with _in_one_kernel(names):
            torch.autograd.grad(call(function, inputs), wanted, inputs.dout)
            out, lse = call(function, inputs, return_lse=True)
            torch.autograd.grad([out, lse], wanted, [inputs.dout, torch.ones_like(lse)])
        if _with_one_kernel(names):
            with _deterministic():
                torch.autograd.grad(call(function, inputs), wanted, inputs.dout)
