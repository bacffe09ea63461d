"""Trees for tests of passes: a scope to parse them in, values for its names, and evaluation at many
points at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import HealthCheck, settings

from kgen.expr.nodes import FIRST_AT_LEAST, Node, Read, Type, Var, transform
from kgen.expr.parse import parse_expression
from kgen.expr.scope import BufferType, Scope
from kgen.expr.text_checks import ExpressionError
from kgen.verify import evaluate as walker

INT, LONG, FLOAT, BOOL = Type.INT, Type.LONG, Type.FLOAT, Type.BOOL

settings.register_profile(
    "passes",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
bounded = settings.get_profile("passes")
"""Settings of hypothesis: the same few examples in every run."""

POSITIVE = frozenset({"window", "dilation", "cap"})
"""Parameters of the scope that are known to be greater than zero."""
INTEGERS = (
    "b",
    "h",
    "q_idx",
    "kv_idx",
    "B",
    "HQ",
    "HKV",
    "SQ",
    "SK",
    "window",
    "dilation",
    "offset",
)
REALS = ("cap", "gain")
BUFFERS = {
    "slopes": BufferType(FLOAT, 1),  # [HQ]
    "rows": BufferType(FLOAT, 1),  # [SQ]
    "columns": BufferType(FLOAT, 1),  # [SK]
    "bias": BufferType(FLOAT, 3),  # [HQ, SQ, SK]
    "table": BufferType(FLOAT, 2),  # [HQ, 5]
    "doc": BufferType(INT, 1),  # [SQ], sorted
    "docs": BufferType(INT, 2),  # [B, SK], sorted
    "kind": BufferType(INT, 1),  # [SK], in any order
    "lens": BufferType(INT, 1),  # [B]
}
SORTED = frozenset({"doc", "docs"})
SCOPE = Scope(
    {"score": FLOAT} | dict.fromkeys(INTEGERS, INT) | dict.fromkeys(REALS, FLOAT), BUFFERS
)


def words(text: str) -> list[str]:
    """Return the alternatives of a grammar."""
    return text.split()


def score(text: str) -> Node:
    """Parse a score_mod."""
    return parse_expression(text, SCOPE, FLOAT)


def mask(text: str) -> Node:
    """Parse a mask_mod."""
    return parse_expression(text, SCOPE, BOOL)


def index(text: str) -> Node:
    """Parse an integer expression."""
    return parse_expression(text, SCOPE, INT)


def divides(text: str) -> bool:
    """True if no divisor of an integer is always zero."""
    try:
        index(text)
    except ExpressionError as error:
        return error.code != "zero-division"
    return True


def evaluate(node: Node, env: Mapping[str, Any]) -> torch.Tensor:
    """Return the value of a tree in int64 and float64.

    Operands broadcast; searches of sorted buffers are executed.
    """
    searched: dict[str, Any] = {}

    def search(inner: Node) -> Node:
        if not (isinstance(inner, Read) and inner.buffer.endswith(FIRST_AT_LEAST)):
            return inner
        *leading, value = (walker.evaluate(i, {**env, **searched}, torch) for i in inner.indices)
        row = env[inner.buffer.removesuffix(FIRST_AT_LEAST)]
        for i in leading:
            row = row[int(i)]
        name = f"search_{len(searched)}"
        searched[name] = torch.searchsorted(row.contiguous(), value.contiguous())
        return Var(name, INT)

    # torch would turn Python numbers into float32.
    env = {
        n: torch.tensor(v, dtype=torch.float64) if isinstance(v, float) else v
        for n, v in env.items()
    }
    node = transform(node, search)
    return walker.evaluate(node, {**env, **searched}, torch)


def draw_env(seed: int, sq: int, sk: int, heads: int = 2, batches: int = 2) -> dict[str, Any]:
    """Draw a value for every name of the scope, except for the score and the indices."""
    make = torch.Generator().manual_seed(seed)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=make)

    return {
        "B": batches,
        "HQ": heads,
        "HKV": 1,
        "SQ": sq,
        "SK": sk,
        "inf": float("inf"),
        "window": int(whole(1, 6)),
        "dilation": int(whole(1, 4)),
        "offset": int(whole(-6, 6)),
        "cap": float(real().abs() + 0.5),
        "gain": float(real()),
        "slopes": real(heads),
        "rows": real(sq),
        "columns": real(sk),
        "bias": real(heads, sq, sk),
        "table": real(heads, 5),
        "doc": whole(-1, 3, sq).sort().values,
        "docs": whole(0, 3, batches, sk).sort().values,
        "kind": whole(-1, 2, sk),
        "lens": whole(0, sk + 1, batches),
    }


def grid(sq: int, sk: int) -> dict[str, torch.Tensor]:
    """Return every pair of positions."""
    return {"q_idx": torch.arange(sq)[:, None], "kv_idx": torch.arange(sk)[None, :]}
