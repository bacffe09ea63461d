"""Pass: exact derivatives of an expression, with respect to a name or to a buffer read.

Repeated reads of one buffer are separate variables: each distinct read has its own derivative, and the
gradient of the buffer is the sum over its reads.
"""

from __future__ import annotations

from typing import Any

import sympy as sp

from kgen.expr.algebra import Algebra
from kgen.expr.nodes import Const, Node, Read, Var
from kgen.expr.softmax_form import QK, SCALE, SCORE


def derivative(node: Node, wrt: Var | Read, algebra: Algebra) -> Node:
    """d(node) / d(wrt); `Const(0)` where it does not depend on `wrt`."""
    return algebra.to_tree(_derivative(node, wrt, algebra))


def differentiate(score_mod: Node, wrt: Var | Read, algebra: Algebra) -> Node:
    """d(score_mod) / d(wrt) as a tree over `qk`, with `score = scale * qk` put in as the forward loop has it.

    `Const(0)` where it does not depend on `wrt`.
    """
    score, qk, scale = (algebra.symbol(v) for v in (SCORE, QK, SCALE))
    return algebra.to_tree(_derivative(score_mod, wrt, algebra).subs(score, scale * qk))


def _derivative(node: Node, wrt: Var | Read, algebra: Algebra) -> Any:
    expr, target = algebra.to_sympy(node), algebra.to_sympy(wrt)
    stand_in = sp.Symbol("wrt", real=True)
    return expr.xreplace({target: stand_in}).diff(stand_in).xreplace({stand_in: target})


def is_one(node: Node) -> bool:
    """Whether a tree is the constant 1, so that multiplying by it can be left out."""
    return isinstance(node, Const) and node.value == 1


def is_zero(node: Node) -> bool:
    """Whether a tree is the constant 0."""
    return isinstance(node, Const) and node.value == 0
