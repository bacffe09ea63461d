"""Evaluation of expression trees on plain PyTorch, for all references.

It uses the tree as written, so a wrong simplification cannot hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kgen.expr.functions import TABLE, WRAPPING
from kgen.expr.nodes import Const, Node, Read, Type, Var, measured


def evaluate(node: Node, env: Mapping[str, Any], torch: Any, real: Any = None) -> Any:
    """Evaluate a tree by the `reference` column of the function table.

    `env` maps each variable to a number or a tensor, and each buffer to its tensor. Integers are
    int64; 32-bit ones wrap in two's complement. Reals have the dtype `real` (default: float64),
    truth values are bool. Operands broadcast. A buffer read out of range is zero, and negative
    indices do not wrap. The result is differentiable in `score` and in float buffers. Raises
    `KeyError` for a name that is not in `env`.
    """
    real = real or torch.float64
    dtypes = {
        Type.INT: torch.int64,
        Type.LONG: torch.int64,
        Type.FLOAT: real,
        Type.BOOL: torch.bool,
    }
    device = next((value.device for value in env.values() if hasattr(value, "device")), "cpu")

    def value(node: Node) -> Any:
        dtype = dtypes[node.type]
        if isinstance(node, Const):
            return torch.tensor(node.value, dtype=dtype, device=device)
        if isinstance(node, Var) and (length := measured(node.name)):
            buffer, axis = length
            return torch.tensor(env[buffer].shape[axis], dtype=dtype, device=device)
        if isinstance(node, Var):
            return torch.as_tensor(env[node.name], dtype=dtype, device=device)
        if isinstance(node, Read):
            return _read(env[node.buffer], [value(index) for index in node.indices], torch).to(
                dtype
            )
        args = [value(arg) for arg in node.args]
        if Type.FLOAT in (node.type, *(arg.type for arg in node.args)):
            # Promote first: torch computes int / int in its default dtype.
            args = [arg if arg.dtype == torch.bool else arg.to(real) for arg in args]
        result = TABLE[node.fn].reference(torch, *args).to(dtype)
        return (
            result.to(torch.int32).to(dtype)
            if node.type is Type.INT and node.fn in WRAPPING
            else result
        )

    return value(node)


def _read(buffer: Any, indices: list[Any], torch: Any) -> Any:
    inside = torch.ones((), dtype=torch.bool, device=buffer.device)
    for index, size in zip(indices, buffer.shape, strict=True):
        inside = inside & (index >= 0) & (index < size)
    zero = torch.zeros((), dtype=buffer.dtype, device=buffer.device)
    if buffer.numel() == 0:
        return zero.expand(inside.shape)
    safe = tuple(
        index.clamp(0, size - 1) for index, size in zip(indices, buffer.shape, strict=True)
    )
    return torch.where(inside, buffer[safe] if safe else buffer, zero)
