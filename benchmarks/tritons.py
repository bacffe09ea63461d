"""Time emitted attention under several Tritons, interleaved.

Usage: `python benchmarks/tritons.py SPEC... --triton DIR...`.

Each DIR holds an unpacked Triton wheel. `-` is the installed Triton. Environment variables may
follow: `DIR,PTXAS_OPTIONS=--regAllocOptLevel=4`. Each Triton has its own process. In each round
every process times a few calls of a pass, with L2 flushed, in rotating order.

The script prints TFLOP/s by spec, pass and Triton. It also prints the ratio of medians to the first
Triton, and the relative distance of results. It writes all to `benchmarks/<device>/tritons.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, CALLS = 6, 5
SHAPE = (2, 16, 8192)


class Worker:
    """A process with one Triton."""

    def __init__(self, triton: str) -> None:
        folder, *more = triton.split(",")
        path = [str(ROOT), *([] if folder == "-" else [folder]), os.environ.get("PYTHONPATH", "")]
        environment = dict(variable.split("=", 1) for variable in more)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **question: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self.process.wait()}")
        return json.loads(line)


def serve() -> None:
    """Answer questions, one line each: the versions, a spec to prepare, a pass to time."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints must not look like answers
    import torch
    import triton

    from kgen.bench.timing import BenchJob, _once
    from kgen.kernels.attention.bench.contenders import contenders, prepared
    from kgen.kernels.attention.bench.shape import Shape
    from kgen.kernels.attention.bench.workload import draw_workload, visible
    from kgen.spec.load import load
    from kgen.verify.families import problem_of
    from kgen.verify.toolchain import describe, import_file

    flush = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    facts = {**describe("cuda"), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps(facts), file=lines, flush=True)
    runs: dict[str, Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if spec := question.get("prepare"):
            runs.clear()
            problem = problem_of(load(ROOT / "specs" / f"{spec}.yaml"))
            path = ROOT / "generated" / spec / "triton.py"
            function = getattr(import_file(path, f"kgen_emitted_{spec}"), spec)
            workload = draw_workload(problem, *SHAPE, "cuda")
            job = BenchJob(problem, {"triton": path}, ("kgen",), Shape(), "cuda")
            attentions, failed = prepared(job, workload, {"kgen": function})
            flops = 2.0 * visible(workload) * (problem.head_qk + problem.head_v)
            answer: dict[str, Any] = {}
            for name, factor in (("forward", 1.0), ("backward", 2.5)):
                if name not in problem.passes:
                    continue
                found = contenders(name, workload, attentions, failed, "cuda")
                if failed:
                    raise RuntimeError(str(failed))
                runs[name] = found[0].run
                result = found[0].run()
                # Tritons are compared on a fixed sample of the results.
                sample = [
                    x.detach().flatten()[:: max(1, x.numel() // 4096)].double()
                    for x in _tensors(result)
                ]
                answer[name] = {"flops": flops * factor, "sample": torch.cat(sample).tolist()}
            print(json.dumps(answer), file=lines, flush=True)
        else:
            run = runs[question["time"]]
            times = [_once(run, "cuda", flush) for _ in range(CALLS + 1)]
            print(json.dumps(times[1:]), file=lines, flush=True)


def _tensors(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def race(specs: list[str], tritons: list[str]) -> dict[str, Any]:
    """Return the report of every spec under every Triton."""
    workers = [Worker(triton) for triton in tritons]
    facts = [worker.answer() for worker in workers]
    names = [
        " ".join([one["triton"], *of.split(",")[1:]])
        for one, of in zip(facts, tritons, strict=True)
    ]
    print(f"{'spec':18}{'pass':10}" + "".join(f"{name:>22}" for name in names), flush=True)
    rows = []
    for spec in specs:
        for worker in workers:
            worker.ask(prepare=spec)
        ready = [worker.answer() for worker in workers]
        for pass_ in ready[0]:
            samples: list[list[float]] = [[] for _ in workers]
            for round_ in range(ROUNDS):
                for place in range(len(workers)):
                    number = (round_ + place) % len(workers)
                    workers[number].ask(time=pass_)
                    samples[number] += workers[number].answer()
            medians = [statistics.median(own) for own in samples]
            want = ready[0][pass_]["sample"]
            row: dict[str, Any] = {"spec": spec, "pass": pass_, "tritons": {}}
            for name, own, middle, prepared in zip(names, samples, medians, ready, strict=True):
                got = prepared[pass_]["sample"]
                apart = sum((a - b) ** 2 for a, b in zip(got, want, strict=True)) / sum(
                    b * b for b in want
                )
                low, _, high = statistics.quantiles(own, n=4, method="inclusive")
                row["tritons"][name] = {
                    "milliseconds": round(middle, 5),
                    "quartiles": [round(low, 5), round(high, 5)],
                    "tflops": round(prepared[pass_]["flops"] / middle / 1e9, 1),
                    "ratio": round(medians[0] / middle, 4),
                    "distance": float(f"{apart**0.5:.2e}"),
                }
            rows.append(row)
            cells = [
                f"{t['tflops']:.0f} ({t['ratio']:.3f}, {t['distance']:.0e})"
                for t in row["tritons"].values()
            ]
            print(f"{spec:18}{pass_:10}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    for worker in workers:
        worker.process.kill()
    return {"shape": SHAPE, "facts": facts, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="Names of stock specs.")
    parser.add_argument(
        "--triton",
        nargs="+",
        default=["-"],
        metavar="DIR[,VARIABLE=VALUE...]",
        help="Unpacked Triton wheels. `-` is the installed Triton.",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=ROOT / "benchmarks",
        help="Folder of results. Default: benchmarks/.",
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    report = race(options.specs, options.triton)
    folder = options.output / re.sub(
        r"[^a-z0-9]+", "-", report["facts"][0]["device"].lower()
    ).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tritons.json").write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
