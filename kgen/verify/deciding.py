"""What in an expression decides something, and which way: comparisons, truth values that are read, min, max and abs.

A comparison that is true in every pair of positions that a kernel is tried on could as well be left out of the kernel.
One that is false somewhere need not decide anything there either, where another part hides the pair anyway. So each is
replaced by what it could have been: where the result then is another, it decided.
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
    """The nodes that take one of two ways, each once."""
    return tuple(node for node in distinct(tree) if _decides(node))


def _decides(node: Node) -> bool:
    if isinstance(node, Call) and node.fn in (*_EITHER, "abs"):
        return True
    joining = isinstance(node, Call) and node.fn in _JOINING
    return node.type is Type.BOOL and not isinstance(node, Const) and not joining


def ways(node: Node) -> tuple[Node, Node]:
    """What a decision could be instead: of a truth value true and false, of the others one argument or the other."""
    if node.type is Type.BOOL:
        return Const(True, Type.BOOL), Const(False, Type.BOOL)
    assert isinstance(node, Call)
    if node.fn == "abs":
        (x,) = node.args
        return x, Call("neg", (x,), x.type)
    one, other = node.args
    return one, other


def edges(trees: Iterable[Node], name: str) -> tuple[int, ...]:
    """The integers about the constants that a buffer or a param is compared with, in order."""
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
    """Which of its `ways` a node of the tree takes in a place, of those in `where`, in which the other would differ."""

    def value(of: Node) -> Tensor:
        found: Tensor = evaluate(of, env, torch).expand(shape)
        return found

    whole = value(tree)
    others = [value(substitute(tree, {node: way})) for way in ways(node)]
    matters = where & ~torch.isclose(others[0].double(), others[1].double(), rtol=1e-6, equal_nan=True)
    taken = [torch.isclose(other.double(), whole.double(), rtol=1e-6, equal_nan=True) for other in others]
    return {way for way in (0, 1) if bool((matters & taken[way]).any())}
