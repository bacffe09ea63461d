"""Time the first call in a fresh process with empty compiler caches.

Each peer is a script that a user would write, and imports nothing of kgen. The time is of the whole
process, inputs included. The peer `torch` only imports torch and creates the inputs. It is the
floor.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kgen.bench.timing import BenchJob
from kgen.expr.nodes import variables
from kgen.kernels.attention.bench.source import modification_source
from kgen.kernels.attention.bench.workload import Workload

ROUNDS = 3
_HEAD = """\
import sys
import torch

buffers, runtime, sizes, dtype, device = torch.load(sys.argv[1])
q, k, v = (torch.randn(size, dtype=dtype, device=device) for size in sizes)
buffers = {name: value.to(device) for name, value in buffers.items()}
"""
_KGEN = """
import importlib
from pathlib import Path

folder = Path(sys.argv[2]).parent
sys.path.insert(0, str(folder.parent))
module = importlib.import_module(folder.name + ".triton")
out = module.{name}(q, k, v, **buffers, **runtime)
"""
_FLEX = """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

globals().update(buffers)
{score_mod}
{mask_mod}
block_mask = {block_mask}
out = torch.compile(flex_attention, dynamic=False)(q, k, v, {keywords}block_mask=block_mask)
"""
_TAIL = "print(float(out.float().abs().sum()))\n"


def first_calls(job: BenchJob, workload: Workload) -> Iterator[dict[str, Any]]:
    """Yield rows of the pass `first call`: forward, medians of `ROUNDS` processes."""
    scripts = {
        "kgen": _HEAD + _KGEN.format(name=workload.problem.name) + _TAIL,
        "flex": flex_script(workload),
        "torch": f"{_HEAD}out = q\n{_TAIL}",
    }
    peers = {*job.peers, "torch"}
    with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
        data = Path(folder) / "inputs.pt"
        sizes = [tuple(x.shape) for x in (workload.q, workload.k, workload.v)]
        buffers = {name: value.cpu() for name, value in workload.buffers.items()}
        torch.save((buffers, workload.runtime, sizes, workload.q.dtype, job.device), data)
        rounds: dict[str, list[float]] = {name: [] for name in scripts if name in peers}
        errors: dict[str, str] = {}
        for _ in range(ROUNDS if job.device == "cuda" else 1):
            for name, samples in rounds.items():
                if name not in errors:
                    seconds, error = _fresh(scripts[name], [str(data), str(job.files["triton"])])
                    samples.append(seconds)
                    errors |= {name: error} if error else {}
    own = sorted(rounds["kgen"])[len(rounds["kgen"]) // 2]
    for name, samples in rounds.items():
        samples.sort()
        middle = samples[len(samples) // 2]
        row: dict[str, Any] = {"pass": "first call", "peer": name, "error": errors.get(name)}
        if name not in errors:
            row |= {"milliseconds": round(1e3 * middle, 1), "ratio": round(middle / own, 4)}
            row |= {
                "quartiles": [round(1e3 * x, 1) for x in (samples[0], samples[-1])],
                "rounds": len(samples),
            }
        yield row


def flex_script(workload: Workload) -> str:
    """Return the script of a FlexAttention user for a workload."""
    problem, size = workload.problem, workload.sizes
    score_mod = mask_mod = keywords = ""
    block_mask = "None"
    if problem.score_mod is not None:
        score_mod = modification_source(problem.score_mod, workload, "score_mod", score=True)
        keywords = "score_mod=score_mod, "
    if workload.group > 1:
        keywords += "enable_gqa=True, "
    if problem.mask_mod is not None:
        mask_mod = modification_source(problem.mask_mod, workload, "mask_mod", score=False)
        used = variables(problem.mask_mod)
        shape = [size[name] if index in used else None for index, name in (("b", "B"), ("h", "HQ"))]
        shape += [size["SQ"], size["SK"]]
        block_mask = f"create_block_mask(mask_mod, {', '.join(map(str, shape))}, device=device)"
    body = _FLEX.format(
        score_mod=score_mod, mask_mod=mask_mod, block_mask=block_mask, keywords=keywords
    )
    return _HEAD + body + _TAIL


def _fresh(script: str, arguments: list[str]) -> tuple[float, str | None]:
    """Run a script with empty caches. Return its seconds, and its error if it failed."""
    with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
        path = Path(folder) / "first_call.py"
        path.write_text(script)
        caches = {
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        environment: Mapping[str, str] = {**os.environ, **caches}
        began = time.perf_counter()
        command = [sys.executable, str(path), *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=folder, check=False
        )
        seconds = time.perf_counter() - began
    return seconds, done.stderr.strip()[-300:] or "failed" if done.returncode else None
