"""Parts of a spec that could grow exponentially: kgen renders the spec within seconds, or refuses
it.
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import pytest
from support.running.pace import within
from support.specs import hostile

from kgen.diagnostics import KgenError
from kgen.render.rendering import render_spec
from kgen.spec.load import load

LIMIT = 2.0
"""Seconds of this process, scaled to the machine by `pace.py`. The largest spec takes one."""


def nested(form: str, inner: str, times: int) -> str:
    """Return `form` of `form` of ... `inner`."""
    return reduce(lambda text, i: form.replace("X", text).replace("I", str(i)), range(times), inner)


def joined(operator: str, form: str, times: int) -> str:
    return f" {operator} ".join(form.replace("I", str(i)) for i in range(1, times + 1))


def doubled(first: str, step: str, times: int) -> str:
    """Return local names, each computed from the one before it."""
    lines = [
        f"a0 = {first}",
        *(f"a{i + 1} = {step.replace('X', f'a{i}')}" for i in range(times)),
        f"a{times}",
    ]
    return "\n".join(lines)


def grouped(form: str, times: int, each: int) -> str:
    """Return a sum of sums of `each` terms. It has more terms than a sum may nest."""
    terms = [form.replace("I", str(i)) for i in range(times)]
    return " + ".join(f"({' + '.join(terms[i : i + each])})" for i in range(0, times, each))


# The largest accepted sizes, or almost.
SCORES = {
    "sums of sums": doubled("score + score", "X + X", 8),
    "squares of squares": doubled("score * score + 0.1", "X * X + 0.3", 2),
    "quotients of quotients": doubled("score + 0.1", "1 / (X + 1 / (1.0 + abs(X)))", 5),
    "continued fraction": nested("1 / (0.I1 + X)", "score", 20),
    "product": joined("*", "(score + 0.I)", 6),
    "product of functions": joined("*", "tanh(score + 0.I)", 60),
    "sum of products": grouped("score * exp(score * I.0)", 192, 8),
    "quotient by a product": f"score / ({joined('*', '(abs(score) + 0.I)', 6)})",
    "sum of quotients": joined("+", "score / (0.I + abs(score))", 60),
    "minima of maxima": nested("min(X, max(score * 0.I, I))", "score", 30),
    "choices": nested("where(kv_idx > I, X, score * 0.I1)", "score", 60),
    "choices of products": nested("(X if kv_idx > I else score * X)", "score", 8),
    "tanh of tanh": nested("tanh(X + 0.I1 * X)", "score", 8),
    "silu of silu": nested("silu(X)", "score", 9),
    "functions of numbers": (
        "score + log2(0.001 + rsqrt(1e6 + abs(2.5e-20))**2) / (0.1 + ((3e20 - 0.8) / 1.7)**2)**2"
    ),
    "functions of functions of numbers": (
        f"score * {nested('(0.I1 / (1 + tanh(X)) ** 2)', '0.5', 7)}"
    ),
    "powers of powers": "((score * 0.01) ** 8 + 1.0) ** 2",
    "product of positions": f"score + {joined('*', '(kv_idx - q_idx + I * 0.1)', 3)}",
    "gradients of many reads": f"score + {joined('+', 'tanh(score * t[I, h]) * t[I, h]', 45)}",
    "index of sums": f"score + t[kv_idx{' + 1' * 50}, h]",
    "index of sums of maxima": f"score + t[{joined('+', 'max(kv_idx - I, b)', 22)}, h]",
    "index of minima": f"score + t[{nested('max(min(X, 40 - I), I)', 'kv_idx', 25)}, h]",
    "abs of abs": f"score + t[{nested('abs(X - I)', 'kv_idx', 8)}, h]",
}
MASKS = {
    "!=": joined("and", "kv_idx - q_idx != I", 60),
    "or and or": joined("and", "(q_idx >= kv_idx + I or kv_idx > I)", 60),
    "and or and": joined("or", "(q_idx >= kv_idx + I and kv_idx > I)", 60),
    "or and or, nested": nested(
        "((X or kv_idx == I) and q_idx - kv_idx != I)", "q_idx >= kv_idx", 30
    ),
    "or of and of or": joined(
        "and", "((q_idx > I and kv_idx != I) or (kv_idx > I and (kv_idx < 9 or q_idx < I)))", 12
    ),
    "not": nested("not (X)", "q_idx >= kv_idx", 30),
    "remainders": joined("and", "(q_idx - kv_idx) % (I + 1) != 0", 60),
    "remainders of remainders": nested("(X * 3 % (I + 5))", "kv_idx", 7) + " <= q_idx",
    "distances": joined("and", "abs(q_idx - kv_idx - I) > I", 60),
    "abs of abs": nested("abs(X - I)", "kv_idx", 8) + " <= q_idx",
    "comparisons in choices": nested("where(abs(X) <= I + 5, I, I + 1)", "kv_idx - q_idx", 7)
    + " <= 7",
    "powers of powers": "((kv_idx - q_idx + h + b) ** 2 + kv_idx) ** 2 <= 8 * kv_idx",
}
REFUSED = {
    "sums of sums": doubled("score + score", "X + X", 40),
    "squares of squares": doubled("score * score + 0.1", "X * X + 0.3", 6),
    "product": joined("*", "(score + 0.I)", 60),
    "silu of silu": nested("silu(X)", "score", 30),
    "powers of powers": "((score * 0.01) ** 8 + 1.0) ** 8",
    "powers of positions": "score + ((kv_idx - q_idx + h * 0.1 + b) ** 8 + 1) ** 8",
    "abs of abs": f"score + t[{nested('abs(X - I)', 'kv_idx', 30)}, h]",
    "remainders of remainders": f"score + t[{nested('(X * 3 % (I + 5))', 'kv_idx', 28)}, h]",
}


OTHERS = {
    "norm, input": ("norm", "input_mod", grouped("x * exp(x * I.0)", 192, 8)),
    "norm, output": ("norm", "output_mod", grouped("y * exp(y * I.0)", 192, 8)),
    "decay": ("chunk_output", "decay", grouped("min(g[i], 0.I1)", 390, 16)),
}


def spec(score_mod: str | None = None, mask_mod: str | None = None) -> str:
    lines = [
        "kernel: attention",
        "name: growing",
        "summary: A test.",
        "dtype: bf16",
        "head_dim: 64",
    ]
    lines += ["lengths: {q: any, kv: any}", "passes: [forward, backward]", "targets: {triton: {}}"]
    if "t[" in (score_mod or ""):
        lines.append("buffers: {t: {shape: [64, HQ], dtype: fp32, grad: true}}")
    for name, text in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if text is not None:
            lines += [f"{name}: |", *(f"  {line}" for line in text.split("\n"))]
    return "\n".join(lines) + "\n"


def rendered(text: str, folder: Path) -> str:
    """Return all emitted text of a spec. Fail if this takes longer than the limit."""
    path = folder / "growing.yaml"
    path.write_text(text)
    with within(LIMIT):
        texts = render_spec(load(path))
    return "".join(texts.values())


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, tmp_path: Path) -> None:
    assert len(rendered(spec(score_mod=SCORES[name]), tmp_path)) < 200_000


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, tmp_path: Path) -> None:
    assert len(rendered(spec(mask_mod=MASKS[name]), tmp_path)) < 200_000


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str, tmp_path: Path) -> None:
    family, field, text = OTHERS[name]
    assert len(rendered(hostile.spec(family, **{field: text}), tmp_path)) < 200_000


@pytest.mark.parametrize("name", REFUSED)
def test_what_grows_further_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(KgenError) as caught:
        rendered(spec(score_mod=REFUSED[name]), tmp_path)
    assert {d.code for d in caught.value.diagnostics} == {"too-large"}
