"""Pass: prove that an index stays inside its buffer, so that the emitted load needs no guard.

Bounds are linear forms over sizes: `kv_idx` is at most `SK - 1`, `clamp(x, 0, 511)` at most 511. A
size is at least 1, or 0 if it may be empty. Indices without a proof get a guard in the emitted
code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kgen.expr.nodes import Call, Const, Node, Type, Var, measured

POSITIONS = frozenset({"b", "h", "q_idx", "kv_idx", "q_start", "kv_start"})
"""Indices that are never negative, whatever their upper bound."""

MOST_BOUNDS = 16
"""Largest number of bounds of one value."""

Linear = Mapping[str, int]
"""Coefficients by size name; the key `""` has the constant."""


@dataclass(frozen=True)
class IndexRanges:
    """Upper bounds of index variables, by name (`{"kv_idx": {"SK": 1, "": -1}}`); all lower bounds
    are zero.

    A variable without an entry is unbounded above. Names in `sizes` stand for themselves, names in
    `definitions` for their expressions.
    """

    greatest: Mapping[str, Linear]
    sizes: frozenset[str]
    definitions: Mapping[str, Node] = field(default_factory=dict)
    empty: frozenset[str] = frozenset()
    """Sizes that may be zero; all others are at least one."""
    _known: dict[tuple[str, Node], list[Linear]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def not_negative(self, index: Node) -> bool:
        """True if `index >= 0` is proved."""
        return any(self._holds(low) for low in self._low(index))

    def below(self, index: Node, size: Node) -> bool:
        """True if `index < size` is proved."""
        return any(
            self._holds(_sum(low, {"": -1}, _scaled(high, -1)))
            for high in self._high(index)
            for low in self._low(size)
        )

    def within(self, index: Node, size: int | str) -> bool:
        """True if an index is proved to be inside a dimension, whose size is a number or a name."""
        length: Node = Const(size, Type.INT) if isinstance(size, int) else Var(size, Type.INT)
        return self.not_negative(index) and self.below(index, length)

    def _low(self, node: Node) -> list[Linear]:
        return self._found(("low", node), self._lower)

    def _high(self, node: Node) -> list[Linear]:
        return self._found(("high", node), self._upper)

    def _found(self, key: tuple[str, Node], find: Callable[[Node], list[Linear]]) -> list[Linear]:
        if key not in self._known:
            # Sums of maxima have a bound for each choice; a few of them suffice.
            self._known[key] = find(key[1])[:MOST_BOUNDS]
        return self._known[key]

    def _lower(self, node: Node) -> list[Linear]:
        if isinstance(node, Const):
            return [{"": int(node.value)}]
        if isinstance(node, Var):
            if node.name in self.definitions:
                return self._low(self.definitions[node.name])
            if node.name in self.sizes or measured(node.name):
                return [{node.name: 1}]
            return [{"": 0}] if node.name in self.greatest or node.name in POSITIONS else []
        if not isinstance(node, Call):
            return []
        low, high = [self._low(a) for a in node.args], [self._high(a) for a in node.args]
        match node.fn:
            case "add":
                return [_sum(a, b) for a in low[0] for b in low[1]]
            case "sub":
                return [_sum(a, _scaled(b, -1)) for a in low[0] for b in high[1]]
            case "max":
                return low[0] + low[1]
            case "min" | "where":
                values = low[-2:]
                return [
                    a
                    for a in values[0]
                    if any(self._holds(_sum(b, _scaled(a, -1))) for b in values[1])
                ] + [
                    b
                    for b in values[1]
                    if any(self._holds(_sum(a, _scaled(b, -1))) for a in values[0])
                ]
            case "clamp":  # min(max(x, lo), hi)
                return [
                    a for a in low[1] if any(self._holds(_sum(b, _scaled(a, -1))) for b in low[2])
                ]
            case "mod":
                return [{"": 0}] if any(self._holds(_sum(b, {"": -1})) for b in low[1]) else []
            case "floordiv" | "mul":
                return [{"": 0}] if all(any(self._holds(a) for a in side) for side in low) else []
            case "abs":
                return [{"": 0}]
        return []

    def _upper(self, node: Node) -> list[Linear]:
        if isinstance(node, Const):
            return [{"": int(node.value)}]
        if isinstance(node, Var):
            if node.name in self.definitions:
                return self._high(self.definitions[node.name])
            if node.name in self.sizes or measured(node.name):
                return [{node.name: 1}]
            return [self.greatest[node.name]] if node.name in self.greatest else []
        if not isinstance(node, Call):
            return []
        low, high = [self._low(a) for a in node.args], [self._high(a) for a in node.args]
        match node.fn:
            case "add":
                return [_sum(a, b) for a in high[0] for b in high[1]]
            case "sub":
                return [_sum(a, _scaled(b, -1)) for a in high[0] for b in low[1]]
            case "min":
                return high[0] + high[1]
            case "max" | "where":
                values = high[-2:]
                return [
                    a
                    for a in values[0]
                    if any(self._holds(_sum(a, _scaled(b, -1))) for b in values[1])
                ] + [
                    b
                    for b in values[1]
                    if any(self._holds(_sum(b, _scaled(a, -1))) for a in values[0])
                ]
            case "clamp":
                return high[2]
            case "mod":
                return (
                    [_sum(b, {"": -1}) for b in high[1]]
                    if any(self._holds(_sum(b, {"": -1})) for b in low[1])
                    else []
                )
            case "floordiv" if isinstance(node.args[1], Const) and node.args[1].value > 0:
                return [
                    {"": a[""] // int(node.args[1].value)} for a in high[0] if set(a) <= {""}
                ] + high[0] * any(self._holds(a) for a in low[0])
        return []

    def _holds(self, form: Linear) -> bool:
        """True if a linear form is at least zero for all sizes. Any buffer may be empty."""
        least = sum(v for name, v in form.items() if name not in self.empty and not measured(name))
        return all(v >= 0 for name, v in form.items() if name) and least >= 0


def _sum(*forms: Linear) -> Linear:
    names = dict.fromkeys(name for form in forms for name in form)
    return {name: sum(form.get(name, 0) for form in forms) for name in names}


def _scaled(form: Linear, factor: int) -> Linear:
    return {name: factor * value for name, value in form.items()}
