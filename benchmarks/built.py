"""Compare packages of machine code with their source files.

Usage: `python benchmarks/built.py BUILT SPEC...`.

BUILT is a folder of packages of `kgen build`. The script measures:

- First calls in a fresh process, forward and with backward. The contenders are the package (without
  Triton), the emitted file and FlexAttention. The time of a process that only imports torch and
  creates the inputs is subtracted. First spec only.
- Later calls on the GPU: package and file in turns, L2 flushed, for each file of the package.
- CPU time of a call on inputs so small that the GPU waits. An operator that launches nothing and
  PyTorch's own attention are measured too, and calls with gradients also without autograd's
  threads. Attention only.

Writes `benchmarks/<device>/built.json`. `--only` keeps the other results of this file.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kgen.bench.timing import BenchJob  # noqa: E402
from kgen.family import family  # noqa: E402
from kgen.kernels.attention.bench.first_call import _HEAD, _TAIL, _fresh, flex_script  # noqa: E402
from kgen.kernels.attention.bench.workload import draw_workload  # noqa: E402
from kgen.spec.load import load  # noqa: E402
from kgen.verify.families import problem_of  # noqa: E402
from kgen.verify.packages import manifest_of  # noqa: E402
from kgen.verify.toolchain import describe, import_file, versions  # noqa: E402

CALLS, QUICK = 24, 300
SHAPES = {"attention": "2x16x8192", "norm": "32768x4096", "chunk_output": "32768"}
"""Size of later calls by family, as in `kgen bench --shape`."""
_LIBRARY = torch.library.Library("kgen_bare", "FRAGMENT")
_NEEDS = "q, k, v = (x.requires_grad_() for x in (q, k, v))\n"
_BLOCKED = 'sys.modules["triton"] = None\n'
_BUILT = """
import os
sys.path.insert(0, os.path.dirname(sys.argv[2]))
module = __import__(os.path.basename(sys.argv[2]))
out = module.{name}(q, k, v, **buffers, **runtime)
"""
_ENDS = {
    "forward": _TAIL,
    "forward and backward": (
        "out.backward(torch.ones_like(out))\nprint(float(q.grad.float().abs().sum()))\n"
    ),
}


def first_calls(
    spec: str, problem: Any, package: Path, file: Path, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield the seconds of first calls, minus a process that makes none."""
    workload = draw_workload(problem, 2, 16, 8192, "cuda")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "inputs.pt"
        sizes = [tuple(x.shape) for x in (workload.q, workload.k, workload.v)]
        buffers = {name: value.cpu() for name, value in workload.buffers.items()}
        torch.save((buffers, workload.runtime, sizes, workload.q.dtype, "cuda"), data)
        for what, end in _ENDS.items():
            calls = {
                "torch": (f"{_HEAD}\nout = q * 2\n", file),
                "built": (
                    _HEAD.replace("import torch", _BLOCKED + "import torch") + _BUILT,
                    package,
                ),
                "source": (_HEAD + _BUILT, file.parent),
                "flex": (flex_script(workload).removesuffix(_TAIL), file),
            }
            scripts = {}
            for name, (call, path) in calls.items():
                if "backward" in what:
                    call = call.replace("\nout = ", f"\n{_NEEDS}out = ")
                scripts[name] = (call.replace("{name}", problem.name) + end, path)
            times: dict[str, list[float]] = {name: [] for name in scripts}
            for _ in range(rounds):
                for name, (script, path) in scripts.items():
                    seconds, error = _fresh(script, [str(data), str(path)])
                    if error:
                        raise RuntimeError(f"{name}: {error}")
                    times[name].append(seconds)
            medians = {name: statistics.median(took) for name, took in times.items()}
            rest = {
                f"{name}_s": round(t - medians["torch"], 3)
                for name, t in medians.items()
                if name != "torch"
            }
            yield {
                "spec": spec,
                "what": "first call",
                "pass": what,
                "processes": rounds,
                "torch_s": round(medians["torch"], 3),
                **rest,
            }


def steady(
    spec: str, problem: Any, package: Path, targets: Sequence[str] | None
) -> Iterator[dict[str, Any]]:
    """Yield the GPU milliseconds of each file of a package, package and source in turns.

    `targets` restrict the files.
    """
    bench = family(problem.kernel).bench
    assert bench is not None, "all families have one"
    shape = bench.shape.get().Shape.parse(SHAPES[problem.kernel])
    manifest = manifest_of(package.parent, spec)
    stems = (Path(name).stem for name in {*manifest["sources"]} & {*manifest["compiled"]})
    for stem in sorted(
        stem for stem in stems if targets is None or stem.partition("_")[0] in targets
    ):
        places = {"source": ROOT / "generated" / spec, "built": package}
        modules = {
            side: import_file(place / f"{stem}.py", f"{side}_{spec}_{stem}")
            for side, place in places.items()
        }
        # a file with one kernel, which other files launch
        if not hasattr(modules["source"], problem.name):
            continue
        functions = {side: getattr(module, problem.name) for side, module in modules.items()}
        job = BenchJob(problem, {}, tuple(functions), shape, "cuda", rounds=CALLS)
        found: dict[str, dict[str, float]] = {}
        for row in bench.race(job, functions):
            if row.get("error"):
                raise RuntimeError(f"{spec}, {stem}, {row['pass']}, {row['peer']}: {row['error']}")
            if "peer" in row:
                found.setdefault(row["pass"], {})[row["peer"]] = row["milliseconds"]
        for name, medians in found.items():
            if not {*functions} <= {*medians}:  # a row of the race without an emitted function
                continue
            yield {
                "spec": spec,
                "file": f"{stem}.py",
                "what": "later calls",
                "pass": name,
                "shape": SHAPES[problem.kernel],
                **{f"{side}_ms": medians[side] for side in functions},
                "ratio": round(medians["built"] / medians["source"], 4),
            }


