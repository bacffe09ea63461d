"""Pass: rewrite equivalent spellings to one canonical form, before planning.

`kv_idx <= q_idx`, `not (kv_idx > q_idx)` and `q_idx - kv_idx > -1` become `q_idx >= kv_idx`;
`where(mask, score, -inf)` becomes a mask; `score - s * (q_idx - kv_idx)` becomes
`score + s * (kv_idx - q_idx)`. The result is equal for every input, except for the order of
roundings. Comparisons of integers are assumed not to wrap, as the language states.

    masks       `not` on leaves only; integer comparisons have positions on one side; conditions in
                one order; places within one block, `q_idx % n >= kv_idx % n` with
                `q_idx // n == kv_idx // n`, as positions
    distances   `kv_idx - q_idx` as a factor, `q_idx - kv_idx` inside `abs`, which a causal mask
                removes
    quotients   `x >> 6`, `x // 8 // 8` and `x - x % 64` by `x // 64`
    sums        multiples of one factor by distances are one term; terms with the score come first
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, reduce

from kgen.expr.affine import POSITIONS, Affine, affine, is_large, order
from kgen.expr.algebra import call
from kgen.expr.detached import without_detach
from kgen.expr.fold import choice, decided, folded
from kgen.expr.left_out import without_minus_infinity
from kgen.expr.magnitudes import FAR
from kgen.expr.mask_form import (
    FALSE,
    MIRRORED,
    NEGATED,
    TRUE,
    all_of,
    any_of,
    conjuncts,
    disjuncts,
    normalize,
    without_negations,
)
from kgen.expr.nodes import (
    Call,
    Const,
    Node,
    Type,
    children,
    distinct,
    reads,
    rebuild,
    transform,
    variables,
    walk,
)
from kgen.expr.quotients import blocks, quotient, starts
from kgen.expr.softmax_form import KV_IDX, Q_IDX
from kgen.expr.unparse import show
from kgen.expr.wrapping import may_wrap

INEQUALITIES = ("lt", "le", "gt", "ge")
SIZES = frozenset({"SQ", "SK"})
LONGEST = 64
"""Largest number of terms of a sum that is sorted: a longer chain would exceed the nesting
limit.
"""


def canonical(
    trees: Mapping[str, Node], numbers: Mapping[Node, Node] | None = None
) -> dict[str, Node]:
    """Return `score_mod` and `mask_mod` in canonical form.

    `numbers` has the values of compile-time parameters, which decide conditions; elsewhere
    parameters keep their names.
    """
    # A mask has no gradient, so `detach` has no effect.
    given = {
        name: without_detach(tree) if name == "mask_mod" else tree for name, tree in trees.items()
    }
    found = {name: folded(tree, numbers or {}) for name, tree in given.items()}
    if "score_mod" in found:
        found["score_mod"], conditions = without_minus_infinity(found["score_mod"])
        if conditions:
            found["mask_mod"] = all_of(
                [found.get("mask_mod", TRUE), *map(without_detach, conditions)]
            )
    if "score_mod" in found:
        # The mask is rewritten later, so that the score can use all of its conditions.
        known = _distances(condition(found.get("mask_mod", TRUE)))
        found["score_mod"] = _without_abs(found["score_mod"], known)
    if "mask_mod" in found:
        found["mask_mod"] = _by_other_conditions(found["mask_mod"])
        found["mask_mod"] = condition(_within_blocks(condition(found["mask_mod"]), ()))
        if found["mask_mod"] == TRUE:
            del found["mask_mod"]
    if "score_mod" in found:
        found["score_mod"] = value(found["score_mod"])
    return found


def canonical_part(tree: Node, numbers: Mapping[Node, Node]) -> Node:
    """Return the canonical form of a part of an expression, before the rest of the expression
    changes it.
    """
    part = folded(without_detach(tree), numbers)
    return condition(part) if part.type is Type.BOOL else value(part)


# --- masks ------------------------


@lru_cache(256)
def condition(mask: Node) -> Node:
    """Return a bool in canonical form."""
    # Moving terms may leave an `abs` alone on its side, which then becomes two comparisons.
    return _condition(normalize(_condition(normalize(mask))))


def _condition(node: Node) -> Node:
    if not isinstance(node, Call):
        return node
    if node.fn in ("and", "or"):
        every = node.fn == "and"
        # Sort a whole chain at once: sorting at each link would be quadratic.
        apart = conjuncts if every else disjuncts
        parts = [p for a in apart(node) for p in apart(_condition(a))]
        parts = sorted(dict.fromkeys(parts), key=lambda part: _condition_order(part, every))
        return all_of(parts) if every else any_of(parts)
    if node.fn == "not":
        return _negated(node.args[0])
    args = tuple(value(a) for a in node.args)
    if node.fn in MIRRORED and all(a.type.integral for a in args):
        return _compared(node.fn, affine(args[0]) + affine(args[1]).times(-1), rebuild(node, args))
    if node.fn in MIRRORED and isinstance(args[0], Const):
        if isinstance(args[1], Const):
            return decided(node.fn, args[0].value, args[1].value)
        return Call(MIRRORED[node.fn], (args[1], args[0]), Type.BOOL)
    return choice(node, args) if node.fn == "where" else rebuild(node, args)


def _negated(node: Node) -> Node:
    if isinstance(node, Const):
        return FALSE if node == TRUE else TRUE
    if isinstance(node, Call) and node.fn == "not":
        return _condition(node.args[0])
    if isinstance(node, Call) and node.fn in ("and", "or"):
        parts = [call("not", a) for a in node.args]
        return _condition(call("or" if node.fn == "and" else "and", *parts))
    # For reals only == and != have an opposite, because of NaN.
    exact = isinstance(node, Call) and (
        node.fn in ("eq", "ne") or all(a.type.integral for a in node.args)
    )
    if isinstance(node, Call) and exact and node.fn in NEGATED:
        return _condition(Call(NEGATED[node.fn], node.args, Type.BOOL))
    return call("not", _condition(node))


def _within_blocks(node: Node, same: tuple[Node, ...]) -> Node:
    """Rewrite comparisons of places within a block as comparisons of positions, if both are in one
    block.

    With `x // n == y // n`, `x % n - y % n` is `x - y`. `same` has the equalities that hold.
    """
    if not isinstance(node, Call):
        return node
    if node.fn == "and":
        parts = conjuncts(node)
        same = (*same, *(p for p in parts if isinstance(p, Call) and p.fn == "eq"))
        return all_of([_within_blocks(part, same) for part in parts])
    if node.fn == "or":
        return any_of([_within_blocks(part, same) for part in disjuncts(node)])
    if node.fn not in MIRRORED or not all(a.type.integral for a in node.args):
        return node
    total = found = affine(node.args[0]) + affine(node.args[1]).times(-1)
    for equal in same:
        match equal:
            case Call(
                args=(Call(fn="floordiv", args=(x, n)), Call(fn="floordiv", args=(y, m)))
            ) if n == m:
                places = (call("mod", x, n), call("mod", y, n))
                first, second = (found.terms.get(place, 0) for place in places)
                if first and first == -second:
                    inside = affine(places[0]) + affine(places[1]).times(-1)
                    found += (affine(x) + affine(y).times(-1) + inside.times(-1)).times(first)
    return node if found == total else _compared(node.fn, found, node)


def _condition_order(node: Node, every: bool) -> tuple[bool, bool, bool, int, str]:
    """Return a sort key for conditions.

    With `every`, conditions that read buffers come first and those with alternatives last; for
    alternatives the order is reversed. Then one-sided conditions and short ones come first.
    """
    compound = isinstance(node, Call) and node.fn in ("and", "or")
    sides = variables(node) & {*POSITIONS}
    first = (compound, not reads(node)) if every else (bool(reads(node)), not compound)
    return *first, len(sides) == 2, sum(1 for _ in walk(node)), show(node)


def _compared(fn: str, total: Affine, written: Node) -> Node:
    """Compare a sum with zero: terms with positions on the left, the rest on the right."""
    total = starts(total) if fn in INEQUALITIES else blocks(starts(total))
    if is_large(total):
        return written
    if not total.terms:
        return decided(fn, total.number, 0)
    if fn in ("lt", "le"):
        total = total.times(-1)
    if fn in ("lt", "gt"):
        total += Affine({}, -1)  # above zero is at least one
    divisor = total.divisor()
    if fn in INEQUALITIES or total.number % divisor == 0:
        total = Affine({n: f // divisor for n, f in total.terms.items()}, total.number // divisor)
    left, right = _sides(total)
    if right.terms and abs(right.number) >= FAR:
        # the sum of this number and a size, parameter or element may not fit in 32 bits
        return written
    upper = left.terms[left.first()] < 0
    if upper:
        left, right = left.times(-1), right.times(-1)
    if fn in ("eq", "ne"):
        return _written(fn, left, right)
    if upper:
        return _below(left, right)
    return _above(left, right)


def _sides(total: Affine) -> tuple[Affine, Affine]:
    """Split a sum into the difference of two: positions with the sizes that offset them, and the
    rest.
    """
    both = total.of_positions() == {*POSITIONS}
    moving = [
        n
        for n in total.terms
        if variables(n) & {*POSITIONS} or (both and variables(n) and variables(n) <= SIZES)
    ]
    moving = moving or [total.first()]
    left = Affine({n: f for n, f in total.terms.items() if n in moving})
    rest = Affine({n: f for n, f in total.terms.items() if n not in moving}, total.number)
    return left, rest.times(-1)


def _above(left: Affine, right: Affine) -> Node:
    """Return left >= right."""
    if (right.terms or _has_both_signs(left)) and right.number == 1:
        return _written("gt", left, right + Affine({}, -1))
    return _written("ge", left, right)


def _below(left: Affine, right: Affine) -> Node:
    """Return left <= right."""
    if right.number == 0 and (right.terms or _has_both_signs(left)):
        return _written("le", left, right)
    return _written("lt", left, right + Affine({}, 1))


def _has_both_signs(left: Affine) -> bool:
    return {f > 0 for f in left.terms.values()} == {True, False}


def _written(fn: str, left: Affine, right: Affine) -> Node:
    if not right.terms and not right.number and _has_both_signs(left):
        # Sizes stay with the queries: they give the position of a query among the keys.
        moved = {n: f for n, f in left.terms.items() if f < 0 and not variables(n) <= SIZES}
        right, left = (
            Affine({n: -f for n, f in moved.items()}),
            left + Affine({n: -f for n, f in moved.items()}),
        )
    return Call(fn, (left.tree(), right.tree()), Type.BOOL)


# --- values ------------------------


def value(node: Node) -> Node:
    """Return a number in canonical form."""
    if not isinstance(node, Call):
        return rebuild(node, tuple(value(index) for index in children(node)))
    if node.fn == "where":
        test, a, b = node.args
        return choice(node, (_condition(test), value(a), value(b)))
    if node.type is Type.BOOL:
        return _condition(node)
    if node.type.integral:
        return _integer(node)
    if node.fn in ("add", "sub", "neg"):
        return _sum(node)
    return rebuild(node, tuple(value(a) for a in node.args))


def _integer(node: Call) -> Node:
    if node.fn in ("add", "sub", "neg"):
        total = affine(rebuild(node, tuple(value(a) for a in node.args)), expands=False)
        total = starts(total, expands=False)
        return node if is_large(total) or may_wrap(node) else total.tree()
    args = tuple(value(a) for a in node.args)
    if node.fn == "abs":
        (x,) = args
        return call("abs", _directed(x, 1))
    if node.fn in ("min", "max"):
        return call(node.fn, *sorted(args, key=lambda a: (isinstance(a, Const), order(a))))
    return quotient(Call(node.fn, args, node.type))


def _directed(x: Node, sign: int) -> Node:
    """Return a difference of positions as `q_idx - kv_idx`, or as `kv_idx - q_idx` for a negative
    sign.
    """
    total = affine(x)
    if may_wrap(x) or total.of_positions() != {*POSITIONS}:
        return x
    return total.times(sign if total.terms[total.first()] > 0 else -sign).tree()


def _by_other_conditions(mask: Node) -> Node:
    """Return a mask without each `abs` that another condition makes redundant.

    Facts come only from conditions written without `abs`, which stay as they are. So no condition
    is changed by its own consequences, and no two change each other.
    """
    parts = conjuncts(without_negations(mask))
    known = [fact for part in parts if not _has_abs(part) for fact in _distances(condition(part))]
    return all_of([_without_abs(part, known) for part in parts])


def _has_abs(node: Node) -> bool:
    return any(isinstance(part, Call) and part.fn == "abs" for part in distinct(node))


def _without_abs(node: Node, known: list[Affine]) -> Node:
    return transform(node, lambda part: _unsigned(part, known))


def _distances(mask: Node) -> list[Affine]:
    """Return the sums that the mask keeps at zero or above: q_idx - kv_idx for a causal mask."""
    above = [
        c
        for c in conjuncts(mask)
        if isinstance(c, Call) and c.fn in ("ge", "gt") and c.args[0].type.integral
    ]
    return [affine(c.args[0]) + affine(c.args[1]).times(-1) for c in above]


def _unsigned(node: Node, known: list[Affine]) -> Node:
    """Return a distance without `abs`, if the mask keeps it at zero or above."""
    if not isinstance(node, Call) or node.fn != "abs" or not node.type.integral:
        return node
    distance = affine(node.args[0])
    return next((d.tree() for d in known if distance in (d, d.times(-1))), node)


def _sum(node: Call) -> Node:
    """Return a sum of reals: multiples of one factor by distances are one term, terms with the
    score come first.
    """
    others: Counter[tuple[int, Node]] = Counter()
    slopes: dict[tuple[Node, ...], Affine] = {}
    for sign, term in _terms(node, 1):
        factors, distance = _slope(term)
        if distance is None:
            others[sign, term] += 1
        else:
            slopes[factors] = slopes.get(factors, Affine({})) + distance.times(sign)
    parts = [(sign, _times(count, term)) for (sign, term), count in others.items()]
    parts += [
        _term(factors, total) for factors, total in slopes.items() if total.terms or total.number
    ]
    if len(parts) > LONGEST:
        return rebuild(node, tuple(value(a) for a in node.args))
    if not parts:
        return Const(0.0, Type.FLOAT)
    (sign, first), *rest = sorted(parts, key=lambda part: (part[0] < 0, not _has_score(part[1])))
    return reduce(
        lambda total, part: call("add" if part[0] > 0 else "sub", total, part[1]),
        rest,
        first if sign > 0 else call("neg", first),
    )


def _times(count: int, term: Node) -> Node:
    return term if count == 1 else call("mul", Const(float(count), Type.FLOAT), term)


def _has_score(node: Node) -> bool:
    return "score" in variables(node)


def _terms(node: Node, sign: int) -> list[tuple[int, Node]]:
    match node:
        case Call("add", (a, b), Type.FLOAT):
            return _terms(a, sign) + _terms(b, sign)
        case Call("sub", (a, b), Type.FLOAT):
            return _terms(a, sign) + _terms(b, -sign)
        case Call("neg", (a,), Type.FLOAT):
            return _terms(a, -sign)
    return [(sign, value(node))]


def _slope(term: Node) -> tuple[tuple[Node, ...], Affine | None]:
    """Return the factors of a product with one sum of positions, and that sum with the sign;
    `((), None)` for any other.
    """
    sign, factors = _product(term)
    sums = [
        f
        for f in factors
        if f.type.integral
        and not may_wrap(f)
        and len(terms := affine(f).terms) > 0
        and {*terms} <= {Q_IDX, KV_IDX}
    ]
    if len(sums) != 1 or len(factors) == 1:
        return (), None
    return tuple(f for f in factors if f is not sums[0]), affine(sums[0]).times(sign)


def _product(node: Node) -> tuple[int, list[Node]]:
    match node:
        case Call("mul", (a, b), Type.FLOAT):
            (s, left), (t, right) = _product(a), _product(b)
            return s * t, left + right
        case Call("neg", (a,), Type.FLOAT):
            sign, factors = _product(a)
            return -sign, factors
    return 1, [node]


def _term(factors: tuple[Node, ...], total: Affine) -> tuple[int, Node]:
    """Return a product with its sign, with the sum as the last factor and keys positive in it."""
    lead = KV_IDX if KV_IDX in total.terms else total.first() if total.terms else None
    sign = -1 if lead is not None and total.terms[lead] < 0 else 1
    return sign, reduce(lambda a, b: call("mul", a, b), [*factors, total.times(sign).tree()])
