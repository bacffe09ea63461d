"""Pass: the tiles that a mask needs, in closed form.

For a tile of the *outer* index (for example query rows `q_start .. q_last`), find two ranges of the
*inner* index (keys). In the first, the mask can hold for some row of the tile; in the second, it
holds for every row:

    [lo, hi)            holds for some row of the tile      tiles outside are never visited
    [full_lo, full_hi)  holds for every row of the tile     tiles inside need no mask

Both come from the inequalities of the mask. `f(kv) <= g(q)` with monotone `f` and `g` holds for
some row where `f(kv) <= max g`, and for every row where `f(kv) <= min g`. The extremes of `g` lie
at the ends of the tile. A conjunction intersects ranges, a disjunction makes a list of them. The
first range is exact or too large, the second exact or too small. Some conditions cannot be
classified: a read of an unsorted buffer, a remainder. They keep the first range and empty the
second, so the kernel evaluates the mask there. The backward pass uses the same code with the
indices exchanged.

Sums, products with numbers, `//` by a positive number, `min`, `max` and reads of sorted buffers are
monotone. For sorted buffers, a binary search finds the end of the range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce

from kgen.expr.affine import Affine, affine, is_large
from kgen.expr.algebra import Algebra, call
from kgen.expr.alternatives import alternatives
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.magnitudes import FAR, magnitude
from kgen.expr.mask_form import all_of
from kgen.expr.nodes import FIRST_AT_LEAST, Call, Const, Node, Read, Type, Var, variables, walk
from kgen.expr.quotients import quotient
from kgen.expr.spans import Given, Part, Span, ascending


@dataclass(frozen=True)
class Axis:
    """An index with its tile: `start` and `last` are its first and last position, `size` is the
    tensor's length.
    """

    index: Var
    start: Var
    last: Var
    size: Var


@dataclass(frozen=True)
class _Range:
    """Bounds `[low, high)`, `None` if unbounded.

    `full` is `None` if no position is known to hold for all rows.
    """

    some: tuple[Node | None, Node | None]
    full: tuple[Node | None, Node | None] | None
    given: tuple[Node, Node] | None = None
    """A condition on the outer tile only: true for some of its rows, true for all."""


_ZERO, _ONE = Const(0, Type.INT), Const(1, Type.INT)
_UNKNOWN = _Range((None, None), None)


@dataclass(frozen=True)
class RangeFinder:
    """Finder of the spans of masks over one pair of axes.

    `positive` has the parameters with a value above zero. `is_sorted(read)` is true if the row of
    the read ascends. Conditions on a name in `varying`, which differs within the outer tile, give
    no range. Nor do conditions on a number that cannot be added to a position in 32 bits. `values`
    has the values of compile-time parameters.
    """

    inner: Axis
    outer: Axis
    algebra: Algebra
    positive: frozenset[str]
    is_sorted: Callable[[Read], bool]
    varying: frozenset[str] = frozenset()
    values: Mapping[str, int] = field(default_factory=dict)

    def spans(self, mask: Node) -> tuple[Span, ...]:
        """Return the spans of a mask, ascending.

        If two overlap, the later one must start after the earlier one.
        """
        found = alternatives(mask)
        return ascending(
            [self._part(atoms, [self._atom(a) for a in atoms]) for atoms in found], self.inner.size
        )[0]

    def unclassified(self, mask: Node) -> tuple[Node, ...]:
        """Return the conditions that the spans of a mask ignore.

        These include conditions with too many alternatives, and the whole mask if its alternatives
        have no known order.
        """
        found = alternatives(mask)
        ranges = {atom: self._atom(atom) for atoms in found for atom in atoms}
        if unknown := tuple(atom for atom, known in ranges.items() if known.full is None):
            return unknown
        _, in_order = ascending(
            [self._part(atoms, [ranges[a] for a in atoms]) for atoms in found], self.inner.size
        )
        return () if in_order else (mask,)

    # --- one condition ------------------------

    def _atom(self, atom: Node) -> _Range:
        if not (isinstance(atom, Call) and atom.fn in ("lt", "le", "gt", "ge", "eq")):
            return _UNKNOWN
        if variables(atom) & self.varying or any(
            isinstance(n, Const) and abs(n.value) > FAR for n in walk(atom)
        ):
            return _UNKNOWN
        left, right = atom.args
        if not (left.type.integral and right.type.integral):
            return _UNKNOWN
        match atom.fn:
            case "lt":
                return self._less(left, right)
            case "le":
                return self._at_most(left, right)
            case "gt":
                return self._less(right, left)
            case "ge":
                return self._at_most(right, left)
        return self._meet([self._at_most(left, right), self._at_most(right, left)])

    def _less(self, left: Node, right: Node) -> _Range:
        """Return the range of `left < right`.

        The side with the inner index stays as it is, as it may be a quotient.
        """
        if self.inner.index.name in variables(right):
            return self._at_most(call("add", left, _ONE), right)
        return self._at_most(left, call("sub", right, _ONE))

    def _at_most(self, left: Node, right: Node) -> _Range:
        """Return the range of `left <= right`."""
        x = self.inner.index.name
        if x in variables(left) and x in variables(right):
            left, right = self._tidy(call("sub", left, right)), _ZERO
        if x in variables(right):
            return self._solve(right, left, upper=False)
        if x in variables(left):
            return self._solve(left, right, upper=True)
        return self._constant(call("sub", left, right))

    def _constant(self, difference: Node) -> _Range:
        """Return the range of `difference <= 0` on the outer tile only: everything or nothing."""
        bounds = self._bounds(difference)
        if bounds is None:
            return _UNKNOWN
        some, throughout = (call("le", self._tidy(b), _ZERO) for b in bounds)
        lowest, highest = (call("where", c, self.inner.size, _ZERO) for c in (some, throughout))
        return _Range((None, lowest), (None, highest), (some, throughout))

    def _solve(self, left: Node, right: Node, upper: bool) -> _Range:
        """Return the range of `left <= right` (`upper`) or `left >= right`, where only `left` has
        the inner index.

        The term with the inner index is isolated, first from multiples, then from quotients, and so
        on.
        """
        alone = _alone(left, self.inner.index.name)
        if alone is None:
            return _UNKNOWN
        slope, part, rest = alone
        if slope == 0:  # kv_idx - kv_idx
            return self._constant(call("sub", rest, right) if upper else call("sub", right, rest))
        right = call("sub", right, rest)
        if slope < 0:  # -x <= r is x >= -r
            right, slope, upper = call("neg", right), -slope, not upper
        right = _divided(right, Const(slope, Type.INT), upper)
        match part:
            case Var():
                return self._bounded(right, upper, lambda b: b)
            case Call("floordiv", (whole, divisor)) if self._is_positive(divisor):
                near = self._near(right, whole, divisor)
                return self._solve(whole, _undivided(near, divisor, upper), upper)
            case Call("mul", (a, b)) if self._is_positive(a) or self._is_positive(b):
                factor, x = (a, b) if self._is_positive(a) else (b, a)
                return self._solve(x, _divided(right, factor, upper), upper)
            case Read() if self.is_sorted(part) and part.indices[-1] == self.inner.index:
                if right.type is Type.LONG and part.type is Type.INT:
                    return _UNKNOWN  # no element may have the value that is searched for
                fixed = {self.inner.index.name, self.outer.index.name}
                if any(fixed & variables(i) for i in part.indices[:-1]):
                    return _UNKNOWN
                return self._bounded(right, upper, lambda b: _searched(part, b, upper))
        return _UNKNOWN

    def _near(self, bound: Node, whole: Node, divisor: Node) -> Node:
        """Return a bound on `whole // divisor` whose product with the divisor fits in 32 bits.

        A bound beyond all quotients is equivalent to one just beyond them. If no such bound is
        known, the product is assumed to fit, as in all rearrangements.
        """
        alone = _alone(whole, self.inner.index.name)
        rest = call("sub", _ONE, alone[2]) if alone else _ONE
        size, far, most, moved = (magnitude(n, self.values) for n in (divisor, bound, whole, rest))
        if (
            size * (far + 1) + moved < 2**31
            or most + 3 * size + moved >= 2**31
            or bound.type is Type.LONG
        ):
            return bound
        beyond = most // size + 2
        return call("max", call("min", bound, Const(beyond, Type.INT)), Const(-beyond, Type.INT))

    def _bounded(self, right: Node, upper: bool, solve: Callable[[Node], Node]) -> _Range:
        bounds = self._bounds(right)
        if bounds is None:
            return _UNKNOWN
        lowest, highest = (self._tidy(solve(self._tidy(b))) for b in bounds)
        if upper:
            lowest, highest = (self._tidy(call("add", b, _ONE)) for b in (lowest, highest))
            return _Range((None, highest), (None, lowest))
        return _Range((lowest, None), (highest, None))

    # --- extremes over the outer tile ------------------------

    def _bounds(self, node: Node) -> tuple[Node, Node] | None:
        """Return the smallest and largest value over the outer tile; `None` if the expression is
        not known to be monotone.
        """
        outer = self.outer.index
        if outer.name not in variables(node):
            return (node, node) if self.inner.index.name not in variables(node) else None
        if node == outer:
            return self.outer.start, self.outer.last
        if isinstance(node, Read):
            inside = self._bounds(node.indices[-1])
            fixed = all(outer.name not in variables(i) for i in node.indices[:-1])
            if inside is None or not fixed or not self.is_sorted(node):
                return None
            return self._elements(node, *inside)
        if not isinstance(node, Call):
            return None
        parts = [self._bounds(a) for a in node.args]
        known = [p for p in parts if p is not None]
        if len(known) < len(parts):
            return None
        match node.fn:
            case "add" | "min" | "max":
                return call(node.fn, known[0][0], known[1][0]), call(
                    node.fn, known[0][1], known[1][1]
                )
            case "sub":
                return call("sub", known[0][0], known[1][1]), call("sub", known[0][1], known[1][0])
            case "neg":
                return call("neg", known[0][1]), call("neg", known[0][0])
            case "mul":
                return self._scaled(node.args, known)
            case "floordiv" if self._is_positive(node.args[1]):
                return call("floordiv", known[0][0], node.args[1]), call(
                    "floordiv", known[0][1], node.args[1]
                )
        return None

    def _elements(self, read: Read, first: Node, last: Node) -> tuple[Node, Node]:
        """Return the smallest and largest of some elements of a sorted row.

        Elements before the first one are zero.
        """
        rows = read.indices[:-1]
        least, least_of_row, greatest = (
            Read(read.buffer, (*rows, i), read.type) for i in (first, _ZERO, last)
        )
        if self._is_not_negative(first):
            return least, greatest
        before = call("lt", first, _ZERO)
        low, high = call("min", least_of_row, _ZERO), call("max", greatest, _ZERO)
        return call("where", before, low, least), call("where", before, high, greatest)

    def _scaled(
        self, args: tuple[Node, ...], known: list[tuple[Node, Node]]
    ) -> tuple[Node, Node] | None:
        for factor, (low, high) in ((args[0], known[1]), (args[1], known[0])):
            if self._is_positive(factor):
                return call("mul", factor, low), call("mul", factor, high)
            if isinstance(factor, Const) and factor.value <= 0:
                return call("mul", factor, high), call("mul", factor, low)
        return None

    def _is_positive(self, node: Node) -> bool:
        if isinstance(node, Const):
            return node.value > 0
        return isinstance(node, Var) and node.name in self.positive

    def _meet(self, ranges: list[_Range]) -> _Range:
        """Return the range where all conditions hold."""

        def both(sides: list[tuple[Node | None, Node | None]]) -> tuple[Node | None, Node | None]:
            lows = list(dict.fromkeys(lo for lo, _ in sides if lo is not None))
            highs = list(dict.fromkeys(hi for _, hi in sides if hi is not None))
            lows = [b for b in lows if not self._implied(b, lows, upper=False)]
            highs = [b for b in highs if not self._implied(b, highs, upper=True)]
            low = reduce(lambda a, b: call("max", a, b), lows) if lows else None
            high = reduce(lambda a, b: call("min", a, b), highs) if highs else None
            return low, high

        full = [r.full for r in ranges]
        given = list(dict.fromkeys(r.given for r in ranges if r.given is not None))
        return _Range(
            both([r.some for r in ranges]),
            None if None in full else both([f for f in full if f is not None]),
            (all_of([some for some, _ in given]), all_of([every for _, every in given]))
            if given
            else None,
        )

    def _implied(self, bound: Node, others: list[Node], upper: bool) -> bool:
        """True if another bound is as tight as the result of a search.

        The run of elements equal to the one at `i` includes `i`, and ends at or after `i + 1`. So
        `kv_idx <= q_idx` also bounds the keys of a document.
        """
        if not (isinstance(bound, Read) and bound.buffer.endswith(FIRST_AT_LEAST)):
            return False
        for i in (self.outer.start, self.outer.last):
            buffer, width = bound.buffer.removesuffix(FIRST_AT_LEAST), bound.indices[-1].type
            element = Read(buffer, (*bound.indices[:-1], i), width)
            value, tighter = (
                (call("add", element, _ONE), call("add", i, _ONE)) if upper else (element, i)
            )
            if bound.indices[-1] == value and tighter in others:
                return True
        return False

    # --- assembly ------------------------

    def _part(self, atoms: tuple[Node, ...], ranges: list[_Range]) -> Part:
        whole = self._meet(ranges)
        lo, hi = self._positions(whole.some)
        full_lo, full_hi = self._positions(whole.full or (None, None))
        # Kernels continue from `full_hi` to `hi`, so it must be a position even for an empty range.
        if not self._is_not_negative(full_hi):
            full_hi = call("max", full_hi, _ZERO)
        conditions = frozenset(a for a, r in zip(atoms, ranges, strict=True) if r.given is not None)
        given = None if whole.given is None else Given(conditions, *whole.given)
        return Part(Span(lo, hi, full_lo, full_hi, has_full=whole.full is not None), given)

    def _positions(self, bounds: tuple[Node | None, Node | None]) -> tuple[Node, Node]:
        low, high = bounds
        size = self.inner.size
        lo = _ZERO if low is None else low
        hi = size if high is None else high
        # A position of the outer tile, or zero, is not negative. A choice of size and zero is not
        # too large.
        if lo not in (_ZERO, self.outer.start, self.outer.last):
            lo = call("max", lo, _ZERO)
        chosen = isinstance(hi, Call) and hi.fn == "where" and set(hi.args[1:]) <= {size, _ZERO}
        if hi != size and not chosen:
            hi = call("min", hi, size)
        # A 64-bit bound is clamped between both ends, because kernels have 32 bits for positions.
        if lo.type is Type.LONG:
            lo = call("min", lo, size)
        if hi.type is Type.LONG:
            hi = call("max", hi, _ZERO)
        return lo, hi

    def _is_not_negative(self, node: Node) -> bool:
        """True if a bound is at least 0 in every tile."""
        if isinstance(node, Read) and node.buffer.endswith(FIRST_AT_LEAST):
            return True
        if isinstance(node, Call) and node.fn in ("min", "max", "where"):
            checked = [self._is_not_negative(a) for a in node.args[-2:]]
            return any(checked) if node.fn == "max" else all(checked)
        sizes = frozenset({self.inner.size.name, self.outer.size.name}) | self.positive
        last = {self.outer.size.name: 1, "": -1}
        ranges = IndexRanges({self.outer.start.name: last, self.outer.last.name: last}, sizes)
        return ranges.not_negative(node)

    def _tidy(self, node: Node) -> Node:
        """Collect like terms."""
        tidy = self.algebra.to_tree(self.algebra.to_sympy(node))
        return tidy if tidy.type is node.type else node


def _alone(node: Node, x: str) -> tuple[int, Node, Node] | None:
    """Return `node` as `slope * part + rest` with an integer slope; only `part` has x, and is no
    sum. Or `None`.
    """
    total = affine(node)
    moving = {n: f for n, f in total.terms.items() if x in variables(n)}
    if len(moving) > 1 or is_large(total):
        return None
    rest = Affine({n: f for n, f in total.terms.items() if n not in moving}, total.number)
    return next(
        ((slope, part, rest.tree()) for part, slope in moving.items()), (0, _ZERO, rest.tree())
    )


def _divided(bound: Node, divisor: Node, upper: bool) -> Node:
    """Return the bound on `x` from a bound on `divisor * x`, rounded into the range."""
    if divisor == _ONE:
        return bound
    if not upper:
        bound = call("add", bound, call("sub", divisor, _ONE))
    return quotient(call("floordiv", bound, divisor))


def _undivided(bound: Node, divisor: Node, upper: bool) -> Node:
    """Return the bound on `x` from a bound on `x // divisor`."""
    low = call("mul", bound, divisor)
    return call("add", low, call("sub", divisor, _ONE)) if upper else low


def _searched(read: Read, bound: Node, upper: bool) -> Node:
    """Return the bound on `x` from a bound on `buffer[x]`, for a sorted buffer of integers."""
    value = call("add", bound, _ONE) if upper else bound
    position = Read(read.buffer + FIRST_AT_LEAST, (*read.indices[:-1], value), Type.INT)
    return call("sub", position, _ONE) if upper else position
