"""Pass: exact derivatives of `score_mod`, with respect to `score` and to a buffer read.

Repeated reads of one buffer are separate variables: each distinct read has its own derivative, and the
gradient of the buffer is the sum over its reads.
"""

from __future__ import annotations

import sympy as sp

from kgen.expr.algebra import Algebra
from kgen.expr.nodes import Const, Node, Read, Var
from kgen.expr.softmax_form import QK, SCALE, SCORE


def differentiate(score_mod: Node, wrt: Var | Read, algebra: Algebra) -> Node:
    """d(score_mod) / d(wrt) as a tree over `qk`, with `score = scale * qk` put in as the forward loop has it.

    `Const(0)` where it does not depend on `wrt`.
    """
    expr = algebra.to_sympy(score_mod)
    target = algebra.to_sympy(wrt)
    stand_in = sp.Symbol("wrt", real=True)
    derivative = expr.xreplace({target: stand_in}).diff(stand_in).xreplace({stand_in: target})
    score, qk, scale = (algebra.symbol(v) for v in (SCORE, QK, SCALE))
    return algebra.to_tree(derivative.subs(score, scale * qk))


def is_one(node: Node) -> bool:
    """Whether a tree is the constant 1, so that multiplying by it can be left out."""
    return isinstance(node, Const) and node.value == 1


def is_zero(node: Node) -> bool:
    """Whether a tree is the constant 0."""
    return isinstance(node, Const) and node.value == 0
