"""Pass: compute each subexpression as far out as possible, and once if it is used twice.

A place states how often a value is computed. It has the tile axes along which the value varies
(none, queries, keys, or both). It also states if the value changes inside the loop over tiles.
First, chains of `+`, `*` and `and` are regrouped so that operands of one place are adjacent:
`qk * scale * log2(e) * slope` multiplies its three scalars once. Then each operand whose place is
further out than its operation becomes a binding.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

from kgen.expr.algebra import call
from kgen.expr.float_range import stays_in_range
from kgen.expr.naming import alike, candidates, is_taken, numbered
from kgen.expr.nodes import (
    Call,
    Const,
    Node,
    Read,
    Type,
    Var,
    children,
    distinct,
    rebuild,
    transform,
    variables,
)
from kgen.expr.wrapping import may_wrap, wrapped

_SCORES = frozenset({"qk", "score"})


@dataclass(frozen=True, order=True)
class Place:
    """The `axes` of a tile along which a value varies, from `("q", "kv")`, and whether it changes
    `in_loop`.
    """

    in_loop: bool
    axes: tuple[str, ...]

    def __or__(self, other: Place) -> Place:
        axes = tuple(a for a in ("q", "kv") if a in self.axes or a in other.axes)
        return Place(self.in_loop or other.in_loop, axes)


OUTSIDE = Place(False, ())
TILE = Place(True, ("q", "kv"))


@dataclass(frozen=True)
class Binding:
    """A binding `name = node`, computed at `place`. `roots` are the results that need it."""

    name: str
    node: Node
    place: Place
    roots: frozenset[str]


@dataclass(frozen=True)
class Program:
    """Bindings in order, each after the bindings that it uses, and the remaining expression of each
    result.
    """

    bindings: tuple[Binding, ...]
    results: Mapping[str, Node]
    places: Mapping[str, Place]
    """The place of each variable and bound name."""

    def place(self, node: Node) -> Place:
        """Return the place of a value of this program."""
        return place_of(node, self.places)

    def before_loop(self) -> list[Binding]:
        """Return the bindings that are computed once, before the loop over tiles."""
        return [b for b in self.bindings if not b.place.in_loop]

    def in_loop(self, needed_by: Iterable[str] = (), without: Iterable[str] = ()) -> list[Binding]:
        """Return the bindings that are computed for every tile.

        With `needed_by`, return only those that these results need. With `without`, drop those that
        only these results need.
        """
        loop = [b for b in self.bindings if b.place.in_loop]
        if needed_by:
            return [b for b in loop if b.roots & set(needed_by)]
        return [b for b in loop if not b.roots <= set(without)]


def place_of(
    node: Node, places: Mapping[str, Place], known: dict[Node, Place] | None = None
) -> Place:
    """Return the place of a value: the innermost place of its variables. `known` caches results."""
    known = {} if known is None else known
    if isinstance(node, Var):
        return places.get(node.name, OUTSIDE)
    if node not in known:
        found = (place_of(c, places, known) for c in children(node))
        known[node] = reduce(lambda a, b: a | b, found, OUTSIDE)
    return known[node]


def hoist(
    roots: Mapping[str, tuple[Node, Place]],
    places: Mapping[str, Place],
    reserved: Iterable[str] = (),
    named: Mapping[Node, str] | None = None,
) -> Program:
    """Bind subexpressions that can be computed further out than their roots.

    `roots` maps the name of a result, such as `bias` or `d_table[2]`, to its expression and place.
    `places` has the variables; all others are constants of the kernel. Bindings avoid the names in
    `reserved`. Values in `named` get the user's name.
    """
    grouped = {name: (_grouped(node, places), place) for name, (node, place) in roots.items()}
    uses = _uses(node for node, _ in grouped.values())
    users = {alike(node): name for node, name in (named or {}).items()}
    builder = _Builder(dict(places), uses, set(reserved) | set(places), users)
    roles = {name: name.replace("[", "_").removesuffix("]") for name in grouped}
    results = {
        name: builder.result(node, place, roles[name]) for name, (node, place) in grouped.items()
    }
    needed = _needed(builder.bound, results)
    bindings = tuple(
        Binding(n, node, place_of(node, builder.places), needed[n])
        for n, node in builder.bound.items()
    )
    return Program(bindings, results, builder.places)


def _grouped(node: Node, places: Mapping[str, Place]) -> Node:
    grouped = regroup(node, places)
    if grouped == node or all(n.type is not Type.FLOAT for n in distinct(node)):
        return grouped
    # In (qk * 1e-30) * (slopes[h] * 1e-30), the product of the numbers alone would underflow in
    # fp32.
    return grouped if stays_in_range(grouped, node) else node


def regroup(node: Node, places: Mapping[str, Place]) -> Node:
    """Reorder chains of one associative operation so that operands of one place are adjacent,
    outermost first.

    This is exact for integers, which wrap, and for bools. For reals it changes the order of
    roundings. It never makes a real number of a part of an integer that may wrap.
    """
    known: dict[Node, Place] = {}
    return transform(node, lambda n: _regrouped(n, lambda part: place_of(part, places, known)))


def _regrouped(node: Node, place: Callable[[Node], Place]) -> Node:
    if isinstance(node, Call) and node.fn == "div":
        dividend, divisor = node.args
        # One division before the loop, one multiplication inside. Only for scores: floor(kv_idx
        # / 3) would change.
        if variables(dividend) & _SCORES and place(divisor) < place(dividend):
            node = call("mul", dividend, call("div", Const(1, Type.INT), divisor))
    if not isinstance(node, Call) or node.fn not in ("add", "sub", "mul", "and"):
        return node

    def joined(fn: str) -> Callable[[Node, Node], Node]:
        def join(a: Node, b: Node) -> Node:
            both = call(fn, a, b)
            if node.type is Type.INT and isinstance(a, Const) and isinstance(b, Const):
                return wrapped(both)
            wraps = node.type is Type.FLOAT and both.type.integral and may_wrap(both)
            return call(fn, call("float", a), b) if wraps else both

        return join

    operation = "add" if node.fn == "sub" else node.fn
    plus, minus = _chain(node, operation, _repeated(node) if operation == "mul" else frozenset())
    by_place: dict[Place, tuple[list[Node], list[Node]]] = {}
    for sign, operands in ((0, plus), (1, minus)):
        for operand in operands:
            by_place.setdefault(place(operand), ([], []))[sign].append(operand)
    if len(by_place) == 1:
        return node
    groups = [by_place[p] for p in sorted(by_place, key=lambda p: (p.in_loop, len(p.axes), p.axes))]
    groups.sort(
        key=lambda group: not group[0]
    )  # operands that are only subtracted come last: kv_idx - q_start
    total: Node | None = None
    for positive, negative in groups:
        if not positive:
            group = reduce(joined("add"), negative)
            total = call("neg", group) if total is None else joined("sub")(total, group)
            continue
        group = reduce(joined(operation), positive)
        group = reduce(joined("sub"), negative, group)
        total = group if total is None else joined(operation)(total, group)
    assert total is not None
    return total


def _repeated(product: Node) -> frozenset[Node]:
    """Return the products that a product contains more than once.

    They are computed once and stay one factor: in (qk * scale)**8, qk**8 may overflow.
    """
    found: Counter[Node] = Counter()
    waiting = [product]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Call) and part.fn == "mul":
            found[part] += 1
            waiting += part.args if found[part] == 1 else ()
    return frozenset(part for part, count in found.items() if count > 1)


def _chain(node: Node, operation: str, whole: frozenset[Node]) -> tuple[list[Node], list[Node]]:
    """Return the operands of a chain: added or multiplied ones, and subtracted ones.

    Nodes in `whole` are not split.
    """
    if (
        not isinstance(node, Call)
        or node in whole
        or (node.fn != operation and (operation, node.fn) != ("add", "sub"))
    ):
        return [node], []
    (p, m), (q, n) = (
        ([a], [])
        if node.type is Type.FLOAT and a.type.integral and may_wrap(a)
        else _chain(a, operation, whole)
        for a in node.args
    )
    return (p + n, m + q) if node.fn == "sub" else (p + q, m + n)


def _uses(roots: Iterable[Node]) -> Counter[Node]:
    """Count the distinct operations that use each subexpression."""
    uses: Counter[Node] = Counter()
    seen: set[Node] = set()

    def visit(node: Node) -> None:
        for child in dict.fromkeys(children(node)):
            uses[child] += 1
            if child not in seen:
                seen.add(child)
                visit(child)

    for root in roots:
        uses[root] += 1
        if root not in seen:
            seen.add(root)
            visit(root)
    return uses


class _Builder:
    def __init__(
        self,
        places: dict[str, Place],
        uses: Counter[Node],
        taken: set[str],
        users: Mapping[Hashable, str],
    ) -> None:
        self.places = places
        self.bound: dict[str, Node] = {}
        self._names: dict[Node, str] = {}
        self._uses = uses
        self._known: dict[Node, Place] = {}
        self._taken = taken
        self._users = users
        self._counts: dict[str, Iterator[int]] = {}
        """The next number for each name."""

    def result(self, node: Node, user: Place, role: str) -> Node:
        """Return `node` as a result, which is no operand."""
        self.whole: Node | None = node
        return self.operand(node, user, role)

    def operand(self, node: Node, user: Place, role: str) -> Node:
        """Return `node` as an operand of a value computed at `user`: the node, or the name of its
        binding.
        """
        if node in self._names:
            return Var(self._names[node], node.type)
        place = place_of(node, self.places, self._known)
        rebuilt = rebuild(node, tuple(self.operand(c, place, role) for c in children(node)))
        if isinstance(node, (Const, Var)):
            return node
        further_out = place.in_loop != user.in_loop or (
            place.axes != user.axes and bool(place.axes)
        )
        if not (isinstance(node, Read) or further_out or self._uses[node] > 1):
            return rebuilt
        name = self._name(node, place, role)
        self._names[node] = name
        self.bound[name] = rebuilt
        self.places[name] = place
        return Var(name, node.type)

    def _name(self, node: Node, place: Place, role: str) -> str:
        user = self._users.get(alike(node)) if self._users else None
        # Keep a name that the kernel defines recognizable.
        wanted = [user, f"{user}_value"] if user else []
        wanted += candidates(node, role, place.axes, self._names, whole=node is self.whole)
        counts = self._counts.setdefault(wanted[-1], itertools.count(2))
        further = (numbered(wanted[-1], count) for count in counts)
        name = next(
            name for name in itertools.chain(wanted, further) if not is_taken(name, self._taken)
        )
        self._taken.add(name)
        return name


def _needed(bound: Mapping[str, Node], results: Mapping[str, Node]) -> dict[str, frozenset[str]]:
    """Return the results that need each binding, directly or through other bindings."""
    needed: dict[str, set[str]] = {name: set() for name in bound}

    def mark(node: Node, root: str) -> None:
        for child in children(node):
            mark(child, root)
        if isinstance(node, Var) and node.name in bound and root not in needed[node.name]:
            needed[node.name].add(root)
            mark(bound[node.name], root)

    for root, node in results.items():
        mark(node, root)
    return {name: frozenset(roots) for name, roots in needed.items()}


__all__ = ["OUTSIDE", "TILE", "Binding", "Place", "Program", "Type", "hoist", "place_of", "regroup"]
