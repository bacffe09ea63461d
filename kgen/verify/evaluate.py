"""The value of an expression tree on plain PyTorch: what every reference is made of.

It walks the tree that the user wrote, so a wrong simplification cannot hide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kgen.expr.functions import TABLE, WRAPPING
from kgen.expr.nodes import Const, Node, Read, Type, Var, measured


def evaluate(node: Node, env: Mapping[str, Any], torch: Any, real: Any = None) -> Any:
    """The value of a tree through the table's `reference` column.

    `env` gives every variable a number or a tensor, and every buffer its tensor. Integers come as int64, and those of
    32 bits wrap as these do, two's complement; reals have the dtype `real` (float64 unless given), truth values are
    bool; operands broadcast. A buffer read out of range is zero, and negative indices do not wrap. Differentiable in
    `score` and in float buffers. Raises `KeyError` for a name that `env` does not have.
    """
    real = real or torch.float64
    dtypes = {Type.INT: torch.int64, Type.LONG: torch.int64, Type.FLOAT: real, Type.BOOL: torch.bool}
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
            return _read(env[node.buffer], [value(index) for index in node.indices], torch).to(dtype)
        args = [value(arg) for arg in node.args]
        if Type.FLOAT in (node.type, *(arg.type for arg in node.args)):
            # Promote before the operation: int / int would otherwise be computed in torch's default dtype.
            args = [arg if arg.dtype == torch.bool else arg.to(real) for arg in args]
        result = TABLE[node.fn].reference(torch, *args).to(dtype)
        return result.to(torch.int32).to(dtype) if node.type is Type.INT and node.fn in WRAPPING else result

    return value(node)


def _read(buffer: Any, indices: list[Any], torch: Any) -> Any:
    inside = torch.ones((), dtype=torch.bool, device=buffer.device)
    for index, size in zip(indices, buffer.shape, strict=True):
        inside = inside & (index >= 0) & (index < size)
    zero = torch.zeros((), dtype=buffer.dtype, device=buffer.device)
    if buffer.numel() == 0:
        return zero.expand(inside.shape)
    safe = tuple(index.clamp(0, size - 1) for index, size in zip(indices, buffer.shape, strict=True))
    return torch.where(inside, buffer[safe] if safe else buffer, zero)
