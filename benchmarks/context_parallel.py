"""Compare attention over several GPUs with one.

Usage: `torchrun --nproc-per-node 2 benchmarks/context_parallel.py [RUN...]`.

The contenders of a run compute forward and backward:

- the emitted function on one GPU, for the whole sequence
- the emitted context parallel package on all GPUs
- for causal masks, PyTorch's context_parallel with scaled_dot_product_attention

All take turns in one process group, `--calls` times. Each turn makes several calls in a row, like
the layers of a model. A time is the time of one call on the slowest rank. The clock of a GPU with
little power budget varies by a fifth in the second after an idle phase. The GPUs are therefore kept
busy before a timing.

- `milliseconds`: calls after similar calls, as the CPUs launch them
- `graph`: calls captured in a CUDA graph
- `ahead`: calls that the CPUs launch while the GPUs are busy with another graph
- `alone`: a call for which the GPUs waited

The script prints medians, the distance of the gradients from one GPU, and the
bytes that ranks received. Efficiency is time on one / (ranks x time on ranks). It writes all to
`benchmarks/<device>/context_parallel.json`. `--device cpu` is a dry run of short sequences in
Triton's interpreter. `--plot FILE` draws an earlier result.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

HEADS = {"gpt_oss": 64}
"""Query heads by spec; 16 for all others."""
IN_A_ROW = 4
"""Least number of timed calls."""
ROW, SETTLED = 500, 2000
"""Milliseconds of timed calls, and milliseconds that the GPUs are busy before."""
AT_ONCE = 8
"""Calls that the CPUs launch in advance. More than a thousand kernels would not fit in a
stream's queue."""
OFF = 0.01
"""Largest relative distance of gradients from one GPU's. Both are bf16."""
WINDOW_4096 = """kernel: attention
name: window_4096
dtype: bf16
head_dim: 128
params: {window: 4096}
mask_mod: q_idx >= kv_idx and q_idx - kv_idx < window
"""
RUNS = {
    "causal-32k": ("causal", 32768),
    "causal-64k": ("causal", 65536),
    "full-32k": ("full", 32768),
    "full-64k": ("full", 65536),
    "documents-64k": ("document_causal", 65536),
    "window-128k": ("window_4096", 131072),
    "sliding-128k": ("sliding_window", 131072),
    "gemma2-64k": ("gemma2", 65536),
    "gpt_oss-128k": ("gpt_oss", 131072),
}
"""Spec and sequence length by run."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help=f"Runs. Default: all of {', '.join(RUNS)}."
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="Default: cuda.")
    parser.add_argument("--calls", type=int, default=10, help="Turns per contender. Default: 10.")
    parser.add_argument(
        "--trace", type=Path, metavar="FOLDER", help="Write a trace per rank to this folder."
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks",
        help="Folder of results. Default: benchmarks/.",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="Draw this context_parallel.json and exit."
    )
    options = parser.parse_args()
    if unknown := [name for name in options.runs if name not in RUNS]:
        parser.error(f"unknown run {', '.join(unknown)}")
    if options.plot:
        plot(options.plot)
        return
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import torch.distributed as dist

    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    adapters = shared_folder()
    sys.path[:0] = [str(ROOT / "generated"), str(adapters)]
    rows = []
    for name in options.runs or RUNS:
        spec, length = RUNS[name]
        rows.append(run(name, spec, length if options.device == "cuda" else 150, options, adapters))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
            if options.device == "cuda":
                write(rows, options.output)
        dist.barrier()
    dist.destroy_process_group()


def write(rows: list[dict[str, Any]], output: Path) -> None:
    """Write the rows. Rows of other runs are kept."""
    import torch

    device = torch.cuda.get_device_name()
    path = output / device.lower().replace(" ", "-") / "context_parallel.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    now = {(row["run"], row["ranks"]) for row in rows}
    versions = {"torch": torch.__version__, "triton": importlib.import_module("triton").__version__}
    kept = [row for row in before if (row["run"], row["ranks"]) not in now]
    found = {"device": device, "versions": versions, "rows": kept + rows}
    path.write_text(json.dumps(found, indent=1) + "\n")


def plot(path: Path) -> None:
    """Draw the speedup over one GPU by run, next to the JSON file."""
    from kgen.bench.plotting import bars, pyplot, save

    found = json.loads(path.read_text())
    rows = sorted(found["rows"], key=lambda row: [*RUNS].index(row["run"]))
    numbers = sorted({row["ranks"] for row in rows})
    names = {
        "kgen, CPUs ahead": ("ahead", "ranks"),
        "kgen, calls alone in a row": ("milliseconds", "ranks"),
        "kgen, CUDA graphs": ("graph", "ranks"),
        "PyTorch's context_parallel, in a row": ("milliseconds", "context_parallel"),
    }
    series = {
        f"{ranks} GPUs: {label}": {
            row["run"]: row[times]["one"] / row[times][name]
            for row in rows
            if row["ranks"] == ranks and name in row.get(times, ())
        }
        for ranks in numbers
        for label, (times, name) in names.items()
    }
    series = {name: heights for name, heights in series.items() if heights}
    groups = [*dict.fromkeys(row["run"] for row in rows)]
    figure, axis = pyplot().subplots(figsize=(10, 3.6) if len(numbers) == 1 else (14, 4.6))
    bars(axis, groups, series, "%.2f", rotation=90, padding=2)
    for ranks in numbers:
        axis.axhline(ranks, color="grey", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.set_ylabel("x one GPU")
    axis.set_title(f"Context parallel, forward and backward, on {found['device']}", fontsize=10)
    axis.legend(fontsize=8, frameon=False, loc="upper center", ncols=len(numbers))
    axis.set_ylim(0, numbers[-1] * 1.5)
    save(figure, path.with_suffix(".png"))


def shared_folder() -> Path:
    """Return a folder of this host, whose name rank 0 chooses."""
    import torch.distributed as dist

    name = [tempfile.mkdtemp(prefix="kgen-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, 0)
    return Path(str(name[0]))


def package(spec: str, adapters: Path) -> tuple[Any, Any, Any]:
    """Return the spec, its function for one GPU, and its context parallel package, which rank 0
    writes."""
    import torch.distributed as dist

    from kgen.kernels.attention.adapt.context_parallel import adapter
    from kgen.render.rendering import render_variants
    from kgen.spec.load import load_variants, loads_variants

    path = ROOT / "specs" / f"{spec}.yaml"
    variants = (
        load_variants(path) if path.exists() else loads_variants(WINDOW_4096, Path(f"{spec}.yaml"))
    )
    if dist.get_rank() == 0:
        for folder, files in {**adapter(variants).folders, **render_variants(variants)}.items():
            (adapters / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (adapters / folder / name).write_text(text)
    dist.barrier()
    importlib.invalidate_caches()
    one = (
        importlib.import_module(spec)
        if not path.exists()
        else importlib.import_module(f"generated.{spec}")
    )
    several = importlib.import_module(f"{spec}_context_parallel")
    return variants[0].spec, getattr(one, spec), several


def run(name: str, spec: str, length: int, options: Any, adapters: Path) -> dict[str, Any]:
    """Return the row of one run: milliseconds of each contender."""
    with ExitStack() as within:
        return _run(within, name, spec, length, options, adapters)


def _run(
    within: ExitStack, name: str, spec: str, length: int, options: Any, adapters: Path
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    model, function, several = package(spec, adapters)
    ranks, device = dist.get_world_size(), options.device
    heads = HEADS.get(spec, 16) if device == "cuda" else max(1, int(model.gqa))
    kv_heads = heads // (1 if model.gqa == "any" else int(model.gqa))
    torch.manual_seed(0)

    def drawn(number: int, columns: int) -> torch.Tensor:
        return torch.randn(1, number, length, columns, device=device, dtype=torch.bfloat16)

    q, k = drawn(heads, model.head_dim.qk), drawn(kv_heads, model.head_dim.qk)
    v, dout = drawn(kv_heads, model.head_dim.v), drawn(heads, model.head_dim.v)
    given: dict[str, Any] = {"sinks": torch.zeros(heads, device=device)} if model.sinks else {}
    if spec == "document_causal":
        given["doc"] = torch.arange(length, dtype=torch.int32, device=device) // (length // 8)
    plan = getattr(several, f"{spec}_plan")(
        length, **{n: x for n, x in given.items() if n == "doc"}
    )
    parts = [plan.shard(x, dim=2).contiguous() for x in (q, k, v)]
    dparts = plan.shard(dout, dim=2).contiguous()

    def both(
        call: Callable[..., Any], tensors: list[Any], gradient: Any, **more: Any
    ) -> Callable[[], Any]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        return lambda: torch.autograd.grad(call(*leaves, **given, **more), leaves, gradient)

    contenders = {
        "one": both(function, [q, k, v], dout),
        "ranks": both(getattr(several, spec), parts, dparts, plan=plan),
    }
    if spec == "causal" and device == "cuda":
        mesh = init_device_mesh(device, (ranks,))
        local = [x.clone() for x in (q, k, v, dout)]

        def torch_own() -> Any:
            leaves = [x.detach().requires_grad_() for x in local[:3]]
            return torch.autograd.grad(
                F.scaled_dot_product_attention(*leaves, is_causal=True), leaves, local[3]
            )

        # PyTorch distributes the calls of scaled_dot_product_attention inside this context.
        within.enter_context(
            context_parallel(
                mesh, buffers=local, buffer_seq_dims=[2] * 4, no_restore_buffers={*local}
            )
        )
        contenders["context_parallel"] = torch_own
    failed = {}
    for contender in [*contenders][2:]:
        try:
            contenders[contender]()
        # PyTorch's own refuses some versions and backends, on all ranks alike
        except Exception as error:
            failed[contender] = f"{type(error).__name__}: {error}"[:300]
            del contenders[contender]
    one, over_ranks = contenders["one"](), contenders["ranks"]()
    off = {
        name: _off(got, plan.shard(want, dim=2))
        for name, got, want in zip(("dq", "dk", "dv"), over_ranks, one, strict=True)
    }
    assert max(off.values()) < OFF, off
    del one
    graphs = {}
    if device == "cuda":
        graphs = {n: Captured(contenders[n]) for n in ("one", "ranks")}
        graphs["ranks"]()
        again = max(map(_off, graphs["ranks"].result, over_ranks))
        assert again < OFF, again
    del over_ranks
    replayed: dict[str, list[float]] = {n: [] for n in graphs}
    times: dict[str, list[float]] = {n: [] for n in contenders}
    alone: dict[str, list[float]] = {n: [] for n in contenders}
    ahead: dict[str, list[float]] = {n: [] for n in contenders}
    for contender, call in contenders.items():
        alone[contender] += (
            [timed_alone(call, device) for _ in range(5)][2:] if device == "cuda" else []
        )
    for turn in range(options.calls if device == "cuda" else 1):
        for contender in [*contenders][turn % 2 :] + [*contenders][: turn % 2]:
            call = contenders[contender]
            if device == "cpu":
                times[contender].append(timed_alone(call, device))
                alone[contender] += times[contender]
                continue
            took = statistics.median(alone[contender])
            times[contender].append(timed(call, call, took, took))
            busy, one = graphs["one"], statistics.median(alone["one"])
            ahead[contender].append(timed(call, busy, took, one, AT_ONCE))
            if contender in graphs:
                replayed[contender].append(timed(graphs[contender], graphs[contender], took, took))
    for graph in graphs.values():
        graph.end()
    if options.trace:
        traced(contenders["ranks"], options.trace / f"{name}-of-{ranks}-{dist.get_rank()}.json.gz")
    medians = {n: statistics.median(t) for n, t in times.items()}
    launched = {n: statistics.median(t) for n, t in ahead.items() if t}
    head = (model.head_dim.qk + model.head_dim.v) * 2
    return {
        "run": name,
        "ranks": ranks,
        "length": length,
        "heads": [heads, kv_heads],
        "sharding": plan.sharding,
        **({"busy_before": SETTLED} if device == "cuda" else {}),
        "milliseconds": {n: round(t, 4) for n, t in medians.items()},
        "alone": {n: round(statistics.median(t), 4) for n, t in alone.items()},
        **({"failed": failed} if failed else {}),
        "ahead": {n: round(t, 4) for n, t in launched.items() if t < math.inf},
        "graph": {n: round(statistics.median(t), 4) for n, t in replayed.items()},
        "off": {n: float(f"{x:.2g}") for n, x in off.items()},
        "efficiency": round(medians["one"] / (ranks * medians["ranks"]), 4),
        "bytes_received": [plan.plan.received(rank) * head * kv_heads for rank in range(ranks)],
        "work": list(plan.work),
    }


def _off(got: Any, want: Any) -> float:
    """Return the relative distance of two tensors, the maximum over all ranks."""
    import torch.distributed as dist

    found = (got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


class Captured:
    """A call in a CUDA graph; calling the object replays it.

    NCCL cannot end a group that a graph uses. `end` releases the graph.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        import torch

        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # NCCL's threads query events during the capture.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = call()

    def __call__(self) -> None:
        self.graph.replay()

    def end(self) -> None:
        self.graph.reset()
        del self.result


