"""Pass: bring `score_mod` into the form that a base-2 online softmax wants.

    log2(e) * score_mod(score) = multiplier * core + bias     + log2(e) * row_rest
                                 `--- what the inner loop computes ---'

with `score = scale * qk`. Three steps, each exact in real arithmetic:

*Drop.* Softmax does not see what is added to a whole row. Where `score_mod(q_idx, kv_idx) -
score_mod(q_start, kv_idx)` does not depend on the key, the loop evaluates the term at `q_start`, the tile's
first row, instead of at `q_idx`: ALiBi's `slope * (kv_idx - q_idx)` becomes the column vector `slope *
(kv_idx - q_start)`. The difference is `row_rest`, which only the log-sum-exp needs. (Dropping the row's term
altogether would leave `slope * kv_idx`, which at long lengths is so large that fp32 rounds the score away;
relative to the tile it stays small wherever the softmax has weight.)

*Fold.* What is affine in the score becomes one multiply-add: `multiplier` takes the softmax scale, log2(e)
and the slope.

*Peel.* Of `c * f(score)` with a positive scalar `c` the factor moves into `multiplier`, where it is free: 30
* tanh(score / 30) costs the loop one tanh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy as sp

from kgen.expr.algebra import LOG2E, Algebra, call, expanded, vanishes
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, children, substitute, variables
from kgen.expr.rows import Finite

QK = Var("qk", Type.FLOAT)
SCALE = Var("scale", Type.FLOAT)
Q_IDX = Var("q_idx", Type.INT)
KV_IDX = Var("kv_idx", Type.INT)
Q_START = Var("q_start", Type.INT)
SCORE = Var("score", Type.FLOAT)
ONE = Const(1, Type.INT)
INF = Var("inf", Type.FLOAT)


@dataclass(frozen=True)
class SoftmaxForm:
    """`score_mod` as the loop computes it: base-2 logits are `multiplier * core + bias`."""

    core: Node
    multiplier: Node
    bias: Node | None
    row_rest: Node | None
    """What was dropped from the row, in natural units: `lse` is the loop's log-sum-exp plus this."""
    positive: bool
    """`multiplier` is a positive number for a whole (b, h)."""
    finite: bool
    """No logit can be -inf before masking: a row has a finite maximum as soon as it has seen a key."""

    @property
    def max_of_core(self) -> bool:
        """Whether the row maximum may be taken of `core` itself."""
        return self.positive and self.bias is None


def softmax_form(score_mod: Node, algebra: Algebra) -> SoftmaxForm:
    """The form of a `score_mod` over `score, b, h, q_idx, kv_idx`; `score_mod` as written where that form leaves fp32
    at scores for which `score_mod` does not."""
    written = with_scores(score_mod)
    finite = not _may_be_infinite(score_mod, algebra)
    as_written = SoftmaxForm(written, LOG2E, None, None, positive=True, finite=finite)
    if not algebra.takes(score_mod):
        return as_written
    form = _form(score_mod, algebra, finite)
    whole: Node = call("mul", form.multiplier, form.core)
    for term in (form.bias, form.row_rest and call("mul", LOG2E, form.row_rest)):
        whole = whole if term is None else call("add", whole, term)
    return form if algebra.stays_in_range(whole, call("mul", LOG2E, written)) else as_written


def with_scores(node: Node) -> Node:
    """The value with the score as the loop has it, `qk * scale`."""
    return substitute(node, {SCORE: call("mul", QK, SCALE)})


def _form(score_mod: Node, algebra: Algebra, finite: bool) -> SoftmaxForm:
    score = algebra.symbol(SCORE)
    expr = algebra.to_sympy(score_mod)
    scored = sp.Add(*[t for t in sp.Add.make_args(expr) if t.has(score)])
    bias, row_rest = _drop(expr - scored, algebra)

    scale, log2e = algebra.symbol(SCALE), algebra.symbol(LOG2E)
    slope, offset = scored.diff(score), scored.subs(score, 0)
    # A derivative without `score` does not make a value affine (that of `floor` is zero): compare the value
    # itself. Nor does one with it, though it may add up: score * floor(score).
    core: Node
    if not slope.has(score) and vanishes(scored - slope * score - offset):
        bias += offset
        core, multiplier = QK, slope * scale * log2e
    else:
        factor, rest = _peel(scored, algebra, positive=True)
        core, multiplier = with_scores(algebra.to_tree(rest)), factor * log2e
    positive = _scalar(multiplier, algebra) and bool(multiplier.is_positive)
    tree = algebra.to_tree
    return SoftmaxForm(
        core=core,
        multiplier=tree(multiplier),
        bias=tree(_times(log2e, bias)) if bias != 0 else None,
        row_rest=tree(row_rest) if row_rest != 0 else None,
        positive=positive,
        finite=finite,
    )


