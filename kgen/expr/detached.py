"""Pass: replace `detach(x)` by x in expressions that are not differentiated further."""

from __future__ import annotations

from kgen.expr.nodes import Call, Node, transform


def without_detach(tree: Node) -> Node:
    """Return the tree without `detach`."""
    return transform(tree, _operand)


def _operand(node: Node) -> Node:
    return node.args[0] if isinstance(node, Call) and node.fn == "detach" else node
