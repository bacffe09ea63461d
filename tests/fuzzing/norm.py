"""Random norm specs, and cases for them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from fuzzing.attention import KINDS, without_unused
from fuzzing.words import FLOAT, INT, Words
from kgen.kernels.norm.verify.inputs import Case
from kgen.kernels.norm.verify.inputs import cases as stock

WIDTHS = (1, 8, 33, 64, 96, 128, 257, 512, 1000, "any", "any", [64, 128], [96, 100, 768])


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw the fields of a spec. The schema accepts most of them."""
    spec: dict[str, Any] = {"kernel": "norm", "name": "drawn", "norm": rng.choice(("rms", "layer"))}
    dtype: Any = rng.choice(("bf16", "fp16", "fp32"))
    if rng.random() < 0.3:
        others = {
            part: rng.choice(("bf16", "fp16", "fp32")) for part in ("weight", "output", "residual")
        }
        dtype = {"input": dtype} | {
            part: kind for part, kind in others.items() if rng.random() < 0.5
        }
    spec |= {"dtype": dtype, "width": rng.choice(WIDTHS)}
    if rng.random() < 0.3:
        spec["heads"] = rng.choice((1, 3, 8, "any"))
    for key, values in {
        "weight": (True, False),
        "bias": (True, False),
        "weight_offset": (0, 1),
        "residual": ("in", "in_out"),
        "statistics": ("save", "recompute"),
        "round_x_hat": (True,),
        "eps": (1e-5, 1e-3),
        "passes": (["forward"],),
    }.items():
        if rng.random() < 0.3:
            spec[key] = rng.choice(values)
    if spec.get("weight") is False:
        for key in ("weight_offset", "heads", "round_x_hat"):
            spec.pop(key, None)
    if isinstance(dtype, dict) and "residual" not in spec:
        dtype.pop("residual", None)
    if isinstance(dtype, dict) and spec.get("weight") is False and not spec.get("bias"):
        dtype.pop("weight", None)
    if spec.get("passes") == ["forward"] and rng.random() < 0.3:
        spec["quantize"] = {"dtype": "fp8_e4m3", "scale": rng.choice(("per_tensor", "per_row"))}
        if isinstance(dtype, dict):
            dtype.pop("output", None)
    shapes = (["ROWS", "WIDTH"], ["ROWS"], ["H", "WIDTH"] if "heads" in spec else ["WIDTH"])
    buffers: dict[str, Any] = {}
    for name in rng.sample(("gate", "ids", "keep", "shift"), rng.choice((0, 0, 1, 2))):
        kind = rng.choice([*KINDS])
        buffers[name] = {"shape": rng.choice(shapes), "dtype": kind}
        if KINDS[kind] is FLOAT and rng.random() < 0.4:
            buffers[name]["grad"] = True
    params = {name: value for name, value in (("gain", 2.0), ("limit", 3)) if rng.random() < 0.3}
    spec |= {k: v for k, v in (("buffers", buffers), ("params", params)) if v}
    names = {name: INT if name == "limit" else FLOAT for name in params}
    elements = {name: (KINDS[b["dtype"]], ()) for name, b in buffers.items()}
    inputs = ("x", "residual") if "residual" in spec else ("x",)
    if rng.random() < 0.5:
        words = Words(rng, names | dict.fromkeys(inputs, FLOAT), elements, rounded=inputs)
        spec["input_mod"] = " + ".join((*inputs, f"0.5 * {words.real(2)}"))
    if rng.random() < 0.6:
        words = Words(rng, names | {"y": FLOAT}, elements, rounded=("y",))
        spec["output_mod"] = rng.choice(("y * {}", "y + {}", "{} - y", "silu(y) * {}")).format(
            words.real(2)
        )
    return without_unused(spec, ("input_mod", "output_mod"))


def cases(problem: Any, rng: random.Random) -> list[Case]:
    """Draw three of the quick cases, with another seed for their tensors."""
    # Exclude rows of one element, whose variance is zero, and inputs of zeros, where functions are
    # not differentiable.
    drawn = rng.sample(
        [
            case
            for case in stock(problem, quick=True)
            if case.content == "normal" and case.eps is None and case.scale == 1.0
        ],
        3,
    )
    return [replace(case, name=f"{case.name}-{rng.random()}") for case in drawn]
