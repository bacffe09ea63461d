"""What grows in a spec does not grow exponentially on its way to text: it is rendered within seconds, or refused."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import reduce
from pathlib import Path

import pytest

from kgen.diagnostics import KgenError
from kgen.render.rendering import render_spec
from kgen.spec.load import load

LIMIT = 4.0
"""Seconds of this process. The largest take one."""


def nested(form: str, inner: str, times: int) -> str:
    """`form` of `form` of ... `inner`."""
    return reduce(lambda text, i: form.replace("X", text).replace("I", str(i)), range(times), inner)


def joined(operator: str, form: str, times: int) -> str:
    return f" {operator} ".join(form.replace("I", str(i)) for i in range(1, times + 1))


def doubled(first: str, step: str, times: int) -> str:
    """Local names, each made of the one before it."""
    lines = [
        f"a0 = {first}",
        *(f"a{i + 1} = {step.replace('X', f'a{i}')}" for i in range(times)),
        f"a{times}",
    ]
    return "\n".join(lines)


SCORES = {
    "sums of sums": doubled("score + score", "X + X", 40),
    "squares of squares": doubled("score * score + 0.1", "X * X + 0.3", 6),
    "quotients of quotients": doubled("score + 0.1", "1 / (X + 1 / (1.0 + abs(X)))", 6),
    "continued fraction": nested("1 / (0.I1 + X)", "score", 25),
    "product": joined("*", "(score + 0.I)", 60),
    "quotient by a product": f"score / ({joined('*', '(abs(score) + 0.I)', 50)})",
    "sum of quotients": joined("+", "score / (0.I + abs(score))", 40),
    "minima of maxima": nested("min(X, max(score * 0.I, I))", "score", 40),
    "choices": nested("where(kv_idx > I, X, score * 0.I1)", "score", 40),
    "choices of products": nested("(X if kv_idx > I else score * X)", "score", 6),
    "tanh of tanh": nested("tanh(X + 0.I1 * X)", "score", 7),
    "silu of silu": nested("silu(X)", "score", 12),
    "functions of numbers": "score + log2(0.001 + rsqrt(1e6 + abs(2.5e-20))**2) / (0.1 + ((3e20 - 0.8) / 1.7)**2)**2",
    "powers of powers": "((score * 0.01) ** 8 + 1.0) ** 8",
    "powers of positions": "score + ((kv_idx - q_idx + h * 0.1 + b) ** 8 + 1) ** 8",
    "product of positions": f"score + {joined('*', '(kv_idx - q_idx + I * 0.1)', 20)}",
    "gradients of many reads": f"score + {joined('+', 'tanh(score * t[I, h]) * t[I, h]', 20)}",
    "index of sums": f"score + t[kv_idx{' + 1' * 50}, h]",
    "index of minima": f"score + t[{nested('max(min(X, 40 - I), I)', 'kv_idx', 25)}, h]",
    "abs of abs": f"score + t[{nested('abs(X - I)', 'kv_idx', 30)}, h]",
}
MASKS = {
    "!=": joined("and", "kv_idx - q_idx != I", 20),
    "or and or": joined("and", "(q_idx >= kv_idx + I or kv_idx > I)", 60),
    "and or and": joined("or", "(q_idx >= kv_idx + I and kv_idx > I)", 60),
    "or and or, nested": nested("((X or kv_idx == I) and q_idx - kv_idx != I)", "q_idx >= kv_idx", 25),
    "or of and of or": joined(
        "and", "((q_idx > I and kv_idx != I) or (kv_idx > I and (kv_idx < 9 or q_idx < I)))", 12
    ),
    "not": nested("not (X)", "q_idx >= kv_idx", 30),
    "remainders": joined("and", "(q_idx - kv_idx) % (I + 1) != 0", 30),
    "remainders of remainders": nested("(X * 3 % (I + 5))", "kv_idx", 28) + " <= q_idx",
    "distances": joined("and", "abs(q_idx - kv_idx - I) > I", 30),
    "abs of abs": nested("abs(X - I)", "kv_idx", 30) + " <= q_idx",
    "comparisons in choices": nested("where(abs(X) <= I + 5, I, I + 1)", "kv_idx - q_idx", 20) + " <= 7",
    "powers of powers": "((kv_idx - q_idx + h + b) ** 8 + kv_idx) ** 8 <= 8 * kv_idx",
}


def spec(score_mod: str | None = None, mask_mod: str | None = None) -> str:
    lines = ["kernel: attention", "name: growing", "summary: A test.", "dtype: bf16", "head_dim: 64"]
    lines += ["lengths: {q: any, kv: any}", "passes: [forward, backward]", "targets: {triton: {}}"]
    if "t[" in (score_mod or ""):
        lines.append("buffers: {t: {shape: [64, HQ], dtype: fp32, grad: true}}")
    for name, text in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if text is not None:
            lines += [f"{name}: |", *(f"  {line}" for line in text.split("\n"))]
    return "\n".join(lines) + "\n"


def check(text: str, folder: Path) -> None:
    path = folder / "growing.yaml"
    path.write_text(text)
    start, files = time.process_time(), {"refused": ""}
    with suppress(KgenError):
        files = render_spec(load(path))
    assert time.process_time() - start < LIMIT
    assert sum(map(len, files.values())) < 400_000


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, tmp_path: Path) -> None:
    check(spec(score_mod=SCORES[name]), tmp_path)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, tmp_path: Path) -> None:
    check(spec(mask_mod=MASKS[name]), tmp_path)