@functools.cache
def bare_operator() -> Callable[..., Any]:
    """Return an operator that allocates the outputs and launches nothing: the floor of CPU time.

    It is registered like the operators of emitted files.
    """
    operators = {}
    for name, returned, made in (
        ("out", "Tensor", lambda q, k, v: torch.empty_like(q)),
        (
            "out_and_lse",
            "(Tensor, Tensor)",
            lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[:-1])),
        ),
        (
            "backward",
            "(Tensor, Tensor, Tensor)",
            lambda q, k, v: tuple(map(torch.empty_like, (q, k, v))),
        ),
    ):
        _LIBRARY.define(f"{name}(Tensor q, Tensor k, Tensor v) -> {returned}")
        _LIBRARY.impl(name, made, "CompositeExplicitAutograd")
        operators[name] = getattr(torch.ops.kgen_bare, name).default

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output)

    def backward(ctx: Any, *gradients: Any) -> Any:
        return operators["backward"](*ctx.saved_tensors[:3])

    torch.library.register_autograd(
        operators["out_and_lse"], backward, setup_context=save, lib=_LIBRARY
    )

    def bare(q: Any, k: Any, v: Any, **_: Any) -> Any:
        if torch.is_grad_enabled() and q.requires_grad:
            return operators["out_and_lse"](q, k, v)[0]
        return operators["out"](q, k, v)

    return bare


def on_the_cpu(spec: str, problem: Any, functions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the microseconds until a call returns, with 128 tokens and one KV head."""
    w = draw_workload(problem, 1, problem.gqa if isinstance(problem.gqa, int) else 1, 128, "cuda")
    dout = torch.randn_like(w.q)
    q, k, v = (x.detach().clone().requires_grad_() for x in (w.q, w.k, w.v))

    def forward(function: Any) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                return function(q, k, v, **w.buffers, **w.runtime)

        return run

    def both(function: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(
            function(q, k, v, **w.buffers, **w.runtime), (q, k, v), dout
        )

    def kept(function: Any) -> Callable[[], Any]:
        return lambda: function(q, k, v, **w.buffers, **w.runtime)

    def on_one_thread(function: Any) -> Callable[[], Any]:
        call = both(function)

        def run() -> Any:
            with torch.autograd.set_multithreading_enabled(False):
                return call()

        return run

    def torch_own(q: Any, k: Any, v: Any, **_: Any) -> Any:
        grouped = q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped
        )

    with_gradients = {
        "forward, with gradients wanted": kept,
        "forward and backward": both,
        "forward and backward, one thread": on_one_thread,
    }
    passes = {"forward": forward, **(with_gradients if "backward" in problem.passes else {})}
    for what, made in passes.items():
        sides = {
            **functions,
            "operator": bare_operator(),
            "scaled_dot_product_attention": torch_own,
        }
        samples: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(-1, 15):
            for side, function in sides.items():
                run = made(function)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(QUICK):
                    run()
                if turn >= 0:
                    samples[side].append(1e6 * (time.perf_counter() - begin) / QUICK)
        yield {
            "spec": spec,
            "what": "CPU",
            "pass": what,
            **{f"{side}_us": round(statistics.median(took), 1) for side, took in samples.items()},
            "least_us": {side: round(min(took), 1) for side, took in samples.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "built", type=Path, metavar="BUILT", help="Folder of packages of `kgen build`."
    )
    parser.add_argument("specs", nargs="+", metavar="SPEC", help="Names of stock specs.")
    parser.add_argument(
        "--only", choices=("first call", "later calls", "CPU"), help="Measure only this."
    )
    parser.add_argument(
        "--target", action="append", help="Restrict later calls to this target. Repeatable."
    )
    parser.add_argument("--rounds", type=int, default=3, help="Number of processes per first call.")
    asked = parser.parse_args()
    facts: dict[str, Any] = {**describe("cuda"), "versions": versions()}
    rows: list[dict[str, Any]] = []
    folder = ROOT / "benchmarks" / facts["device"].lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    file_of_rows = folder / "built.json"
    if asked.only and file_of_rows.exists():
        rows += [
            row for row in json.loads(file_of_rows.read_text())["rows"] if row["what"] != asked.only
        ]
    for number, spec in enumerate(asked.specs):
        problem = problem_of(load(ROOT / "specs" / f"{spec}.yaml"))
        file, package = ROOT / "generated" / spec / "triton.py", asked.built.resolve() / spec
        parts = {"later calls": steady(spec, problem, package, asked.target)}
        if problem.kernel == "attention":
            functions = {
                "source": getattr(import_file(file, f"source_{spec}"), problem.name),
                "built": getattr(
                    import_file(package / "__init__.py", f"built_{spec}"), problem.name
                ),
            }
            parts["CPU"] = on_the_cpu(spec, problem, functions)
            if number == 0:
                parts["first call"] = first_calls(spec, problem, package, file, asked.rounds)
        for part in [parts.get(asked.only, ())] if asked.only else parts.values():
            for row in part:
                rows.append(row)
                print(json.dumps(row), flush=True)
        file_of_rows.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
