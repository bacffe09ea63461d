"""The recurrence of a spec on numbers of a prime field, with one directional derivative.

A `Dual` is a number and its derivative along the direction. The expressions of the spec are unknown
functions: a value is a random number for each list of arguments, and so is each derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from kgen.expr.differentiate import is_one
from kgen.expr.nodes import variables
from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.prove.arrays import PRIME, field_of, power, root, strides

Dual = tuple[int, int]
ZERO: Dual = (0, 0)


def unknown(name: str) -> Callable[..., int]:
    """Return a random polynomial as a function of some name."""
    random = Random(name)
    factors = [random.randrange(1, PRIME) for _ in range(16)]

    def value(*args: int) -> int:
        total = sum(a % PRIME * c for a, c in zip(args, factors, strict=False)) + factors[-1]
        return pow(total, 3, PRIME)

    return value


def decay(*args: int) -> int:
    """Return a decay, a small integer below 0."""
    return -1 - unknown("decay")(*args) % 5


def plus(*terms: Dual) -> Dual:
    """Return a sum."""
    return sum(x for x, _ in terms) % PRIME, sum(dx for _, dx in terms) % PRIME


def times(a: Dual, b: Dual) -> Dual:
    """Return a product."""
    return a[0] * b[0] % PRIME, (a[0] * b[1] + a[1] * b[0]) % PRIME


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call, and the first and last tokens of its sequences as (row, begin, end)."""

    H: int
    HV: int
    K: int
    V: int
    sequences: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Recurrence:
    """The recurrence for some inputs: their elements by name, and a direction of one of them."""

    plan: LinearAttentionPlan
    sizes: Sizes
    shapes: Mapping[str, tuple[int, ...]]
    inputs: Mapping[str, Sequence[int]]
    scale: int
    varied: str = ""
    direction: Sequence[int] = ()

    def element(self, name: str, *index: int) -> Dual:
        """Return an element of an input."""
        at = sum(i * s for i, s in zip(index, strides(self.shapes[name]), strict=True))
        return self.inputs[name][at], self.direction[at] if name == self.varied else 0

    def call(self, field: str, row: tuple[int, int, int], column: int, x: Dual = ZERO) -> Dual:
        """Return the value of an expression at a row (batch, token, value head) and a column."""
        formula = self.plan.formulas[field]
        tree = formula.value
        function = decay if field == "decay" else unknown(field)
        value = function(*(a for a, _ in self._arguments(tree, row, column, x).values()))
        change = 0
        for name, slope in formula.slopes.items():
            args = self._arguments(slope, row, column, x)
            factor = 1
            if not is_one(slope):
                factor = unknown(f"{field}_by_{name}")(*(a for a, _ in args.values()))
            inner = x if name in ("x", "v", "o") else self._buffer(name, row, column)
            change += factor * inner[1]
        return value, change % PRIME

    def _arguments(
        self, tree: Any, row: tuple[int, int, int], column: int, x: Dual
    ) -> dict[str, Dual]:
        """Return the arguments of the function of a tree, in the order of its parameters."""
        own = {"h": row[2], "c": column, "H": self.sizes.H, "HV": self.sizes.HV}
        there = variables(tree)
        found: dict[str, Dual] = {}
        for name in (*self.plan.buffers, "x", "v", "o", *own):
            if name in there:
                found[name] = (
                    (own[name], 0)
                    if name in own
                    else x
                    if name in ("x", "v", "o")
                    else self._buffer(name, row, column)
                )
        return found

    def _buffer(self, name: str, row: tuple[int, int, int], column: int) -> Dual:
        batch, token, head = row
        buffer = self.plan.spec.buffers[name]
        places = {"T": (batch, token), "HV": (head,), "K": (column,), "V": (column,)}
        return self.element(name, *(i for size in buffer.shape for i in places[size]))

    def mapped(self, name: str, batch: int, token: int, head: int) -> list[Dual]:
        """Return a row of q or k after its feature map and norm."""
        row = [self.element(name, batch, token, head, c) for c in range(self.sizes.K)]
        if f"{name}_map" in self.plan.formulas:
            row = [self.call(f"{name}_map", (batch, token, head), 0, x) for x in row]
        if self.plan.spec.norm_eps is None:
            return row
        total = plus((field_of(self.plan.spec.norm_eps), 0), *(times(x, x) for x in row))
        found = root(total[0])
        assert found, "the inputs are chosen so that norms have roots"
        r = pow(found, -1, PRIME)
        dr = -pow(2, -1, PRIME) * pow(r, 3, PRIME) * total[1]
        return [times(x, (r, dr % PRIME)) for x in row]

    def run(self) -> tuple[dict[tuple[int, ...], Dual], dict[tuple[int, ...], Dual]]:
        """Return o by (batch, token, head, column), and final states by (sequence, head, ...)."""
        out: dict[tuple[int, ...], Dual] = {}
        final: dict[tuple[int, ...], Dual] = {}
        for n, (batch, begin, end) in enumerate(self.sizes.sequences):
            for head in range(self.sizes.HV):
                self._sequence(n, (batch, begin, end), head, out, final)
        return out, final

    def _sequence(
        self,
        n: int,
        place: tuple[int, int, int],
        head: int,
        out: dict[tuple[int, ...], Dual],
        final: dict[tuple[int, ...], Dual],
    ) -> None:
        K, V = range(self.sizes.K), range(self.sizes.V)
        state = {(k, v): self.element("initial_state", n, head, k, v) for k, v in product(K, V)}
        batch, begin, end = place
        own = head // (self.sizes.HV // self.sizes.H)
        for token in range(begin, end):
            q, k = (self.mapped(name, batch, token, own) for name in ("q", "k"))
            row = batch, token, head
            values = [self.element("v", batch, token, head, v) for v in V]
            state = self._step(state, k, values, row)
            for v in V:
                total = plus(*(times(state[c, v], q[c]) for c in K))
                result = times((self.scale, 0), total)
                if "skip" in self.plan.formulas:
                    result = plus(result, self.call("skip", row, v, values[v]))
                out[batch, token, head, v] = result
        final |= {(n, head, k, v): x for (k, v), x in state.items()}

    def _step(
        self,
        state: dict[tuple[int, int], Dual],
        k: Sequence[Dual],
        values: Sequence[Dual],
        row: tuple[int, int, int],
    ) -> dict[tuple[int, int], Dual]:
        K, V = range(self.sizes.K), range(self.sizes.V)
        if "decay" in self.plan.formulas:
            factors = [self._power(self.call("decay", row, c)) for c in K]
            state = {(c, v): times(factors[c], x) for (c, v), x in state.items()}
        changes = []
        for v in V:
            change = values[v]
            if self.plan.delta:
                known = plus(*(times(state[c, v], k[c]) for c in K))
                change = plus(change, times((-1, 0), known))
            if "beta" in self.plan.formulas:
                change = times(self.call("beta", row, 0), change)
            changes.append(change)
        return {(c, v): plus(x, times(k[c], changes[v])) for (c, v), x in state.items()}

    def _power(self, exponent: Dual) -> Dual:
        """Return the factor of the state. Base e has its logarithm in the exponent already."""
        value = power(exponent[0])
        log = 1 if self.plan.natural else field_of(math.log(2))
        return value, value * log * exponent[1] % PRIME
