"""Check that a rewritten expression stays within fp32 wherever the written one does.

A rewrite that is equal in real numbers may be worse in fp32: (score / 1e6)**8 is 1e-48 * score**8,
and neither factor is a float32 number. Therefore both expressions are evaluated at the same points,
with scores and parameters of many magnitudes. Where each written intermediate is zero or a normal
float32 number, each rewritten one must be. Integers must fit in 32 bits in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, children

POINTS = 64
_MOST, _LEAST = (2 - 2**-23) * 2.0**127, 2.0**-126
_SAFE, _SLACK = 2.0**64, 2.0**8
_INT32 = range(-(2**31), 2**31)
_SCALE = 0.125
_TILE = 128


class _OutOfRangeError(Exception):
    """An intermediate overflows, or is not a number."""


@lru_cache(maxsize=1024)
def stays_in_range(rewritten: Node, written: Node, positive: frozenset[str] = frozenset()) -> bool:
    """True if no intermediate of `rewritten` is closer to the limits of fp32 or 32 bits where
    `written` stays inside.

    Names in `positive` have values above zero.
    """
    new, old = _Steps(rewritten), _Steps(written)
    if not all(n.type is not Type.FLOAT or _is_normal(n.value) for n in new.numbers - old.numbers):
        return False
    # Values depend on the place of a name in the tree, so that the words of a spec decide nothing.
    places = {name: place for place, name in enumerate(dict.fromkeys([*old.names, *new.names]))}
    for number in range(POINTS):
        point = _Point(number, places, positive)
        allowed, needed = old.magnitudes(point), new.magnitudes(point)
        if allowed is not None and (needed is None or not _is_within(needed, allowed)):
            return False
    return True


def operations(node: Node) -> int:
    """Return the number of distinct nodes of a tree."""
    return len(_Steps(node))


def _is_within(needed: tuple[float, float], allowed: tuple[float, float]) -> bool:
    # Few points come near the limits, so compare the growth of the range.
    if needed[1] > max(allowed[1], _SAFE) * _SLACK:
        return False
    vanishes = allowed[0] < _LEAST
    return vanishes or needed[0] >= max(_LEAST, min(allowed[0], 1 / _SAFE) / _SLACK)


class _Steps:
    """The distinct nodes of a tree, operands first. Derivatives share most of their nodes."""

    def __init__(self, root: Node) -> None:
        self._steps: list[tuple[Node, tuple[int, ...]]] = []
        places: dict[object, int] = {}
        known: dict[int, int] = {}

        def place(node: Node) -> int:
            if id(node) not in known:
                operands = tuple(map(place, children(node)))
                name = (
                    node.fn
                    if isinstance(node, Call)
                    else node.buffer
                    if isinstance(node, Read)
                    else ""
                )
                same = (type(node), name, operands) if operands else node
                if same not in places:
                    places[same] = len(self._steps)
                    self._steps.append((node, operands))
                known[id(node)] = places[same]
            return known[id(node)]

        place(root)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def numbers(self) -> set[Const]:
        """Return the constants in the tree."""
        return {node for node, _ in self._steps if isinstance(node, Const)}

    @property
    def names(self) -> list[str]:
        """Return the names and buffers in the tree, in the order of their first use."""
        leaves = (node for node, _ in self._steps)
        return [
            node.buffer if isinstance(node, Read) else node.name
            for node in leaves
            if isinstance(node, Read | Var)
        ]

    def magnitudes(self, point: _Point) -> tuple[float, float] | None:
        """Return the smallest nonzero and the largest magnitude of intermediates; `None` on an
        overflow or NaN.
        """
        values: list[Any] = []
        least, greatest = 1.0, 1.0
        try:
            for node, operands in self._steps:
                value = _computed(node, [values[i] for i in operands], point)
                values.append(value)
                if node.type is Type.INT and value not in _INT32:
                    return None
                size = abs(value)
                if node.type is not Type.FLOAT or size == 0 or _hides(value):
                    continue
                if not size <= _MOST:
                    return None
                least, greatest = min(least, size), max(greatest, size)
        except (_OutOfRangeError, ArithmeticError, ValueError):
            return None
        return least, greatest


def _computed(node: Node, args: list[Any], point: _Point) -> Any:
    if isinstance(node, Const):
        return node.value
    if isinstance(node, Var):
        return point.variable(node)
    if isinstance(node, Read):
        return point.named(node.buffer, node.type, args)
    value = TABLE[node.fn].value(*args)
    # An infinity that the user wrote hides a pair; any other one is an overflow.
    if _hides(value) and not any(map(_hides, args)):
        raise _OutOfRangeError
    return value


class _Point:
    """Pseudo-random values for names and buffer elements, the same in every run.

    `places` has the place of each name in the tree.
    """

    def __init__(self, number: int, places: Mapping[str, int], positive: frozenset[str]) -> None:
        self._number = number
        self._places = places
        self._positive = positive

    def variable(self, var: Var) -> Any:
        """Return the value of a name."""
        match var.name:
            case "inf":
                return math.inf
            case "LOG2E":
                return math.log2(math.e)
            case "scale":
                return _SCALE
            case "score":
                return self._score()
            case "qk":
                return self._score() / _SCALE
            case "q_start":
                return self._position("q_idx") // _TILE * _TILE
            case "q_idx":
                return self._position("q_idx")
            case "kv_idx":
                # Half of the keys are near the query.
                return self._position("kv_idx" if self._number & 2 else "q_idx")
        return self.named(var.name, var.type)

    def named(self, name: str, type_: Type, indices: Sequence[Any] = ()) -> Any:
        """Return the value of a parameter or a buffer element."""
        size, sign = _chance(self._number, f"{self._places[name]}{[*indices]}")
        if type_.integral:
            return 1 + int(64 * size)
        if type_ is Type.BOOL:
            return size < 0.5
        exponent = 20 if self._number % 3 == 0 else 6
        magnitude: float = 2.0 ** ((2 * size - 1) * exponent)
        return magnitude if name in self._positive or sign < 0.5 else -magnitude

    def _score(self) -> float:
        # From 2**-14 to 2**14, with alternating signs.
        magnitude: float = 2.0 ** (28 * self._number / (POINTS - 1) - 14)
        return magnitude if self._number & 1 else -magnitude

    def _position(self, name: str) -> int:
        return int(2**17 * _chance(self._number, name)[0])


@lru_cache(maxsize=1 << 14)
def _chance(number: int, key: str) -> tuple[float, float]:
    draw = Random(f"{number} {key}")
    return draw.random(), draw.random()


def _is_normal(value: float) -> bool:
    return value == 0 or _LEAST <= abs(value) <= _MOST


def _hides(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)
