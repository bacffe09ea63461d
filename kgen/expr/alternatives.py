"""Pass: rewrite a mask as a few alternatives, each a list of conditions that hold together.

Conditions with choices are split: `where(c, x, y) < z` is `c and x < z or not c and y < z`, and two
bools are equal if both are true or both are false. Alternatives that contradict themselves, or that
another one contains, are dropped. For a mask over two halves of a sequence, one alternative remains
per pair of halves.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from kgen.expr.affine import affine
from kgen.expr.algebra import call
from kgen.expr.fold import decided
from kgen.expr.mask_form import MIRRORED, all_of, any_of, conjuncts, disjuncts, normalize
from kgen.expr.nodes import Call, Node, Type, children, rebuild
from kgen.expr.wrapping import may_wrap

MOST_ALTERNATIVES = 4
_MOST_AT_ONCE = 16
"""Largest number of alternatives before redundant ones are dropped."""
_MOST_CHOICES = 8
"""Largest number of choices that are split in a mask: each doubles the expression around it."""

_IMPLIED = {"eq": ("eq", "le", "ge"), "lt": ("lt", "le", "ne"), "gt": ("gt", "ge", "ne")}


@lru_cache(256)
def alternatives(mask: Node) -> tuple[tuple[Node, ...], ...]:
    """Return the mask as alternatives of conditions, at most `MOST_ALTERNATIVES`.

    A part with more alternatives stays one condition, which has no range: the range is then wider,
    not wrong. The size of a product is checked before it is built, because it grows exponentially.
    """
    plain = normalize(mask)
    found = _disjunctive(_by_cases(plain) if len(_choosing(plain)) <= _MOST_CHOICES else plain)
    return tuple(map(tuple, found))


# --- conditions that choose ------------------------


def _by_cases(mask: Node) -> Node:
    """Return a mask in negation normal form without choices."""
    if not isinstance(mask, Call):
        return mask
    if mask.fn in ("and", "or"):
        joined = all_of if mask.fn == "and" else any_of
        return joined([_by_cases(a) for a in mask.args])
    if mask.fn == "not" and isinstance(mask.args[0], Call) and mask.args[0].fn == "where":
        condition, x, y = mask.args[0].args
        return _choice(condition, call("not", x), call("not", y))
    if mask.fn == "where":
        return _choice(*mask.args)
    if mask.fn in ("eq", "ne") and mask.args[0].type is Type.BOOL:
        x, y = mask.args
        return _choice(x, *((y, call("not", y)) if mask.fn == "eq" else (call("not", y), y)))
    if mask.fn in MIRRORED and all(a.type.integral for a in mask.args):
        values = [node for node in _choosing(mask) if node.fn == "where"]
        if values and not any(may_wrap(a) for a in mask.args):
            condition = values[0].args[0]
            return _choice(condition, *(_chosen(mask, condition, side) for side in (1, 2)))
        if not values:
            return _decided(mask)
    return mask


def _decided(comparison: Call) -> Node:
    """Return a comparison of integers; of two constants, its value."""
    left, right = comparison.args
    difference = affine(left) + affine(right).times(-1)
    return comparison if difference.terms else decided(comparison.fn, difference.number, 0)


def _choosing(node: Node) -> list[Call]:
    """Return the choices in a mask or value, each once, innermost first. Choices in an index guard
    a read, and are kept.
    """
    found: dict[Node, bool] = {}

    def visit(part: Node) -> None:
        if part in found or not isinstance(part, Call):
            return
        for operand in part.args:
            visit(operand)
        found[part] = part.fn == "where" or (
            part.fn in ("eq", "ne") and part.args[0].type is Type.BOOL
        )

    visit(node)
    return [part for part, chooses in found.items() if chooses and isinstance(part, Call)]


def _choice(condition: Node, x: Node, y: Node) -> Node:
    sides = (condition, x), (call("not", condition), y)
    return any_of([all_of([_by_cases(normalize(part)) for part in side]) for side in sides])


def _chosen(node: Node, condition: Node, side: int) -> Node:
    """Return a comparison in which each choice on the condition is decided."""
    if not isinstance(node, Call):
        return node
    if node.fn == "where" and node.args[0] == condition:
        return _chosen(node.args[side], condition, side)
    return rebuild(node, tuple(_chosen(a, condition, side) for a in node.args))


# --- alternatives ------------------------


def _disjunctive(mask: Node) -> list[list[Node]]:
    if isinstance(mask, Call) and mask.fn == "or":
        found = _needed([atoms for part in disjuncts(mask) for atoms in _disjunctive(part)])
        return found if len(found) <= MOST_ALTERNATIVES else [[mask]]
    found = [[]]
    # Conditions with few choices first, so that most of them can be split. `!=` comes last: it
    # removes one position and moves no bound.
    parts = [(condition, _choices(condition)) for condition in conjuncts(mask)]
    for condition, choices in sorted(parts, key=lambda part: (_excludes(part[0]), len(part[1]))):
        more = _multiplied(found, choices)
        found = [[*atoms, condition] for atoms in found] if more is None else more
    return found


def _multiplied(found: list[list[Node]], choices: list[list[Node]]) -> list[list[Node]] | None:
    """Combine each alternative with each choice; None if there would be too many."""
    if len(found) * len(choices) > _MOST_AT_ONCE:
        return None
    made = _needed([a + c for a, c in product(found, choices)])
    return made if len(made) <= MOST_ALTERNATIVES else None


def _choices(condition: Node) -> list[list[Node]]:
    """Return the alternatives of one condition."""
    if isinstance(condition, Call) and condition.fn == "or":
        return _disjunctive(condition)
    if _excludes(condition):
        return [[call("lt", *children(condition))], [call("gt", *children(condition))]]
    return [[condition]]


def _excludes(condition: Node) -> bool:
    return isinstance(condition, Call) and condition.fn == "ne" and condition.args[0].type.integral


def _needed(found: list[list[Node]]) -> list[list[Node]]:
    """Drop alternatives that nothing satisfies, and those that another one contains.

    At least one remains.
    """
    possible: list[tuple[list[Node], frozenset[Node]]] = []
    for atoms in found:
        implied = _implied_by(atoms)
        if any(implied.issuperset(other) for other, _ in possible) or _contradictory(
            atoms, implied
        ):
            continue
        possible = [(other, more) for other, more in possible if not more.issuperset(atoms)]
        possible.append((atoms, implied))
    return [atoms for atoms, _ in possible] or found[:1]


def _contradictory(atoms: list[Node], implied: frozenset[Node]) -> bool:
    return any(implied.issuperset(_opposite(atom)) for atom in atoms)


@lru_cache(1024)
def _opposite(atom: Node) -> frozenset[Node]:
    """Return the conditions that hold together where the atom does not."""
    return frozenset(conjuncts(normalize(call("not", atom))))


def _implied_by(atoms: list[Node]) -> frozenset[Node]:
    """Return some conditions that follow from these, including them."""
    return frozenset().union(*map(_implied, atoms))


@lru_cache(1024)
def _implied(atom: Node) -> frozenset[Node]:
    if not (isinstance(atom, Call) and atom.fn in MIRRORED):
        return frozenset({atom})
    weaker = _IMPLIED.get(atom.fn, (atom.fn,))
    mirrored = (call(MIRRORED[fn], *reversed(atom.args)) for fn in weaker)
    return frozenset({*(call(fn, *atom.args) for fn in weaker), *mirrored})
