"""Index expressions of launchers in PyTorch."""

from __future__ import annotations

import pytest

from kgen.expr.nodes import Type
from kgen.expr.parse import parse_expression
from kgen.expr.scope import BufferType, Scope
from kgen.kernels.attention.targets.triton.torch_indices import torch_index


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("h", "h"),
        ("3", "torch.full((), 3, device=q.device)"),
        ("h + 3 * -q", "h + 3 * -q"),
        # Operands with the same precedence as their operator are in parentheses, on either side.
        ("h + q - k", "(h + q) - k"),
        ("h - (q - k)", "h - (q - k)"),
        ("(h + q) * k", "(h + q) * k"),
        ("h // 2", "torch.div(h, torch.full((), 2, device=q.device), rounding_mode='floor')"),
        ("min(h + q - 1, 63)", "torch.minimum((h + q) - 1, torch.full((), 63, device=q.device))"),
        (
            "where(h < 2 and q < 3, h, 0)",
            "torch.where((h < 2) & (q < 3), h, torch.full((), 0, device=q.device))",
        ),
        ("table[h, 0]", "_read(table, h, torch.full((), 0, device=q.device))"),
    ],
)
def test_indices_are_tensors(text: str, written: str) -> None:
    scope = Scope(dict.fromkeys(("h", "q", "k"), Type.INT), {"table": BufferType(Type.INT, 2)})
    assert torch_index(parse_expression(text, scope, Type.INT)) == written