def traced(call: Callable[[], Any], path: Path) -> None:
    """Write a trace of three consecutive calls on this rank, for Perfetto or chrome://tracing."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profile:
        for _ in range(3):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def timed_alone(call: Callable[[], Any], device: str) -> float:
    """Return the milliseconds of one call on idle GPUs, until the last rank is done."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor([1000 * (time.perf_counter() - begin)], device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def timed(
    call: Callable[[], Any],
    before: Callable[[], Any],
    took: float,
    before_took: float,
    at_once: int = 0,
) -> float:
    """Return the milliseconds per call, on the slowest rank, of several calls in a row.

    `before` keeps the GPUs busy first. `took` and `before_took` are the approximate milliseconds of
    both. With `at_once`, that number of calls is launched while the GPUs are still busy with
    `before`. The result is infinity if they were not.
    """
    import torch
    import torch.distributed as dist

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = at_once or max(IN_A_ROW, math.ceil(ROW / took))
    dist.barrier()
    torch.cuda.synchronize()
    for _ in range(math.ceil(SETTLED / before_took)):
        before()
    if at_once:
        dist.all_reduce(torch.zeros(1, device="cuda"))  # ranks begin together
    begin.record()
    for _ in range(times):
        call()
    end.record()
    launched = not begin.query() or not at_once
    torch.cuda.synchronize()
    found = torch.tensor([begin.elapsed_time(end) / times if launched else math.inf], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    main()
