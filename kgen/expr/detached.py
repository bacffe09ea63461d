"""Pass: `detach(x)` is x, in what is not differentiated any further."""

from __future__ import annotations

from kgen.expr.nodes import Call, Node, transform


def without_detach(tree: Node) -> Node:
    """The same value, without what stops gradients."""
    return transform(tree, _operand)


def _operand(node: Node) -> Node:
    return node.args[0] if isinstance(node, Call) and node.fn == "detach" else node
