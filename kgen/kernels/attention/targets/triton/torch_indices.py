"""Index expressions as eager PyTorch: where the launcher scatters a gradient that the kernel kept per row."""

from __future__ import annotations

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Const, Node, Read, Var
from kgen.expr.spelling import ATOM


def torch_index(node: Node) -> str:
    """An integer expression over tensors `b, h, q_idx, kv_idx`; constants become tensors where PyTorch wants one."""
    return _spelled(node, 0)


def _spelled(node: Node, context: int) -> str:
    if isinstance(node, Const):
        # Not torch.tensor: that copies from the host, and waits for the device.
        return f"torch.full((), {node.value!r}, device=q.device)" if context == 0 else repr(node.value)
    if isinstance(node, Var):
        return node.name
    if isinstance(node, Read):
        return f"_read({node.buffer}, {', '.join(_spelled(i, 0) for i in node.indices)})"
    spelling = TABLE[node.fn].spelled["torch"]
    infix = spelling.binds != ATOM
    args = [_spelled(a, spelling.operand + 1 if infix else 0) for a in node.args]
    text = spelling.form.format(*args)
    return f"({text})" if infix and spelling.binds < context else text
