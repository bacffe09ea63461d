"""Random specs of linear_attention, and cases for them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fuzzing.attention import without_unused
from fuzzing.words import FLOAT, INT, Words
from kgen.kernels.linear_attention.spec import FIELDS
from kgen.kernels.linear_attention.verify.inputs import Case
from kgen.kernels.linear_attention.verify.inputs import cases as stock
from kgen.kernels.linear_attention.verify.inputs import decode_cases as stock_steps

SHAPES = {
    "a": ("HV",),
    "g": ("T", "HV"),
    "b": ("T", "HV"),
    "e": ("HV", "K"),
    "w": ("T", "HV", "K"),
    "d": ("HV", "V"),
    "z": ("T", "HV", "V"),
    "r": ("V",),
}
AXES = {"T": "t", "HV": "h", "K": "c", "V": "c"}
OF_HEADS = ("a", "g", "b")
DECAYS = (
    *("-softplus({})", "log_sigmoid({})", "-exp(a[h]) * softplus({})", "-0.2 * abs({})"),
    *("-0.3 * sigmoid({})", "log(1 - exp2(-5 - h)) - softplus({})"),
)
"""Decays of at most 0, of any number."""
CONSTANTS = ("-0.1", "log(1 - exp2(-5 - h))", "-exp(a[h])", "-0.01 * (h + 1) / HV")
"""Decays without tokens."""
MAPS = ("elu(x) + 1", "max(x, 0) ** 2", "silu(x)", "x * sigmoid({})", "x + tanh({})")
SKIPS = ("v", "a[h] * v", "d[h, c] * v", "v * tanh({})", "silu(v) * {}")
OF_OUTPUT = (*OF_HEADS, "d", "z", "r")
GATES = ("silu({})", "sigmoid({})", "1 + 0.5 * tanh({})")
OUTPUTS = ("o", "r[c] * o", "r[c] * o * silu({})", "o * sigmoid({})", "tanh(o) * {}", "o + {}")
SIZES: Mapping[Any, tuple[int, ...]] = {64: (16, 16, 32, 64, 128), 128: (16, 32), 256: (16,)}
"""Chunk sizes of each width of a head, which the interpreter computes within the time limit."""


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw the fields of a spec. The schema accepts most of them."""
    spec: dict[str, Any] = {"kernel": "linear_attention", "name": "drawn"}
    spec["dtype"] = rng.choice(("bf16", "fp16"))
    widths = rng.choice(((64, 64),) * 4 + ((64, 128), (128, 64), (128, 128), (256, 64), (64, 256)))
    both = {"qk": widths[0], "v": widths[1]}
    spec["head_dim"] = widths[0] if widths[0] == widths[1] else both
    spec["chunk_size"] = rng.choice(SIZES[max(widths)])
    spec["passes"] = ["forward", *(one for one in ("backward", "decode") if rng.random() < 0.7)]
    for key, values in {
        "heads": ("any", {"group": 2}, {"qk": 2, "v": 4}, {"qk": 3, "v": 3}),
        "state_dtype": ("bf16", "fp32"),
        "rule": ("delta",),
        "scale": (1, -0.3),
        "qk_norm": ("l2",),
        "output_norm": ("rms",),
        "varlen": (True,),
        "save": ("recompute",),
    }.items():
        if rng.random() < 0.5:
            spec[key] = rng.choice(values)
    if "backward" not in spec["passes"]:
        spec.pop("save", None)
    if "qk_norm" in spec and rng.random() < 0.4:
        spec["eps"] = rng.choice((1e-6, 1e-3))
    if "output_norm" in spec and rng.random() < 0.4:
        spec["output_eps"] = rng.choice((1e-5, 1e-3))
    buffers = _buffers(rng, learned="backward" in spec["passes"])
    spec |= _expressions(rng, spec.get("rule") == "delta", "qk_norm" in spec)
    spec |= _of_output(rng, "output_norm" in spec)
    if "decay" in spec and rng.random() < 0.4:
        spec["gate_base"] = rng.choice(("e", 2))
    return without_unused(spec | {"buffers": buffers}, FIELDS)


