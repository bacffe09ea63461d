"""Timing of contenders that compute the same thing: interleaved, so that drift of the chip hits all alike."""

from __future__ import annotations

import contextlib
import fcntl
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

AGREE = 5e-2
"""How far a peer's result may be from kgen's, as a relative Frobenius norm."""

FLUSHES = 4
"""Times that a GB is zeroed before a call. Once clears L2; four times take the GPU (an H200: 1.3 ms) longer than the
CPU takes to launch what comes next, a backward pass through autograd (0.5 to 0.7 ms)."""


@dataclass(frozen=True)
class BenchJob:
    """What one worker measures. Timing one pass takes `budget` seconds, or `rounds` calls of each peer.

    `files` are the emitted files by stem (`triton`, `cuda`); the first is the spec's default on the device and is
    called `kgen` among the peers, the others `kgen-cuda` and the like. Those in `forward_only` have no gradients.
    `shape` belongs to the family. Workers that share a file `turns` prepare side by side and
    measure one at a time, when none prepares any more.
    """

    problem: Any
    files: Mapping[str, Path]
    peers: tuple[str, ...]
    shape: Any
    device: str
    rounds: int = 20
    budget: float = 1.5
    first_call: bool = False
    """Whether to time the first call in a fresh process instead, where the family can."""
    forward_only: frozenset[str] = frozenset()
    parts: Mapping[str, Path] = field(default_factory=dict)
    """Emitted files that do one part of the kernel, by the name of the part: `delta`."""
    turns: Path | None = None

    def peers_of(self, backward: bool) -> tuple[str, ...]:
        """The peers that have a pass."""
        return tuple(name for name in self.peers if not (backward and name in self.forward_only))


@contextlib.contextmanager
def preparing(job: BenchJob) -> Iterator[None]:
    """While peers are compiled and called first: others may do the same, none measures."""
    with _locked(job, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def measuring(job: BenchJob) -> Iterator[None]:
    """While peers are timed: the device is this worker's."""
    with _locked(job, fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def _locked(job: BenchJob, how: int) -> Iterator[None]:
    if job.turns is None:
        yield
        return
    with open(job.turns, "a") as file:  # closing it gives the lock back, as the end of the process does
        fcntl.flock(file, how)
        yield


@dataclass
class Contender:
    """A peer that is ready to be timed."""

    name: str
    run: Callable[[], Any]
    first_call: float
    samples: list[float] = field(default_factory=list)
    distance: float | None = None
    """Of its result from kgen's, as `distance` has it; None where that was not looked at."""


def copy(nbytes: int, device: str) -> Contender:
    """As many bytes read and written together: what the device's memory allows."""
    # A copy of an odd number of bytes is a slower one.
    source = torch.zeros(-(-nbytes // 8192) * 4096, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Contender("copy", lambda: target.copy_(source), 0.0)


def synchronize(device: str) -> None:
    """Wait for the device, if it is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def first(make: Callable[[], Callable[[], Any]], device: str) -> tuple[Callable[[], Any], Any, float]:
    """What `make` gives to time, the result of its first call, and the seconds of both with compilation."""
    synchronize(device)
    began = time.perf_counter()
    run = make()
    result = run()
    synchronize(device)
    return run, result, time.perf_counter() - began


def _once(run: Callable[[], Any], device: str, flush: Any) -> float:
    """Milliseconds of one call with a cold L2 cache; wall clock without a GPU."""
    if device != "cuda":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(FLUSHES):
        flush.zero_()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure(contenders: Sequence[Contender], job: BenchJob) -> None:
    """Fill in the samples: one call of each per round, the order rotating, so that drift hits all alike."""
    # Far more than L2.
    flush = torch.empty(2**30, dtype=torch.uint8, device="cuda") if job.device == "cuda" else None
    for contender in contenders:
        _once(contender.run, job.device, flush)
    began = time.perf_counter()
    for contender in contenders:
        _once(contender.run, job.device, flush)
    rounds = max(job.rounds, min(100, int(job.budget / max(time.perf_counter() - began, 1e-6))))
    for number in range(rounds):
        for place in range(len(contenders)):
            contender = contenders[(number + place) % len(contenders)]
            contender.samples.append(_once(contender.run, job.device, flush))


def distance(got: Sequence[Any], want: Sequence[Any]) -> float:
    """The largest relative Frobenius distance of two results; NaN counts as infinite."""
    distances = []
    for a, b in zip(got, want, strict=True):
        difference = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
        distances.append(difference if difference == difference else float("inf"))
    return max(distances)


def rows(pass_: str, contenders: Sequence[Contender], work: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each contender, `ratio` being its time over that of kgen's default.

    `work` is by name what one millisecond at a rate of 1 does: {"tflops": FLOP / 1e9}.
    """
    own = next((statistics.median(c.samples) for c in contenders if c.name.startswith("kgen")), None)
    found = []
    for contender in contenders:
        low, middle, high = statistics.quantiles(contender.samples, n=4, method="inclusive")
        found.append(
            {
                "pass": pass_,
                "peer": contender.name,
                "milliseconds": round(middle, 5),
                "quartiles": [round(low, 5), round(high, 5)],
                "rounds": len(contender.samples),
                **{name: round(amount / middle, 3) for name, amount in work.items()},
                "ratio": None if own is None else round(middle / own, 4),
                "first_call": round(contender.first_call, 3),
                "distance": None if contender.distance is None else float(f"{contender.distance:.2e}"),
                "error": None,
            }
        )
    return found


def message(error: Exception) -> str:
    """What went wrong, short enough for a row."""
    return f"{type(error).__name__}: {error}"[:1000]


def driver(device: str) -> str:
    """The version of the GPU's driver."""
    if device != "cuda":
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return text.split("\n")[0].strip()
