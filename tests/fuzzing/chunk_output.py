"""Random specs of chunk_output, and cases for them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from fuzzing.words import FLOAT, INT, Words
from kgen.kernels.chunk_output.verify.inputs import Case
from kgen.kernels.chunk_output.verify.inputs import cases as stock

DECAYS = (
    "g[i]",
    "(i + 1) * g_gamma[h]",
    "(i + 1) * log(1 - exp2(-5 - h))",
    "g[i] * {}",
    "g[i] + 0.1 * {}",
    "0.2 * {}",
)


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw the fields of a spec. The schema accepts most of them."""
    spec: dict[str, Any] = {
        "kernel": "chunk_output",
        "name": "drawn",
        "dtype": rng.choice(("bf16", "fp16")),
    }
    spec["head_dim"] = rng.choice((64, 64, 128, {"qk": 64, "v": 128}, {"qk": 128, "v": 64}))
    spec["chunk_size"] = rng.choice((16, 32, 64))
    if rng.random() < 0.5:
        spec["heads"] = rng.choice(("any", {"group": 2}, {"qk": 2, "v": 4}, {"qk": 3, "v": 3}))
    if rng.random() < 0.8:
        words = Words(
            rng,
            {"i": INT, "h": INT},
            {"g": (FLOAT, ["i"])} if rng.random() < 0.5 else {},
            rounded=("g",),
        )
        words.anywhere = False
        spec["decay"] = rng.choice(DECAYS).format(f"tanh({words.real(2)})")
        if rng.random() < 0.4:
            spec["gate_base"] = rng.choice(("e", 2))
        if "g[" in spec["decay"] or "g_gamma[" in spec["decay"]:
            spec["gate_dtype"] = rng.choice(("fp32", "bf16", "fp16"))
    for key, values in {
        "state_dtype": ("bf16", "fp16", "fp32"),
        "state_layout": ("kv", "vk"),
        "v_layout": ("token", "chunk_padded"),
        "varlen": (True,),
        "passes": (["forward"],),
    }.items():
        if rng.random() < 0.35:
            spec[key] = rng.choice(values)
    return spec


def cases(problem: Any, rng: random.Random) -> list[Case]:
    """Draw two of the quick cases, with another seed for their tensors."""
    drawn = rng.sample([case for case in stock(problem, quick=True) if "steep" not in case.name], 2)
    return [replace(case, name=f"{case.name}-{rng.random()}") for case in drawn]
