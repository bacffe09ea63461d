"""Interleaved timing of contenders that compute the same result, so that clock drift affects all
equally."""

from __future__ import annotations

import contextlib
import fcntl
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kgen.bench.peers import NotInstalled

AGREE = 5e-2
"""Largest relative Frobenius distance of a peer's result from kgen's."""

FLUSHES = 4
"""Number of times that 1 GB is zeroed before a call.

One time flushes L2. Four times take 1.3 ms on an H200. A launch of a backward pass through autograd
takes the CPU 0.5 to 0.7 ms.
"""


@dataclass(frozen=True)
class BenchJob:
    """The work of one worker. Timing one pass takes `budget` seconds, or `rounds` calls per peer.

    `files` are the emitted files by stem (`triton`, `cuda`). The first is the spec's default on the
    device and has the peer name `kgen`. The others are `kgen-cuda` and so on. Files in
    `forward_only` have no gradients. `shape` is the family's `Shape`. Workers with the same file
    `turns` prepare in parallel and measure one at a time, while no worker prepares.
    """

    problem: Any
    files: Mapping[str, Path]
    peers: tuple[str, ...]
    shape: Any
    device: str
    rounds: int = 20
    budget: float = 1.5
    first_call: bool = False
    """True to time the first call in a fresh process instead. Only attention supports it."""
    forward_only: frozenset[str] = frozenset()
    parts: Mapping[str, Path] = field(default_factory=dict)
    """Emitted files that compute one part of the kernel, by part name (`delta`)."""
    turns: Path | None = None

    def peers_of(self, backward: bool) -> tuple[str, ...]:
        """The peers that have this pass."""
        return tuple(name for name in self.peers if not (backward and name in self.forward_only))


@contextlib.contextmanager
def preparing(job: BenchJob) -> Iterator[None]:
    """Hold a shared lock while peers are compiled and called first. Nobody measures meanwhile."""
    with _locked(job, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def measuring(job: BenchJob) -> Iterator[None]:
    """Hold an exclusive lock while peers are timed. No other worker uses the device."""
    with _locked(job, fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def _locked(job: BenchJob, how: int) -> Iterator[None]:
    if job.turns is None:
        yield
        return
    # closing the file releases the lock, as the end of the process does
    with open(job.turns, "a") as file:
        fcntl.flock(file, how)
        yield


@dataclass
class Contender:
    """A compiled peer with its samples in milliseconds."""

    name: str
    run: Callable[[], Any]
    first_call: float
    samples: list[float] = field(default_factory=list)
    distance: float | None = None
    """Relative distance of its result from kgen's; None if it was not computed."""


def copy(nbytes: int, device: str) -> Contender:
    """Return a contender that copies `nbytes` in total, half read and half written."""
    # Copies of an odd number of bytes are slower.
    source = torch.zeros(-(-nbytes // 8192) * 4096, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Contender("copy", lambda: target.copy_(source), 0.0)


def synchronize(device: str) -> None:
    """Wait for the GPU. Do nothing on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def first(
    make: Callable[[], Callable[[], Any]], device: str
) -> tuple[Callable[[], Any], Any, float]:
    """Call `make` and then its result once. Return the function, the result, and the seconds
    including compilation."""
    synchronize(device)
    began = time.perf_counter()
    run = make()
    result = run()
    synchronize(device)
    return run, result, time.perf_counter() - began


def _once(run: Callable[[], Any], device: str, flush: Any) -> float:
    """Return the milliseconds of one call with a flushed L2, or by wall clock on a CPU."""
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
    """Fill the samples of all contenders.

    Each round calls each contender once, in rotating order.
    """
    # 1 GB is far larger than L2.
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
    """Return the largest relative Frobenius distance between two results.

    NaN counts as infinite.
    """
    distances = []
    for a, b in zip(got, want, strict=True):
        difference = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
        distances.append(difference if difference == difference else float("inf"))
    return max(distances)


def rows(
    pass_: str, contenders: Sequence[Contender], work: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return a row per contender. `ratio` is its time divided by the time of kgen's default file.

    `work` maps a rate to the amount of work in the rate's unit times milliseconds, for example
    `{"tflops": FLOP / 1e9}`.
    """
    own = next(
        (statistics.median(c.samples) for c in contenders if c.name.startswith("kgen")), None
    )
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
                "distance": None
                if contender.distance is None
                else float(f"{contender.distance:.2e}"),
                "error": None,
            }
        )
    return found


@dataclass(frozen=True)
class Failure:
    """The reason why a peer has no time."""

    text: str
    missing: bool = False
    """True if the package of the peer is not installed."""


def failure(error: Exception) -> Failure:
    """Return the reason of an error: its type and its first 1000 characters.

    Print the traceback. A missing package needs neither type nor traceback.
    """
    if isinstance(error, NotInstalled):
        return Failure(str(error), missing=True)
    traceback.print_exception(error)
    return Failure(f"{type(error).__name__}: {error}"[:1000])


def failures(pass_: str, failed: Mapping[str, Failure]) -> list[dict[str, Any]]:
    """Return a row per peer that failed."""
    return [
        {"pass": pass_, "peer": peer, "error": why.text, "missing": why.missing}
        for peer, why in failed.items()
    ]


def driver(device: str) -> str:
    """Return the version of the GPU driver; empty on a CPU, `unknown` if nvidia-smi fails."""
    if device != "cuda":
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return text.split("\n")[0].strip()
