"""Index expressions as eager PyTorch: where the launcher scatters a gradient that the kernel kept per row."""

from __future__ import annotations

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Var
from kgen.expr.spelling import ATOM
from kgen.targets.code import TORCH, Code, Name, number, op, row, spell


def torch_index(node: Node) -> str:
    """An integer expression over tensors `b, h, q_idx, kv_idx`."""
    return spell(_tensor(node), TORCH)


def _tensor(node: Node) -> Code:
    """An expression that is a tensor even where it is a constant."""
    found = _value(node)
    # Not torch.tensor: that copies from the host, and waits for the device.
    return op("torch.full((), {0}, device=q.device)", found) if isinstance(node, Const) else found


def _value(node: Node) -> Code:
    """An expression as an operator takes it, which Python's numbers are good enough for."""
    if isinstance(node, Const):
        return number(node)
    if isinstance(node, Var):
        return Name(node.name)
    if isinstance(node, Read):
        holes = ", ".join(f"{{{at}}}" for at in range(len(node.indices) + 1))
        return op(f"_read({holes})", node.buffer, *map(_tensor, node.indices))
    of = TABLE[node.fn].spelled[TORCH]
    if of.binds == ATOM:
        return row(node.fn, *map(_tensor, node.args))
    return row(node.fn, *(_operand(a, of.operand) for a in node.args))


def _operand(node: Node, context: int) -> Code:
    """An operand, in brackets also where it binds as its operator does: `(a + b) - c`."""
    found = _value(node)
    as_tight = isinstance(node, Call) and TABLE[node.fn].spelled[TORCH].binds == context
    return op("({0})", found) if as_tight else found