def _drop(bias: Any, algebra: Algebra) -> tuple[Any, Any]:
    """Split what is added to the score into what the loop adds and what only the log-sum-exp sees."""
    kv, q, q_start = (algebra.symbol(v) for v in (KV_IDX, Q_IDX, Q_START))
    if bias.has(algebra.symbol(INF)):
        return bias, sp.Integer(0)  # minus infinity on a whole row hides it, and softmax does see that
    if not bias.has(kv):
        return sp.Integer(0), bias
    # Separable as the user wrote it: keep that form, at the tile's first row.
    if bias.has(q) and _is_finite_in_each_row(bias, q) and (rest := _separated(bias, algebra)) is not None:
        return bias.subs(q, q_start), algebra.collected(rest)
    # Or term by term, as they are written: products of sums that are multiplied out, (kv_idx - q_idx)**2, would be
    # squares of positions, in whose difference fp32 has no digits left.
    kept: list[Any] = []
    dropped: list[Any] = []
    for term in _terms(bias, algebra):
        if not _is_finite_in_each_row(term, q):
            # Another row of the tile may be one without keys, where this is infinite.
            (kept if term.has(kv) else dropped).append(term)
            continue
        rest = _separated(term, algebra)
        kept.append(term if rest is None else term.subs(q, q_start))
        dropped.append(0 if rest is None else rest)
    row_rest = sp.Add(*dropped)
    return (
        (bias, row_rest) if row_rest == 0 else (algebra.collected(sp.Add(*kept)), algebra.collected(row_rest))
    )


def _is_finite_in_each_row(expr: Any, q: Any) -> bool:
    """True if a value is finite whatever row q_idx is. An element of a row's own need not be, nor does a pole."""
    functions = [f for f in expr.atoms(sp.Function) if f.has(q)]
    powers = [p for p in expr.atoms(sp.Pow) if p.has(q)]
    names = [type(f).__name__.removeprefix("kgen_") for f in functions]
    smooth = all(n in TABLE and TABLE[n].finite is Finite.EVERYWHERE for n in names)
    return smooth and all(p.exp.is_positive for p in powers)


def _separated(bias: Any, algebra: Algebra) -> Any | None:
    """By how much a value changes from the tile's first row, where that is the same for all keys."""
    kv, q, q_start = (algebra.symbol(v) for v in (KV_IDX, Q_IDX, Q_START))
    rest = expanded(bias - bias.subs(q, q_start))
    return None if rest is None or rest.has(kv) else rest


def _terms(bias: Any, algebra: Algebra) -> list[Any]:
    """What a value is the sum of, with scalar factors multiplied in."""
    terms: list[Any] = []
    for term in sp.Add.make_args(bias):
        factor, rest = _peel(term, algebra)
        terms += [factor * t for t in sp.Add.make_args(rest)]
    return terms


def peel_scalar(node: Node, algebra: Algebra, keep: tuple[Var, ...] = ()) -> tuple[Node, Node]:
    """A tree as the product of what is one number for a whole (b, h), and the rest; `keep` stays in the
    rest."""
    if not algebra.takes(node):
        return ONE, node
    factor, rest = (algebra.to_tree(part) for part in _peel(algebra.to_sympy(node), algebra, keep=keep))
    return (factor, rest) if algebra.stays_in_range(call("mul", factor, rest), node) else (ONE, node)


def _peel(expr: Any, algebra: Algebra, positive: bool = False, keep: tuple[Var, ...] = ()) -> tuple[Any, Any]:
    """The scalar factors of a product (only the positive ones, if that is asked), and the rest."""
    if expr == 0:
        return sp.Integer(0), sp.Integer(1)
    factors = [
        f for f in sp.Mul.make_args(expr) if _scalar(f, algebra, keep) and (f.is_positive or not positive)
    ]
    factor = sp.Mul(*factors)
    rest = expr / factor
    sizes = {abs(term.as_coeff_Mul()[0]) for term in sp.Add.make_args(rest)}
    if len(sizes) == 1 and not positive:
        # Of 0.01 - 0.01 * t**2 as well: a gradient that is small need not be where it is rounded to 16 bits.
        size = sizes.pop()
        factor, rest = factor * size, sp.Add(*(term / size for term in sp.Add.make_args(rest)))
    return factor, rest


def _scalar(expr: Any, algebra: Algebra, keep: tuple[Var, ...] = ()) -> bool:
    """Whether a value is one number for a whole (b, h)."""
    return not any(expr.has(algebra.symbol(v)) for v in (Q_IDX, KV_IDX, SCORE, QK, Q_START, *keep))


def _times(factor: Any, expr: Any) -> Any:
    """The product, unexpanded where `expr` is a sum of several terms over a common shape."""
    if expr.is_Add:
        return sp.Mul(factor, expr, evaluate=False)
    return factor * expr


def _may_be_infinite(node: Node, algebra: Algebra) -> bool:
    """Whether a logit may be -inf although the score is finite.

    What is the same for a whole row is finite by contract: -inf there would be a mask, and masks are `mask_mod`'s.
    """
    if node == INF:
        return True
    if isinstance(node, Read) and KV_IDX.name in variables(node):
        return True
    if isinstance(node, Call) and variables(node) & {KV_IDX.name, SCORE.name}:
        finite = TABLE[node.fn].finite
        if finite is Finite.UP_TO_OVERFLOW and SCORE.name in variables(node):
            return True
        divisor = node.args[1] if node.fn == "div" else None
        if finite is Finite.AWAY_FROM_POLES and not (divisor and algebra.to_sympy(divisor).is_nonzero):
            return True
    return any(_may_be_infinite(child, algebra) for child in children(node))
