"""Pass: rewrite `score_mod` for a base-2 online softmax.

    log2(e) * score_mod(score) = multiplier * core + bias     + log2(e) * row_rest
                                 `--- computed in the loop ---'

Here `score = scale * qk`. The three steps are exact in real arithmetic:

*Drop.* Softmax is invariant to a term that is added to a whole row. If
`score_mod(q_idx, kv_idx) - score_mod(q_start, kv_idx)` does not depend on the key, the loop
evaluates the term at `q_start`. That is the first row of the tile. ALiBi's
`slope * (kv_idx - q_idx)` becomes the column vector `slope * (kv_idx - q_start)`. The difference is
`row_rest`, which only the log-sum-exp needs. Without the row's term, `slope * kv_idx` would be so
large at long lengths that fp32 rounds the score away. Relative to the tile it is small wherever the
softmax has weight.

With `exact`, only terms that depend on no key are dropped. Terms relative to a tile differ between
kernels with different tiles. Backward would not reproduce the scores of forward bit for bit.

*Fold.* Terms that are affine in the score become one multiply-add: `multiplier` includes the
softmax scale, log2(e) and the slope.

*Peel.* For `c * f(score)` with a positive scalar `c`, the factor moves into `multiplier` at no
cost: 30 * tanh(score /
30) costs the loop one tanh.
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
    """The dropped term of a row, in natural units: `lse` is the log-sum-exp of the loop plus this
    term.
    """
    positive: bool
    """True if `multiplier` is a positive number for a whole (b, h)."""
    finite: bool
    """True if no logit is -inf before masking: a row that has seen a key has a finite maximum."""

    @property
    def max_of_core(self) -> bool:
        """True if the row maximum may be taken of `core`."""
        return self.positive and self.bias is None


def softmax_form(score_mod: Node, algebra: Algebra, exact: bool = False) -> SoftmaxForm:
    """Return the form of a `score_mod` over `score, b, h, q_idx, kv_idx`.

    If the form leaves fp32 at scores where `score_mod` does not, it keeps `score_mod` as written.
    `exact` forms have the same bits in every kernel, whatever its tiles.
    """
    written = with_scores(score_mod)
    finite = not _may_be_infinite(score_mod, algebra)
    as_written = SoftmaxForm(written, LOG2E, None, None, positive=True, finite=finite)
    if not algebra.takes(score_mod):
        return as_written
    form = _form(score_mod, algebra, finite, exact)
    whole: Node = call("mul", form.multiplier, form.core)
    for term in (form.bias, form.row_rest and call("mul", LOG2E, form.row_rest)):
        whole = whole if term is None else call("add", whole, term)
    return form if algebra.stays_in_range(whole, call("mul", LOG2E, written)) else as_written


def with_scores(node: Node) -> Node:
    """Substitute the score of the loop, `qk * scale`."""
    return substitute(node, {SCORE: call("mul", QK, SCALE)})


def _form(score_mod: Node, algebra: Algebra, finite: bool, exact: bool) -> SoftmaxForm:
    score = algebra.symbol(SCORE)
    expr = algebra.to_sympy(score_mod)
    scored = sp.Add(*[t for t in sp.Add.make_args(expr) if t.has(score)])
    bias, row_rest = _drop(expr - scored, algebra, exact)

    scale, log2e = algebra.symbol(SCALE), algebra.symbol(LOG2E)
    slope, offset = scored.diff(score), scored.subs(score, 0)
    # A derivative without `score` does not prove that a value is affine (the derivative of `floor`
    # is zero). Compare the values instead. A derivative with `score` may also add up, as in score *
    # floor(score).
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


def _drop(bias: Any, algebra: Algebra, exact: bool) -> tuple[Any, Any]:
    """Split the terms added to the score into those of the loop and those of the log-sum-exp
    only.
    """
    kv, q, q_start = (algebra.symbol(v) for v in (KV_IDX, Q_IDX, Q_START))
    if bias.has(algebra.symbol(INF)):
        return bias, sp.Integer(0)  # -inf on a whole row hides it, which the softmax must see
    if not bias.has(kv):
        return sp.Integer(0), bias
    if exact:
        terms = sp.Add.make_args(bias)
        of_keys, of_rows = (
            sp.Add(*(t for t in terms if t.has(kv) is moves)) for moves in (True, False)
        )
        return algebra.collected(of_keys), algebra.collected(of_rows)
    # The expression as written is separable: keep its form, at the first row of the tile.
    if (
        bias.has(q)
        and _is_finite_in_each_row(bias, q)
        and (rest := _separated(bias, algebra)) is not None
    ):
        return bias.subs(q, q_start), algebra.collected(rest)
    # Otherwise separate term by term, as written. Expanded, (kv_idx - q_idx)**2 would be a
    # difference of squares of positions, in which fp32 has no digits left.
    kept: list[Any] = []
    dropped: list[Any] = []
    for term in _terms(bias, algebra):
        if not _is_finite_in_each_row(term, q):
            # Another row of the tile may have no keys, and the term may be infinite there.
            (kept if term.has(kv) else dropped).append(term)
            continue
        rest = _separated(term, algebra)
        kept.append(term if rest is None else term.subs(q, q_start))
        dropped.append(0 if rest is None else rest)
    row_rest = sp.Add(*dropped)
    return (
        (bias, row_rest)
        if row_rest == 0
        else (algebra.collected(sp.Add(*kept)), algebra.collected(row_rest))
    )


def _is_finite_in_each_row(expr: Any, q: Any) -> bool:
    """True if a value is finite for every q_idx. An element of a row, or a pole, may not be."""
    functions = [f for f in expr.atoms(sp.Function) if f.has(q)]
    powers = [p for p in expr.atoms(sp.Pow) if p.has(q)]
    names = [type(f).__name__.removeprefix("kgen_") for f in functions]
    smooth = all(n in TABLE and TABLE[n].finite is Finite.EVERYWHERE for n in names)
    return smooth and all(p.exp.is_positive for p in powers)


def _separated(bias: Any, algebra: Algebra) -> Any | None:
    """Return the change of a value from the first row of the tile; None if keys differ in it."""
    kv, q, q_start = (algebra.symbol(v) for v in (KV_IDX, Q_IDX, Q_START))
    rest = expanded(bias - bias.subs(q, q_start))
    return None if rest is None or rest.has(kv) else rest


def _terms(bias: Any, algebra: Algebra) -> list[Any]:
    """Return the terms of a sum, with scalar factors multiplied in."""
    terms: list[Any] = []
    for term in sp.Add.make_args(bias):
        factor, rest = _peel(term, algebra)
        terms += [factor * t for t in sp.Add.make_args(rest)]
    return terms


def peel_scalar(node: Node, algebra: Algebra, keep: tuple[Var, ...] = ()) -> tuple[Node, Node]:
    """Split a tree into a factor that is one number for a whole (b, h), and the rest.

    `keep` stays in the rest.
    """
    if not algebra.takes(node):
        return ONE, node
    factor, rest = (
        algebra.to_tree(part) for part in _peel(algebra.to_sympy(node), algebra, keep=keep)
    )
    return (
        (factor, rest) if algebra.stays_in_range(call("mul", factor, rest), node) else (ONE, node)
    )


def _peel(
    expr: Any, algebra: Algebra, positive: bool = False, keep: tuple[Var, ...] = ()
) -> tuple[Any, Any]:
    """Split a product into its scalar factors (with `positive`, only positive ones) and the
    rest.
    """
    if expr == 0:
        return sp.Integer(0), sp.Integer(1)
    factors = [
        f
        for f in sp.Mul.make_args(expr)
        if _scalar(f, algebra, keep) and (f.is_positive or not positive)
    ]
    factor = sp.Mul(*factors)
    rest = expr / factor
    sizes = {abs(term.as_coeff_Mul()[0]) for term in sp.Add.make_args(rest)}
    if len(sizes) == 1 and not positive:
        # Also for 0.01 - 0.01 * t**2: without the factor, the gradient is larger where it is
        # rounded to 16 bits.
        size = sizes.pop()
        factor, rest = factor * size, sp.Add(*(term / size for term in sp.Add.make_args(rest)))
    return factor, rest


def _scalar(expr: Any, algebra: Algebra, keep: tuple[Var, ...] = ()) -> bool:
    """True if a value is one number for a whole (b, h)."""
    return not any(expr.has(algebra.symbol(v)) for v in (Q_IDX, KV_IDX, SCORE, QK, Q_START, *keep))


def _times(factor: Any, expr: Any) -> Any:
    """Return the product. A sum of several terms is not expanded."""
    if expr.is_Add:
        return sp.Mul(factor, expr, evaluate=False)
    return factor * expr


def _may_be_infinite(node: Node, algebra: Algebra) -> bool:
    """True if a logit may be -inf although the score is finite.

    The contract makes terms of a whole row finite: -inf there would be a mask, which belongs in
    `mask_mod`.
    """
    if node == INF:
        return True
    if isinstance(node, Read) and KV_IDX.name in variables(node):
        return True
    if isinstance(node, Call) and variables(node) & {KV_IDX.name, SCORE.name}:
        finite = TABLE[node.fn].finite
        if finite is Finite.UP_TO_OVERFLOW:
            return True
        divisor = node.args[1] if node.fn == "div" else None
        if finite is Finite.AWAY_FROM_POLES and not (
            divisor and algebra.to_sympy(divisor).is_nonzero
        ):
            return True
    return any(_may_be_infinite(child, algebra) for child in children(node))
