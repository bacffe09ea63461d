"""Random calls of drawn expressions: sizes, params, buffers, and the points at which forms are
compared.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuzzing.expressions import PARAMS, WHOLE
from kgen.kernels.attention.spec import KV_LENS, AttentionSpec

LENGTHS = (1, 1, 2, 3, 7, 16, 33, 64, 65, 100, 130)
FACTS = 12
"""Positions per side. All pairs of them are compared."""
NEAR = 160
"""Pairs whose distance is close to a constant of the text, and as many random pairs."""
SCALE = 0.125
LOG2E = float(np.log2(np.e))


@dataclass(frozen=True)
class Call:
    """Values of the names of a spec in one call: scalars, and buffers as arrays."""

    scalars: Mapping[str, Any]
    buffers: Mapping[str, Any]
    narrow: frozenset[str]
    """Buffers of 32-bit integers."""
    ends: Any
    """Number of keys of each sequence."""

    def at(self, points: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all names at some points."""
        return {**self.scalars, **self.buffers, **points}


def drawn_call(spec: AttentionSpec, rng: random.Random, tied: bool) -> Call:
    """Draw a call: lengths, elements and run-time params. `tied` means as many queries as keys."""
    sizes = {"B": rng.choice((1, 2, 3)), "HKV": rng.choice((1, 1, 2))}
    sizes["HQ"] = sizes["HKV"] * (rng.choice((1, 2, 3)) if spec.gqa == "any" else spec.gqa)
    sizes |= {"SQ": rng.choice(LENGTHS), "SK": rng.choice(LENGTHS)}
    if tied or rng.random() < 0.4:
        sizes["SK"] = sizes["SQ"]
    params = {
        n: p.value if p.value is not None else rng.choice(PARAMS[n]) for n, p in spec.params.items()
    }
    scalars = {n: np.int64(v) for n, v in sizes.items()}
    scalars |= {n: np.int64(v) if n in WHOLE else np.float64(v) for n, v in params.items()}
    buffers = {}
    for name, buffer in spec.buffers.items():
        shape = [sizes.get(size, size) for size in buffer.shape]
        buffers[name] = _elements(
            np.random.default_rng(rng.getrandbits(32)), buffer, shape, sizes["SK"]
        )
    lens = [rng.choice((0, 1, sizes["SK"] // 2, sizes["SK"])) for _ in range(sizes["B"])]
    ends = np.array(lens if spec.per_batch else [sizes["SK"]] * sizes["B"], np.int64)
    if spec.per_batch:
        buffers[KV_LENS] = ends
    wide = {name for name, buffer in spec.buffers.items() if buffer.dtype == "int64"}
    return Call(scalars, buffers, frozenset(buffers) - wide, ends)


def _elements(make: np.random.Generator, buffer: Any, shape: list[int], sk: int) -> Any:
    if buffer.dtype == "bool":
        return make.random(shape) < 0.5
    if buffer.dtype == "fp32":
        # Multiples of 1/8, so that sums and products of a few are exact.
        found = make.integers(-24, 25, shape) / 8
        return np.where(make.random(shape) < 0.15, 0.0, found)
    edges = np.array([-1, 0, 0, 1, 2, 3, sk // 2, sk - 1, sk, sk + 1, 64])
    found = make.choice(edges, shape)
    if buffer.dtype == "int64" and make.random() < 0.3:
        found = found * 2**33
    return np.sort(found, axis=-1) if buffer.sorted else found


def points(
    call: Call, spec: AttentionSpec, texts: Iterable[str], rng: random.Random
) -> dict[str, Any]:
    """Draw pairs of positions near the ends and near the constants of some texts.

    Each pair has a batch, a head, a score and the first row of its tile. `row` counts queries from
    zero, whatever the origin of `q_idx`.
    """
    make = np.random.default_rng(rng.getrandbits(32))
    sizes = {name: int(call.scalars[name]) for name in ("B", "HQ", "SQ", "SK")}
    numbers = {int(n) for text in texts for n in re.findall(r"(?<![\w.])\d+(?![\w.])", text)}
    numbers |= {int(v) for n, v in call.scalars.items() if n in WHOLE}
    edges = sorted(
        {n + d for n in numbers if n < 2**20 for d in (-1, 0, 1)} | {0, 1, sizes["SQ"], sizes["SK"]}
    )
    rows, keys = (_positions(make, edges, sizes[size]) for size in ("SQ", "SK"))
    pairs = [np.repeat(rows, len(keys)), np.tile(keys, len(rows))]
    near_rows = make.integers(0, sizes["SQ"], 2 * NEAR)
    apart = make.choice(np.array([*edges, *(-e for e in edges)]), NEAR)
    near_keys = np.concatenate([near_rows[:NEAR] + apart, make.integers(0, sizes["SK"], NEAR)])
    inside = (near_keys >= 0) & (near_keys < sizes["SK"])
    row = np.concatenate([pairs[0], near_rows[inside]]).astype(np.int64)
    kv = np.concatenate([pairs[1], near_keys[inside]]).astype(np.int64)
    b, h = (make.integers(0, sizes[size], len(row)) for size in ("B", "HQ"))
    scores = np.where(make.random(len(row)) < 0.1, 0.0, make.integers(-800, 801, len(row)) / 16)
    shift = call.ends[b] - sizes["SQ"] if spec.aligned_to_end else 0
    tile = make.choice(np.array([1, 16, 64]), len(row))
    group = sizes["HQ"] // int(call.scalars["HKV"])
    return {
        "row": row,
        "q_idx": row + shift,
        "kv_idx": kv,
        "b": b,
        "h": h,
        "h_kv": h // group,
        "score": scores,
        "q_start": row // tile * tile,
        "there": kv < call.ends[b],
    }


def _positions(make: np.random.Generator, edges: list[int], size: int) -> Any:
    """Draw positions of one side: its ends, positions near constants, and a few random ones."""
    wanted = [
        0,
        size - 1,
        size - 2,
        *make.permutation([e for e in edges if 0 <= e < size])[: FACTS - 5],
    ]
    return np.unique([p for p in (*wanted, *make.integers(0, size, 3)) if p >= 0])


def grid(call: Call, spec: AttentionSpec, b: int, h: int) -> dict[str, Any]:
    """Return all pairs of a sequence and a head, queries by keys."""
    sq, sk = int(call.scalars["SQ"]), int(call.scalars["SK"])
    row, kv = np.arange(sq)[:, None], np.arange(sk)[None, :]
    shift = int(call.ends[b]) - sq if spec.aligned_to_end else 0
    group = int(call.scalars["HQ"]) // int(call.scalars["HKV"])
    heads = {"b": np.int64(b), "h": np.int64(h), "h_kv": np.int64(h // group)}
    return {"row": row, "q_idx": row + shift, "kv_idx": kv, **heads, "there": kv < call.ends[b]}