def _buffers(rng: random.Random, *, learned: bool) -> dict[str, Any]:
    """Draw the dtype of each buffer, and for a backward pass which of them have gradients."""
    found = {}
    for name, shape in SHAPES.items():
        found[name] = {"shape": list(shape), "dtype": rng.choice(("fp32", "fp32", "bf16", "fp16"))}
        if learned and rng.random() < 0.6:
            found[name]["grad"] = True
    return found


def _expressions(rng: random.Random, delta: bool, normed: bool) -> dict[str, str]:
    """Draw the expressions of a spec."""
    found = {}
    kind = rng.choice(("none", "constant", "head", "head", "column", "column"))
    if kind == "constant":
        found["decay"] = rng.choice(CONSTANTS)
    elif kind != "none":
        names = {"h": INT, "HV": INT} | ({"c": INT} if kind == "column" else {})
        buffers = ("a", "g", *(("e", "w", "w") if kind == "column" else ()))
        text = f"tanh({_words(rng, names, buffers).real(2)})"
        text = f"({text} + {rng.choice(('g[t, h]', 'w[t, h, c]'))})" if kind == "column" else text
        found["decay"] = rng.choice(DECAYS).format(text)
    if rng.random() < 0.6:
        text = _words(rng, {"h": INT, "HV": INT}, OF_HEADS).real(2)
        forms = ("sigmoid({})", "2 * sigmoid({})") if delta else ("sigmoid({})", "tanh({})", "{}")
        found["beta"] = rng.choice(forms).format(text)
    # Without a norm, the delta rule diverges for keys longer than 1.
    for name in ("q_map", *(("k_map",) if normed or not delta else ())):
        if rng.random() < 0.35:
            text = _words(rng, {"x": FLOAT}, (), rounded=("x",)).real(1)
            found[name] = rng.choice(MAPS).format(text)
    if rng.random() < 0.4:
        words = _words(rng, {"v": FLOAT, "h": INT, "c": INT}, (*OF_HEADS, "d", "z"), ("v",))
        found["skip"] = rng.choice(SKIPS).format(words.real(2))
    return found


def _of_output(rng: random.Random, normed: bool) -> dict[str, str]:
    """Draw the expressions after the recurrence."""
    found = {}
    if normed and rng.random() < 0.4:
        words = _words(rng, {"h": INT, "c": INT}, OF_OUTPUT)
        found["output_gate"] = rng.choice(GATES).format(words.real(2))
    if rng.random() < 0.5:
        words = _words(rng, {"o": FLOAT, "h": INT, "c": INT}, OF_OUTPUT, ("o",))
        found["output"] = rng.choice(OUTPUTS).format(words.real(2))
    return found


def _words(
    rng: random.Random,
    names: Mapping[str, Any],
    buffers: Iterable[str],
    rounded: tuple[str, ...] = (),
) -> Words:
    reads = {n: (FLOAT, [AXES[size] for size in SHAPES[n]]) for n in buffers}
    words = Words(rng, names, reads, rounded=(*rounded, *reads))
    words.anywhere = False
    return words


def cases(problem: Any, rng: random.Random) -> list[Case]:
    """Draw two of the quick cases of forward and backward, with another seed for their tensors."""
    # Saturated gates overflow in random expressions. At zeros, some are not differentiable.
    tame = [one for one in stock(problem, quick=True) if one.gates in ("usual", "steep")]
    return [_seeded(one, rng) for one in rng.sample(tame, 2)]


def steps(problem: Any, rng: random.Random) -> list[Case]:
    """Draw two of the quick cases of decode."""
    tame = [one for one in stock_steps(problem, quick=True) if one.gates == "usual"]
    return [_seeded(one, rng) for one in rng.sample(tame, 2)]


def _seeded(case: Case, rng: random.Random) -> Case:
    return replace(case, name=f"{case.name}-{rng.random()}")
