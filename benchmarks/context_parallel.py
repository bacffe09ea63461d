"""Attention over several GPUs against one: `torchrun --nproc-per-node 2 benchmarks/context_parallel.py [RUN...]`.

Of each run, forward and backward together: on one GPU the emitted function for the whole sequence, over all of them
the emitted package for context parallel, and for causal masks PyTorch's own context_parallel with
scaled_dot_product_attention. All take turns in one process group, as often as `--calls` says, each with several calls
in a row, as layers of a model follow each other; a time is that of one of them, the longest of all ranks. Clocks of a
GPU that is short of power swing by a fifth in the second after it was idle, so none is idle ahead of what is timed:
`milliseconds` are of calls behind others like them, as the CPUs launch them, `graph` of calls that were captured in a
CUDA graph, behind others, `ahead` of calls that the CPUs have launched while the GPUs were busy with one GPU's graph,
as in a model whose other layers keep them busy. `alone` are times of a call that the GPUs had to wait for. Prints
medians, efficiency (time on one / ranks x time over ranks), how far gradients over ranks are from those of one GPU, and
the bytes that ranks took of each other; writes it to `benchmarks/<device>/context_parallel.json`.
`--device cpu` is a dry run of short sequences in Triton's interpreter. `--plot FILE` draws what was measured before.
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
"""By spec, where they are not 16."""
IN_A_ROW = 4
"""Calls that are timed, at least."""
ROW, SETTLED = 500, 2000
"""Milliseconds that calls in a row are timed for, and that GPUs are busy before."""
AT_ONCE = 8
"""Calls that CPUs launch ahead: more than a thousand kernels would have to wait for room in a stream."""
OFF = 0.01
"""Of gradients over ranks from those of one GPU, as a share of these: both are bf16."""
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
"""By name: a spec, and the length of its sequences."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument(
        "--trace", type=Path, metavar="FOLDER", help="Where traces of calls are put, by rank."
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="A context_parallel.json: draw it, run nothing."
    )
    options = parser.parse_args()
    if unknown := [name for name in options.runs if name not in RUNS]:
        parser.error(f"no such run: {', '.join(unknown)}")
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
    """Rows of runs that were not made now stay as they are."""
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
    """How many times as fast as one GPU ranks are, by run, beside the figures."""
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
    """A folder of this host, whose name the first rank chooses."""
    import torch.distributed as dist

    name = [tempfile.mkdtemp(prefix="kgen-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, 0)
    return Path(str(name[0]))


def package(spec: str, adapters: Path) -> tuple[Any, Any, Any]:
    """The spec, its function for one GPU, and its package for several, which the first rank writes."""
    import torch.distributed as dist

    from kgen.kernels.attention.adapt.context_parallel import adapter
    from kgen.render.rendering import render_variants
    from kgen.spec.load import load_variants, loads_variants

    path = ROOT / "specs" / f"{spec}.yaml"
    variants = load_variants(path) if path.exists() else loads_variants(WINDOW_4096, Path(f"{spec}.yaml"))
    if dist.get_rank() == 0:
        for folder, files in {**adapter(variants).folders, **render_variants(variants)}.items():
            (adapters / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (adapters / folder / name).write_text(text)
    dist.barrier()
    importlib.invalidate_caches()
    one = importlib.import_module(spec) if not path.exists() else importlib.import_module(f"generated.{spec}")
    several = importlib.import_module(f"{spec}_context_parallel")
    return variants[0].spec, getattr(one, spec), several


def run(name: str, spec: str, length: int, options: Any, adapters: Path) -> dict[str, Any]:
    """One run: milliseconds of each contender."""
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
    plan = getattr(several, f"{spec}_plan")(length, **{n: x for n, x in given.items() if n == "doc"})
    parts = [plan.shard(x, dim=2).contiguous() for x in (q, k, v)]
    dparts = plan.shard(dout, dim=2).contiguous()

    def both(call: Callable[..., Any], tensors: list[Any], gradient: Any, **more: Any) -> Callable[[], Any]:
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

        # Whatever calls scaled_dot_product_attention within is what PyTorch spreads over the ranks.
        within.enter_context(
            context_parallel(mesh, buffers=local, buffer_seq_dims=[2] * 4, no_restore_buffers={*local})
        )
        contenders["context_parallel"] = torch_own
    failed = {}
    for contender in [*contenders][2:]:
        try:
            contenders[contender]()
        except Exception as error:  # PyTorch's, which refuses some versions and backends on all ranks alike
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
        alone[contender] += [timed_alone(call, device) for _ in range(5)][2:] if device == "cuda" else []
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
    """How far a tensor is from another, by the norm of that; of all ranks the farthest."""
    import torch.distributed as dist

    found = (got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


class Captured:
    """A call in a CUDA graph: calling it replays that. NCCL ends no group that a graph is of: `end` lets go of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        import torch

        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Threads of NCCL look at events meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = call()

    def __call__(self) -> None:
        self.graph.replay()

    def end(self) -> None:
        self.graph.reset()
        del self.result


def traced(call: Callable[[], Any], path: Path) -> None:
    """What a rank and its GPU do in three calls that follow each other, for Perfetto or chrome://tracing."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profile:
        for _ in range(3):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def timed_alone(call: Callable[[], Any], device: str) -> float:
    """Milliseconds of a call that nothing is ahead of, until the last rank is done."""
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
    call: Callable[[], Any], before: Callable[[], Any], took: float, before_took: float, at_once: int = 0
) -> float:
    """Milliseconds of a call, of several in a row, of the last rank, behind calls `before` that keep GPUs busy.

    They take about so many milliseconds each. With `at_once` there are so many calls, all launched while GPUs are
    still busy with those before: infinity where they were not.
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
        dist.all_reduce(torch.zeros(1, device="cuda"))  # so that ranks begin together
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
