"""Random masks and scores at the edge cases of the passes, in specs whose kernels run.

Masks compare `abs` with numbers around zero. They contain choices and `!=` between conditions on
queries, next to another `or`. Thresholds exceed every length, ranges have no keys, and some masks
read `h_kv`. Factors and terms of scores are infinite or zero in rows and batches without keys.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from fuzzing.words import COMPARISONS

BUFFERS: Mapping[str, Mapping[str, Any]] = {
    "n": {"shape": ["B"], "dtype": "int32"},
    "a": {"shape": ["HQ"], "dtype": "fp32"},
    "t": {"shape": ["HKV"], "dtype": "int32"},
    "gains": {"shape": ["HKV"], "dtype": "fp32"},
}
NUMBERS = ("-1", "0", "0", "1", "1", "2", "16", "64", "512", "1000000")
"""Numbers around zero, numbers around tile sizes, and a number above every length."""
ABOUT_ZERO = (
    *(
        "abs({x}) {c} {n}",
        "{n} {c} abs({x})",
        "not abs({x}) {c} {n}",
        "2 * abs({x}) {c} {n}",
        "-abs({x}) {c} {n}",
    ),
    *("abs(abs({x}) - {n}) {c} 1", "abs({x}) // 2 {c} {n}"),
)
DIFFERENCES = (
    "q_idx - kv_idx",
    "kv_idx - q_idx",
    "q_idx - 2 * kv_idx",
    "q_idx // 16 - kv_idx // 16",
)
ONE_SIDED = ("{i} {c} {n}", "{i} {c} {n}", "{n} {c} {i}", "{i} % 3 {c} 0")
HEADS = (
    "kv_idx % 2 == h_kv % 2",
    "kv_idx >= h_kv",
    "t[h_kv] <= kv_idx",
    "q_idx - kv_idx <= t[h_kv]",
)
UNDEFINED = (
    *(("score + 1 / q_idx", "q_idx > kv_idx"), ("score - log(float(q_idx))", "q_idx > kv_idx")),
    *(
        ("score * (1 / q_idx)", "q_idx > kv_idx"),
        ("score + a[h] * kv_idx / q_idx", "q_idx > kv_idx"),
    ),
)
"""Scores that are not finite in a row without keys, and masks that leave this row no keys."""
OF_BATCHES = (
    *(
        "score + 1 / {n}",
        "score / {n}",
        "score * log(float({n}))",
        "score * a[h] * log(float({n}))",
    ),
    *(
        "score * log(float({n})) / log(2.0)",
        "score + a[h] * kv_idx / {n}",
        "score + log(float({n}))",
    ),
)
"""Scores that are not finite, or zero, in a batch without keys."""
PLAIN = (
    "score",
    "score * gains[h_kv]",
    "score + a[h] * abs(q_idx - kv_idx)",
    "score * a[h]",
    "0.0 * score",
)


def add_edges(rng: random.Random, spec: dict[str, Any]) -> None:
    """Replace the mask, the score, the buffers and the params of a spec."""
    for field in ("buffers", "params", "score_mod", "mask_mod"):
        spec.pop(field, None)
    score, mask = _score(rng, spec), _mask(rng)
    if score[1]:
        mask = rng.choice((score[1], f"({score[1]}) and ({mask})"))
    texts = {"score_mod": score[0], "mask_mod": mask}
    spec |= {name: text for name, text in texts.items() if text not in ("score", "")}
    said = " ".join(texts.values())
    buffers = {name: dict(buffer) for name, buffer in BUFFERS.items() if f"{name}[" in said}
    if "backward" in spec.get("passes", ("backward",)) and rng.random() < 0.5:
        for name in {"a", "gains"} & {*buffers}:
            if f"{name}[" in score[0]:
                buffers[name]["grad"] = True
    if buffers:
        spec["buffers"] = buffers


def _score(rng: random.Random, spec: Mapping[str, Any]) -> tuple[str, str]:
    """Draw a score, and the mask that it requires."""
    drawn = rng.random()
    if drawn < 0.25 and spec.get("align") != "end":
        return rng.choice(UNDEFINED)
    if drawn < 0.6:
        counts = [("n[b]", "kv_idx < n[b]")]
        if spec.get("varlen"):
            counts.append(("SK", ""))
        count, mask = rng.choice(counts)
        return rng.choice(OF_BATCHES).format(n=count), mask
    return rng.choice(PLAIN), ""


def _mask(rng: random.Random) -> str:
    drawn = rng.random()
    if drawn < 0.3:
        return _about_zero(rng)
    if drawn < 0.5:
        q, *others = (_one_sided(rng, i) for i in ("q_idx", "kv_idx", "kv_idx", "kv_idx"))
        return f"where({q}, {others[0]}, {others[1]}) and ({others[2]} or {_about_zero(rng)})"
    if drawn < 0.7:
        q, k, other = (
            _one_sided(rng, i) for i in ("q_idx", "kv_idx", rng.choice(("q_idx", "kv_idx")))
        )
        return f"(({q}) != ({k})) and ({other} or {_about_zero(rng)})"
    if drawn < 0.85:
        return f"{rng.choice(HEADS)} and ({_one_sided(rng, 'kv_idx')} or {_about_zero(rng)})"
    return f"{_one_sided(rng, 'q_idx')} {rng.choice(('and', 'or'))} {_one_sided(rng, 'kv_idx')}"


def _about_zero(rng: random.Random) -> str:
    x, c, n = rng.choice(DIFFERENCES), rng.choice(COMPARISONS), rng.choice(NUMBERS)
    return rng.choice(ABOUT_ZERO).format(x=x, c=c, n=n)


def _one_sided(rng: random.Random, index: str) -> str:
    c, n = rng.choice(COMPARISONS), rng.choice(NUMBERS)
    return rng.choice(ONE_SIDED).format(i=index, c=c, n=n)
