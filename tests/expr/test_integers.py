"""Integers: two's complement of 32 bits, or 64 bits where a buffer has them, and addresses within
32 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.specs.trees import FLOAT, INT, LONG

from kgen.expr.algebra import Algebra
from kgen.expr.hoist import Place, regroup
from kgen.expr.nodes import Node, Type
from kgen.expr.parse import parse_expression
from kgen.expr.scope import BufferType, Scope
from kgen.expr.softmax_form import softmax_form
from kgen.expr.wrapping import may_wrap
from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.verify.evaluate import evaluate
from kgen.verify.toolchain import import_file

BUFFERS = {"doc": BufferType(INT, 1), "wide": BufferType(LONG, 1), "slopes": BufferType(FLOAT, 1)}
SCOPE = Scope(
    {"score": FLOAT, **dict.fromkeys(("b", "h", "q_idx", "kv_idx", "SK", "seed"), INT)}, BUFFERS
)
POSITIONS = {
    "h": torch.arange(2),
    "q_idx": torch.arange(5)[:, None, None],
    "kv_idx": torch.arange(70_000, 70_007)[:, None],
}
ENV: dict[str, Any] = POSITIONS | {
    "score": torch.ones(()),
    "seed": 7,
    "SK": 70_007,
    "slopes": torch.tensor([0.5, -0.25]),
    "wide": torch.tensor([5, 2**32 + 5, 3 - 2**40] * 30_000),
}


def parse(text: str, type_: Type = FLOAT) -> Node:
    return parse_expression(text, SCOPE, type_)


def two_complement(value: int, bits: int = 32) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def test_the_reference_wraps() -> None:
    got = (
        evaluate(parse("-(kv_idx * 1103515245 + 12345) - 2147483647"), ENV, torch)
        .flatten()
        .tolist()
    )
    assert got == [
        two_complement(-(x * 1103515245 + 12345) - 2147483647) for x in range(70_000, 70_007)
    ]
    got = evaluate(parse("wide[1] * 1103515245 * 1103515245"), ENV, torch).item()
    assert got == two_complement((2**32 + 5) * 1103515245**2, 64)


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("wide[q_idx]", LONG),
        ("wide[q_idx] - kv_idx", LONG),
        ("min(doc[q_idx], wide[kv_idx] // 2)", LONG),
        ("doc[wide[q_idx]]", INT),
        ("where(wide[q_idx] > 3, 1, 0)", INT),
    ],
)
def test_what_reads_64_bits_has_them(text: str, type_: Type) -> None:
    assert parse(text, INT).type is type_


@pytest.mark.parametrize(
    ("text", "wraps"),
    [
        ("kv_idx - q_idx + 3", False),
        ("doc[kv_idx] - doc[q_idx]", False),
        ("-8 * (h + 1)", False),
        ("(kv_idx * 1103515245) % 7 + kv_idx * 99999 // 3", False),  # by contract
        ("kv_idx * 1103515245", True),
        ("kv_idx * 1000 * 1000", True),
        ("kv_idx * q_idx", True),
        ("kv_idx + 1103515245", True),
        ("where(q_idx > 3, kv_idx, kv_idx * seed)", True),
    ],
)
def test_what_is_taken_to_fit(text: str, wraps: bool) -> None:
    assert may_wrap(parse(text, INT)) == wraps


@pytest.mark.parametrize(
    "text",
    [
        "score + slopes[h] * (kv_idx * 1103515245 + 12345)",
        "score + float((q_idx * 22695477 + kv_idx) * 1664525 + seed) / 4294967296.0",
        "score * 2 + 3 * (2 * ((kv_idx + seed) * 1103515245) + 12345)",
        "score + 0.5 * (kv_idx * kv_idx)",
        "score + where(q_idx > 2, kv_idx * 1103515245 * 22695477, 0.5)",
        # These are reals, although sympy sees a product of integers.
        "score + slopes[h] * kv_idx * kv_idx",
        "score - seed * slopes[h] * 0.5 * kv_idx * SK",
    ],
)
def test_no_rewrite_changes_what_wraps(text: str) -> None:
    """Softmax form and regrouping never split an integer that wraps, and never make it real."""
    tree = parse(text)
    algebra = Algebra()
    form = softmax_form(tree, algebra)
    env = ENV | {"qk": ENV["score"], "scale": 1.0, "LOG2E": 1.0, "q_start": 0, "inf": torch.inf}
    places = {
        "q_idx": Place(False, ("q",)),
        "kv_idx": Place(True, ("kv",)),
        "qk": Place(True, ("q", "kv")),
        "score": Place(True, ("q", "kv")),
    }

    def value(node: Node | None) -> torch.Tensor:
        return (
            torch.zeros(()).double()
            if node is None
            else evaluate(regroup(node, places), env, torch).double()
        )

    wanted = evaluate(tree, env, torch)
    # `row_rest` has the terms that the form drops for a row.
    got = value(form.multiplier) * value(form.core) + value(form.bias) + value(form.row_rest)
    torch.testing.assert_close(*torch.broadcast_tensors(got, wanted), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(value(tree), wanted, rtol=1e-12, atol=1e-9)


FAR = """
kernel: attention
name: far
dtype: bf16
head_dim: 64
buffers: {bias: {shape: [SQ, SK], dtype: fp32}}
score_mod: score + bias[q_idx, kv_idx]
"""


@pytest.mark.parametrize(
    ("which", "words"),
    [("k", r"last stride of q, k and v must be at most 2\*\*25"), ("bias", "a row of bias")],
)
def test_columns_that_32_bits_do_not_reach_are_refused(
    which: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "far.py"
    path.write_text(next(iter(render_spec(loads(FAR, Path("far.yaml")), single=True).values())))
    function = import_file(path, "kgen_test_far").far
    tensors = {n: torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device="meta") for n in "qkv"}
    tensors["bias"] = torch.empty(64, 64, device="meta")

    def strided(step: int) -> dict[str, torch.Tensor]:
        x = tensors[which]
        far = torch.empty_strided(
            x.shape, (1,) * (x.dim() - 1) + (step,), dtype=x.dtype, device="meta"
        )
        return tensors | {which: far}

    def called(step: int) -> None:
        given = strided(step)
        function(given["q"], given["k"], given["v"], bias=given["bias"])

    with pytest.raises(ValueError, match=words):
        called(2**31 // 63 + 1)
    called(2**25)
