"""Find which nodes of an expression decide its result: comparisons, truth values that are read,
min, max and abs.

A kernel without some comparison passes if that comparison is true in all tested pairs of positions.
A false comparison decides nothing if another part of the mask hides the pair. So each node is
replaced by its alternatives. The node decides where the result changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kgen.expr.nodes import Call, Const, Node, Type, distinct, reads, substitute, variables
from kgen.verify.evaluate import evaluate

_COMPARING = ("lt", "le", "gt", "ge", "eq", "ne")
_JOINING = ("and", "or", "not", "where")
_EITHER = ("min", "max")


def decisions(tree: Node) -> tuple[Node, ...]:
    """Return the nodes with two alternatives, each once."""
    return tuple(node for node in distinct(tree) if _decides(node))


def _decides(node: Node) -> bool:
    if isinstance(node, Call) and node.fn in (*_EITHER, "abs"):
        return True
    joining = isinstance(node, Call) and node.fn in _JOINING
    return node.type is Type.BOOL and not isinstance(node, Const) and not joining


def ways(node: Node) -> tuple[Node, Node]:
    """Return the two alternatives of a node: true and false for a truth value, else either
    argument.
    """
    if node.type is Type.BOOL:
        return Const(True, Type.BOOL), Const(False, Type.BOOL)
    assert isinstance(node, Call)
    if node.fn == "abs":
        (x,) = node.args
        return x, Call("neg", (x,), x.type)
    one, other = node.args
    return one, other


def edges(trees: Iterable[Node], name: str) -> tuple[int, ...]:
    """Return, in order, the integers around the constants that a buffer or a parameter is compared
    with.
    """
    found = set()
    for node in (n for tree in trees for n in distinct(tree)):
        if isinstance(node, Call) and node.fn in (*_COMPARING, *_EITHER):
            names = {*variables(node), *(read.buffer for read in reads(node))}
            constants = [int(a.value) for a in node.args if isinstance(a, Const)]
            found |= {c + d for c in constants for d in (-1, 0, 1) if name in names}
    return tuple(sorted(found))


def decided(
    tree: Node, node: Node, env: Mapping[str, Any], shape: tuple[int, ...], where: Tensor
) -> set[int]:
    """Return which of its `ways` a node takes at places in `where` at which the other way changes
    the result.
    """

    def value(of: Node) -> Tensor:
        found: Tensor = evaluate(of, env, torch).expand(shape)
        return found

    whole = value(tree)
    others = [value(substitute(tree, {node: way})) for way in ways(node)]
    matters = where & ~torch.isclose(
        others[0].double(), others[1].double(), rtol=1e-6, equal_nan=True
    )
    taken = [
        torch.isclose(other.double(), whole.double(), rtol=1e-6, equal_nan=True) for other in others
    ]
    return {way for way in (0, 1) if bool((matters & taken[way]).any())}
