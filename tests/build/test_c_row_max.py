"""The largest score of each row in C: Triton's interpreter runs the launches of a package."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import torch
from support.interpreters.own_process import interpreted
from support.packages.c_calls import Case, attention_tensors
from support.packages.c_on_paper import Library, Paper, packages_of

from kgen.spec.load import load

INVALID = 1
PEAKS = """kernel: attention
name: peaks
dtype: fp16
head_dim: 32
gqa: 2
mask_mod: q_idx >= kv_idx
row_max: true
passes: [forward, decode]
"""


def test_largest_scores_in_c(tmp_path: Path) -> None:
    """Check whole rows, splits of the keys, calls without the result, and a wrong tensor."""
    for name, error in interpreted(_errors, packages_of({"peaks": PEAKS}, tmp_path)).items():
        assert error < 4e-3, name


def _errors(folder: Path) -> dict[str, float]:
    from kgen.build.runtime import triton as runtime
    from kgen.verify import interpreter

    interpreter.mend()
    torch.set_num_threads(1)
    source = runtime.Package("peaks_numbers", folder / "peaks").source("triton")
    dtypes = {name: dtype for dtype, name in runtime.DTYPES.items()}
    memory: dict[int, int] = {}

    def view(address: int, kind: str) -> torch.Tensor:
        end = next(e for b, e in memory.items() if b <= address < e)
        count = (end - address) // dtypes[kind[1:]].itemsize
        raw = (ctypes.c_char * (count * dtypes[kind[1:]].itemsize)).from_address(address)
        return torch.frombuffer(raw, dtype=dtypes[kind[1:]])

    def run(row: Any, programs: int, raw: dict[str, int]) -> None:
        if library.workspace.numel():
            begin = library.workspace.data_ptr()
            memory[begin] = begin + library.workspace.numel()
        given = {n: value if kind == "constexpr" else raw[n] for n, kind, value in row["arguments"]}
        pointers = [(n, kind) for n, kind, _ in row["arguments"] if kind.startswith("*")]
        getattr(source, row["kernel"])[(programs,)](
            **given | {n: view(given[n], kind) for n, kind in pointers}
        )

    paper, library = Paper(folder / "peaks", run), Library(folder / "peaks", "peaks")
    paper.device(80, 4)
    found: dict[str, float] = {}
    for name, queries, keys in (("whole", 70, 90), ("splits", 3, 300)):
        given = _drawn(folder, queries, keys)
        for x in given.values():
            if isinstance(x, torch.Tensor):
                begin = x.untyped_storage().data_ptr()
                memory[begin] = begin + x.untyped_storage().nbytes()
        paper.begin({})
        assert library.call("forward", given) == 0, library.error()
        kernels = {one["kernel"] for one in paper.launched}
        assert kernels == (
            {"_decode_kernel", "_combine_kernel"} if name == "splits" else {"_forward_kernel"}
        )
        found[f"row_max, {name}"] = _apart(given)
        out = given["out"].clone()
        without = {**given, "row_max": None, "lse": None}
        given["out"].fill_(7.0)
        assert library.call("forward", without) == 0, library.error()
        found[f"out, {name}"] = float((given["out"] - out).abs().max())
        room, fewer = torch.zeros(1 << 20, dtype=torch.uint8), given["row_max"][..., 1:]
        assert library.call("forward", {**given, "row_max": fewer}, room) == INVALID
        assert "row_max must be" in library.error()
    return found


def _drawn(folder: Path, queries: int, keys: int) -> dict[str, Any]:
    """Return arguments of C with random values, and garbage in the results."""
    case = Case(batch=1, heads=2, sq=queries, sk=keys)
    given = attention_tensors(load(folder / "peaks.yaml"), case)
    torch.manual_seed(0)
    found = {name: given[name].copy_(torch.randn(given[name].shape)) for name in "qkv"}
    rows = found["q"].shape[:-1]
    results = {name: torch.full(rows, 7.0) for name in ("lse", "row_max")}
    return {**found, **results, "out": torch.full_like(found["q"], 7.0), "scale": 0.3}


def _apart(given: dict[str, Any]) -> float:
    """Return the largest error of the results in base 2."""
    q, k = given["q"].double(), given["k"].double().repeat_interleave(2, 1)
    scores = 0.3 * q @ k.mT
    first = k.shape[2] - q.shape[2]
    hidden = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + first
    scores = scores.masked_fill(hidden, -torch.inf)
    wanted = scores.amax(-1) / math.log(2), scores.logsumexp(-1) / math.log(2)
    pairs = zip((given["row_max"], given["lse"]), wanted, strict=True)
    return max(float((got - want).where(want > -torch.inf, 0.0).abs().max()) for got, want in pairs)
