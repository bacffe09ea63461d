"""Times one emitted file against its peers: `python -m kgen.bench.worker JOB`.

JOB is a pickled `BenchJob`. Standard output carries JSON lines: facts about the device, and a row for each
pass and peer.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from kgen.bench.peers import Attention, DoesNotApply, Workload, draw_workload, prepare, visible
from kgen.verify import interpreter
from kgen.verify.problem import Problem
from kgen.verify.toolchain import describe, import_file, versions

AGREE = 5e-2
"""How far a peer's result may be from kgen's, as a relative Frobenius norm."""


@dataclass(frozen=True)
class BenchJob:
    """What one worker measures. Timing one pass takes `budget` seconds, or `rounds` calls of each peer."""

    problem: Problem
    path: Path
    peers: tuple[str, ...]
    batch: int
    heads: int
    length: int
    device: str
    rounds: int = 20
    budget: float = 1.5


@dataclass
class Contender:
    """A peer that is ready to be timed."""

    name: str
    run: Callable[[], Any]
    first_call: float
    samples: list[float]


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _first(
    attention: Attention, workload: Workload, wanted: Sequence[Any] | None, device: str
) -> tuple[Callable[[], Any], Any, float]:
    """What to time, the result of its first call, and that call's seconds with compilation."""
    _synchronize(device)
    began = time.perf_counter()
    run = _runner(attention, workload, wanted)
    result = run()
    _synchronize(device)
    return run, result, time.perf_counter() - began


def _once(run: Callable[[], Any], device: str, flush: Any) -> float:
    """Milliseconds of one call with a cold L2 cache; wall clock without a GPU."""
    if device != "cuda":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure(contenders: Sequence[Contender], job: BenchJob) -> None:
    """Fill in the samples: one call of each per round, the order rotating, so that drift hits all alike."""
    # Far more than L2: zeroing it also takes the GPU long enough to hide how long a launch takes the CPU.
    flush = torch.empty(2**30, dtype=torch.uint8, device="cuda") if job.device == "cuda" else None
    for contender in contenders:
        _once(contender.run, job.device, flush)
    round_ms = sum(_once(contender.run, job.device, flush) for contender in contenders)
    rounds = max(job.rounds, min(200, int(1e3 * job.budget / max(round_ms, 1e-3))))
    for number in range(rounds):
        for place in range(len(contenders)):
            contender = contenders[(number + place) % len(contenders)]
            contender.samples.append(_once(contender.run, job.device, flush))


def _distance(got: Sequence[Any], want: Sequence[Any]) -> float:
    """The largest relative Frobenius distance of two results; NaN counts as infinite."""
    distances = []
    for a, b in zip(got, want, strict=True):
        difference = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
        distances.append(difference if difference == difference else float("inf"))
    return max(distances)


def bench(job: BenchJob, function: Any, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Measure both passes of a spec and say a row for each peer."""
    workload = draw_workload(job.problem, job.batch, job.heads, job.length, job.device)
    size, pairs = workload.sizes, visible(workload)
    fraction = pairs / (size["B"] * size["HQ"] * size["SQ"] * size["SK"])
    shape = {**size, "D": job.problem.head_qk, "DV": job.problem.head_v, "dtype": job.problem.dtype}
    say({"facts": {**describe(job.device), "driver": _driver(job.device), "versions": versions()}})
    say({"workload": {"shape": shape, "fraction": round(fraction, 6)}})
    flops = 2.0 * pairs * (job.problem.head_qk + job.problem.head_v)
    attentions: dict[str, Attention] = {}
    failed: dict[str, str] = {}
    for name in job.peers:
        try:
            attentions[name] = prepare(name, workload, function)
        except DoesNotApply:
            continue
        except Exception as error:
            failed[name] = _message(error)
    passes = ["forward", *(["backward"] if "backward" in job.problem.passes else [])]
    for pass_ in passes:
        work = flops * (2.5 if pass_ == "backward" else 1.0)
        contenders = _contenders(pass_, workload, attentions, failed, job.device)
        measure(contenders, job)
        own = next((statistics.median(c.samples) for c in contenders if c.name == "kgen"), None)
        for contender in contenders:
            low, middle, high = statistics.quantiles(contender.samples, n=4, method="inclusive")
            say(
                {
                    "pass": pass_,
                    "peer": contender.name,
                    "milliseconds": round(middle, 5),
                    "quartiles": [round(low, 5), round(high, 5)],
                    "rounds": len(contender.samples),
                    "tflops": round(work / middle / 1e9, 2),
                    "ratio": None if own is None else round(middle / own, 4),
                    "first_call": round(contender.first_call, 3),
                    "error": None,
                }
            )
        for name, message in failed.items():
            say({"pass": pass_, "peer": name, "error": message})
        contenders.clear()
        if job.device == "cuda":
            torch.cuda.empty_cache()


def _contenders(
    pass_: str,
    workload: Workload,
    attentions: dict[str, Attention],
    failed: dict[str, str],
    device: str,
) -> list[Contender]:
    """The peers that run and agree with kgen, or else with the first that runs; others go to `failed`."""
    backward = pass_ == "backward"
    grads = [workload.buffers[b.name] for b in workload.problem.buffers if b.grad]
    wanted = [workload.q, workload.k, workload.v, *grads]
    for tensor in wanted:
        tensor.requires_grad_(backward)
    found: list[Contender] = []
    want: Sequence[Any] | None = None
    for name, attention in list(attentions.items()):
        try:
            run, result, seconds = _first(attention, workload, wanted if backward else None, device)
            got = [t.detach() for t in (result if backward else [result])]
            if want is None:
                want = got
            elif (distance := _distance(got[: len(want)], want)) > AGREE:
                raise ArithmeticError(f"disagrees with {found[0].name}: relative distance {distance:.2e}")
            found.append(Contender(name, run, seconds, []))
        except Exception as error:
            traceback.print_exc()
            failed[name] = _message(error)
            del attentions[name]
    return found


def _runner(attention: Attention, workload: Workload, wanted: Sequence[Any] | None) -> Callable[[], Any]:
    q, k, v = workload.q, workload.k, workload.v
    if wanted is None:

        def forward() -> Any:
            with torch.no_grad():
                return attention(q, k, v)

        return forward
    out = attention(q, k, v)
    return lambda: torch.autograd.grad(out, wanted, workload.dout, retain_graph=True)


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def _driver(device: str) -> str:
    if device != "cuda":
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return text.split("\n")[0].strip()


def main(job: BenchJob, lines: IO[str]) -> None:
    """Run a job."""
    if job.device == "cpu":
        interpreter.mend()
    module = import_file(job.path, f"kgen_emitted_{job.problem.name}")
    bench(job, getattr(module, job.problem.name), lambda row: print(json.dumps(row), file=lines, flush=True))


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        the_job = pickle.load(file)
    # Keep standard output for results: what anything else prints there goes to standard error.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(the_job, results)
