"""Runs the cases of one emitted file in a process of its own: `python -m kgen.verify.worker JOB`.

JOB is a pickled `Job`. Standard output carries JSON lines, `{"start": case}` and then a row, and nothing
else: whatever the kernels or libraries print goes to standard error.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from kgen.verify import compare, integration, interpreter
from kgen.verify.inputs import DTYPES, Case, Inputs, cases, draw
from kgen.verify.integration import Subject, call, differentiable
from kgen.verify.problem import Problem
from kgen.verify.reference import Result, attention, eager
from kgen.verify.toolchain import import_file


@dataclass(frozen=True)
class Job:
    """What one worker does: the named cases of one pass of one emitted file."""

    problem: Problem
    path: Path
    group: str
    device: str
    quick: bool
    names: tuple[str, ...]


def case_names(problem: Problem, group: str, device: str, quick: bool) -> tuple[str, ...]:
    """All the cases of a pass group, in running order; integration checks go with `forward`."""
    checks = integration.checks(device) if group == "forward" else ()
    return tuple(case.name for case in cases(problem, quick)) + checks


def run_case(subject: Subject, case: Case, group: str) -> list[compare.Check]:
    """The verdicts on each output of a call: `out` and `lse`, or the gradients for `backward`."""
    problem, device = subject.problem, subject.device
    inputs = draw(problem, case, device)
    wanted = differentiable(problem, inputs) if group == "backward" else {}
    truth, yardstick = references(problem, inputs, tuple(wanted))
    before = compare.snapshot(inputs.tensors)
    with compare.poisoned_outputs() as storages:
        got = _outputs(subject, inputs, wanted)
        if device == "cuda":
            torch.cuda.synchronize()
    found = _compare(problem, got, truth, yardstick, device)
    if broken := compare.broken_canaries(storages):
        found.append(_failure("canaries", f"wrote outside of {broken} of its tensors"))
    if written := compare.changed(inputs.tensors, before):
        found.append(_failure("inputs", f"wrote to {', '.join(written)} or next to it"))
    if device == "cuda":
        again = _outputs(subject, inputs, wanted)
        # Gradients of buffers may be summed by atomics; everything else has one order of summation.
        fixed = [name for name in got if name in ("out", "lse", "dq", "dk", "dv")]
        if moved := [name for name in fixed if not compare.same_bits(got[name], again[name])]:
            found.append(_failure("determinism", f"{', '.join(moved)} differ from run to run"))
    return found


def _failure(name: str, message: str) -> compare.Check:
    return compare.Check(name, False, math.inf, math.nan, math.inf, message)


def references(problem: Problem, inputs: Inputs, wanted: tuple[str, ...]) -> tuple[Result, Result]:
    """The float64 truth and the eager computation, with gradients of `wanted` where that is not empty."""
    common: dict[str, Any] = {
        "score_mod": problem.score_mod,
        "mask_mod": problem.mask_mod,
        "buffers": inputs.buffers,
        "params": inputs.params,
        "scale": inputs.case.scale,
    }
    if wanted:
        common |= {"dout": inputs.dout, "dlse": inputs.dlse, "wanted": wanted}
    operands = (inputs.q, inputs.clean_k, inputs.clean_v)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"
    try:
        return attention(*operands, **common), eager(*operands, **common)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _outputs(subject: Subject, inputs: Inputs, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Call the emitted function: its outputs, or the gradients (`dq`, ...) where some are wanted."""
    asks_lse = inputs.dlse is not None
    result = call(subject.function, inputs, **({"return_lse": True} if asks_lse else {}))
    out, lse = result if asks_lse else (result, None)
    if not wanted:
        return {"out": out} if lse is None else {"out": out, "lse": lse}
    outputs, cotangents = ([out], [inputs.dout]) if lse is None else ([out, lse], [inputs.dout, inputs.dlse])
    grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents, materialize_grads=True)
    return {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def _compare(
    problem: Problem, got: Mapping[str, Tensor], truth: Result, yardstick: Result, device: str
) -> list[compare.Check]:
    reach = float(truth.lse.nan_to_num(0.0, 0.0, 0.0).abs().max()) if truth.lse.numel() else 0.0
    allowed = compare.tolerance(problem.dtype, problem.precision, problem.fast_math, device, reach)
    dtype = DTYPES[problem.dtype]
    dead, unseen = truth.lse == -torch.inf, ~truth.seen
    buffers = {b.name: b.dtype for b in problem.buffers}
    found = []
    for name, value in got.items():
        if name == "out":
            found.append(
                compare.check(name, value, truth.out, yardstick.out, allowed, empty=dead, dtype=dtype)
            )
        elif name == "lse":
            # One entry is one row.
            values = value[..., None], truth.lse[..., None], yardstick.lse[..., None]
            natural = torch.ones_like(truth.lse)
            found.append(compare.check(name, *values, allowed, natural=natural, dtype=torch.float32))
        else:
            source = name[1:]
            empty = {"q": dead, "k": unseen, "v": unseen}.get(source)
            expected = dtype if source in ("q", "k", "v") else DTYPES[buffers[source]]
            limit = allowed
            if source in buffers:
                # The rounding of the output, which delta is computed from, is an error of its own in each
                # row; a gradient that sums over rows averages these.
                summed = max(1.0, truth.lse.numel() / max(1, value.numel()))
                limit = replace(allowed, noise=max(allowed.noise, allowed.row_noise / 2 / math.sqrt(summed)))
            found.append(
                compare.check(
                    name,
                    value,
                    truth.grads[source],
                    yardstick.grads[source],
                    limit,
                    natural=truth.natural.get(source),
                    empty=empty,
                    dtype=expected,
                )
            )
    return found


def main(job: Job, lines: IO[str]) -> int:
    """Run a job; 0 when every case could be run, whatever came of it."""

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=lines, flush=True)

    say({"start": job.names[0]})  # an import that dies counts against the first case
    if job.device == "cpu":
        interpreter.mend()
    module = import_file(job.path, f"kgen_emitted_{job.problem.name}")
    subject = Subject(job.problem, job.path, module, job.device)
    by_name = {case.name: case for case in cases(job.problem, job.quick)}
    for name in job.names:
        say({"start": name})
        began = time.perf_counter()
        found: list[compare.Check] = []
        message = ""
        try:
            if name in by_name:
                found = run_case(subject, by_name[name], job.group)
            else:
                integration.CHECKS[name][0](subject)
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
        message = message or "; ".join(check.message for check in found if not check.ok)
        worst = max(found, key=lambda check: (not check.ok, check.ratio), default=None)
        say(
            {
                "case": name,
                "ok": not message,
                "error": _number(worst.error) if worst else None,
                "eager": _number(worst.eager) if worst else None,
                "ratio": _number(worst.ratio) if worst else None,
                "seconds": round(time.perf_counter() - began, 3),
                "message": message[:2000],
                "outputs": {c.name: [_number(c.error), _number(c.ratio)] for c in found},
            }
        )
        if message and job.device == "cuda":
            # A broken CUDA context would fail every case that follows: leave, and let the parent start
            # afresh.
            torch.cuda.synchronize()
    return 0


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        the_job = pickle.load(file)
    # Keep standard output for results: what anything else prints there goes to standard error.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(the_job, results))
