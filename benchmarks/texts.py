"""Compare emitted attention before and after a change of text.

Usage: `python benchmarks/texts.py BEFORE AFTER SPEC...`.

BEFORE and AFTER are folders of emitted files, like `generated`. One process loads both files of a
spec and calls them in turns, in rotating order, with L2 flushed. It measures forward, backward, and
backward with deterministic algorithms. The script prints medians, their ratio, and the relative
distance of the results. Gradients that atomics sum differ by rounding. It writes all to
`benchmarks/<device>/texts.json`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kgen.bench.timing import BenchJob, _once  # noqa: E402
from kgen.kernels.attention.bench.contenders import contenders, prepared  # noqa: E402
from kgen.kernels.attention.bench.shape import Shape  # noqa: E402
from kgen.kernels.attention.bench.workload import draw_workload  # noqa: E402
from kgen.spec.load import load  # noqa: E402
from kgen.verify.families import problem_of  # noqa: E402
from kgen.verify.toolchain import describe, import_file  # noqa: E402

BATCH, HEADS, CALLS = 2, 16, 24
# Keys, and True for deterministic algorithms.
SETTINGS = ((8192, False), (8192, True), (2048, False), (1024, False))


def flattened(result: Any) -> torch.Tensor:
    parts = result if isinstance(result, (tuple, list)) else [result]
    return torch.cat([part.detach().float().flatten() for part in parts])


def raced(spec: str, folders: dict[str, Path], flush: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield a row per setting and pass of `spec`."""
    problem = problem_of(load(ROOT / "specs" / f"{spec}.yaml"))
    files = {name: folder / spec / "triton.py" for name, folder in folders.items()}
    functions = {
        name: getattr(import_file(path, f"{name}_{spec}"), spec) for name, path in files.items()
    }
    for length, deterministic in SETTINGS:
        for name in ("forward", "backward"):
            if name not in problem.passes or (deterministic and name == "forward"):
                continue
            torch.use_deterministic_algorithms(deterministic)
            runs = {}
            for side, function in functions.items():
                workload = draw_workload(problem, BATCH, HEADS, length, "cuda")
                job = BenchJob(problem, {"triton": files[side]}, ("kgen",), Shape(), "cuda")
                attentions, failed = prepared(job, workload, {"kgen": function})
                found = contenders(name, workload, attentions, failed, "cuda")
                if failed:
                    raise RuntimeError(str(failed))
                runs[side] = found[0].run
            before, after = (flattened(runs[side]()) for side in runs)
            apart = ((before - after).norm() / before.norm()).item()
            times: dict[str, list[float]] = {side: [] for side in runs}
            for call in range(-2, CALLS):
                for side in sorted(runs, reverse=call % 2 == 0):
                    took = _once(runs[side], "cuda", flush)
                    if call >= 0:
                        times[side].append(took)
            medians = {side: statistics.median(took) for side, took in times.items()}
            yield {
                "spec": spec,
                "length": length,
                "deterministic": deterministic,
                "pass": name,
                **{f"{side}_ms": round(median, 5) for side, median in medians.items()},
                "ratio": round(medians["before"] / medians["after"], 4),
                "apart": float(f"{apart:.1e}"),
            }
            del runs, before, after
            torch.cuda.empty_cache()


def main() -> None:
    before, after, *specs = sys.argv[1:]
    flush = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    rows = []
    for spec in specs:
        for row in raced(spec, {"before": Path(before), "after": Path(after)}, flush):
            rows.append(row)
            print(*row.values(), flush=True)
    facts = describe("cuda")
    folder = ROOT / "benchmarks" / facts["device"].lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "texts.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
