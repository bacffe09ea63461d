"""Random expressions of the language by type, drawn from kgen's table of functions.

They are tame. Operands stay where a function is finite. A branch or a step depends only on
positions, parameters and stored elements, which kernels do not round. It depends on the score only
if the value is continuous there. So every difference from float64 above a rounding error is a bug.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kgen.expr import type_rules as types
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Type
from kgen.expr.rows import Finite, Function

INT, FLOAT, BOOL = Type.INT, Type.FLOAT, Type.BOOL
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
STEPS = ("floor", "ceil", "round", "sign")
"""Step functions, which are applied only to whole numbers and quarters."""


def _tame(row: Function, operand: str) -> str:
    """Return an operand at which the function is finite for any number."""
    if row.finite is Finite.EVERYWHERE:
        return operand
    if row.finite is Finite.UP_TO_OVERFLOW:
        return f"clamp({operand}, -4.0, 4.0)"
    return f"(abs({operand}) + 0.5)"


SMOOTH = {
    name: row
    for name, row in TABLE.items()
    if row.callable
    and row.typed is types.real
    and row.arity == (1, 1)
    and row.derivative is not None
}
"""Functions of one real number that return a real number and have a derivative."""


@dataclass
class Words:
    """Names by type, and buffers with the regular index of each axis, from which expressions are
    drawn.
    """

    rng: random.Random
    names: Mapping[str, Type]
    buffers: Mapping[str, tuple[Type, Sequence[str]]] = field(default_factory=dict)
    rounded: tuple[str, ...] = ()
    """Names of numbers that a kernel rounds. No branch depends on them."""
    anywhere: bool = True
    """True if buffers may also be read at irregular indices."""

    def real(self, depth: int) -> str:
        """Draw a real number."""
        if depth <= 0 or self.rng.random() < 0.15:
            return self._leaf(FLOAT)
        return self.rng.choice(self._reals())(depth - 1)

    def integer(self, depth: int) -> str:
        """Draw an integer expression whose values are far from the limits of 32 bits."""
        if depth <= 0 or self.rng.random() < 0.25:
            return self._leaf(INT)
        a, b = (self.integer(depth - 1) for _ in "ab")
        n = self.rng.choice((2, 3, 4, 5, 7, 8, 16, 64, 128))
        return self.rng.choice(
            (
                *(
                    f"({a} + {b})",
                    f"({a} - {b})",
                    f"{n} * {a}",
                    f"{a} // {n}",
                    f"{a} % {n}",
                    f"-{a}",
                ),
                *(
                    f"({a} & {b})",
                    f"({a} | {b})",
                    f"({a} ^ {b})",
                    f"(~{a})",
                    f"({a} << {n % 4})",
                    f"({a} >> ({b} & 3))",
                ),
                f"int({a} / 4.0)",
                *(f"abs({a})", f"min({a}, {b})", f"max({a}, {b})", f"clamp({a}, {-n}, {n})"),
                f"where({self.truth(depth - 1)}, {a}, {b})",
                f"({a} if {self.truth(depth - 1)} else {b})",
            )
        )

    def truth(self, depth: int) -> str:
        """Draw a condition."""
        drawn = self.rng.random()
        if depth <= 0 or drawn < 0.4:
            return self._condition(max(depth - 1, 0))
        a, b = (self.truth(depth - 1) for _ in "ab")
        if drawn < 0.9:
            return f"({a} {self.rng.choice(('and', 'or', 'and', 'or', '&', '|'))} {b})"
        return self.rng.choice(
            (
                f"(not {a})",
                f"where({a}, {b}, {self.truth(0)})",
                f"({a} if {b} else {self.truth(0)})",
            )
        )

    def _condition(self, depth: int) -> str:
        flags = self._reads(BOOL)
        drawn = self.rng.random()
        if flags and drawn < 0.3:
            return self.rng.choice(flags)()
        if self._reads(FLOAT, True) and drawn < 0.4:
            return (
                f"({self._leaf(FLOAT, True)} {self.rng.choice(COMPARISONS[:4])} {self._number()})"
            )
        if drawn < 0.5:
            return f"({self.integer(0)} <= {self.integer(depth)} < {self.integer(depth)})"
        return f"({self.integer(depth)} {self.rng.choice(COMPARISONS)} {self.integer(depth)})"

    def _reals(self) -> list[Callable[[int], str]]:
        def pair(form: str) -> Callable[[int], str]:
            return lambda depth: form.format(self.real(depth), self.real(depth))

        def smooth(depth: int) -> str:
            name, row = self.rng.choice([*SMOOTH.items()])
            return f"{name}({_tame(row, self.real(depth))})"

        def chosen(depth: int) -> str:
            form = self.rng.choice(("where({0}, {1}, {2})", "({1} if {0} else {2})"))
            return form.format(self.truth(depth), self.real(depth), self.real(depth))

        def power(depth: int) -> str:
            if self.rng.random() < 0.4:
                return (
                    f"pow(abs({self.real(depth)}) + 0.5, {self.rng.choice(('1.5', '-1.0', '0.3'))})"
                )
            return f"tanh({self.real(depth)}) ** {self.rng.choice((2, 3))}"

        def detached(depth: int) -> str:
            return f"detach({self.real(depth)})"

        def scaled(depth: int) -> str:
            return f"{self._number()} * {self.real(depth)}"

        def distance(depth: int) -> str:
            step = self.rng.choice(STEPS)
            form = self.rng.choice(
                ("{} * {} / 64", "{} * float({}) / 64", f"{{}} * {step}({{}} / 4.0) / 16")
            )
            return form.format(self._number(), self.integer(min(depth, 1)))

        forms = (
            "({} + {})",
            "({} - {})",
            "tanh({}) * {}",
            "{} / (1.0 + abs({}))",
            "min({}, {})",
            "max({}, {})",
        )
        return [
            *map(pair, forms),
            smooth,
            smooth,
            chosen,
            power,
            detached,
            scaled,
            distance,
            lambda d: f"abs({self.real(d)})",
        ]

    def _leaf(self, kind: Type, exact: bool = False) -> str:
        names = [
            n for n, t in self.names.items() if t is kind and not (exact and n in self.rounded)
        ]
        leaves: list[Callable[[], str]] = [lambda: self.rng.choice(names)] * (2 * bool(names))
        leaves += self._reads(kind, exact)
        leaves.append(self._number if kind is FLOAT else self._count)
        return self.rng.choice(leaves)()

    def _reads(self, kind: Type, exact: bool = False) -> list[Callable[[], str]]:
        return [
            lambda name=name, axes=axes: self._read(name, axes)  # type: ignore[misc]
            for name, (type_, axes) in self.buffers.items()
            if type_ is kind and not (exact and name in self.rounded)
        ]

    def _read(self, name: str, axes: Sequence[str]) -> str:
        """Return a read of a buffer, mostly at its regular indices."""
        if not axes:
            return name
        at = [
            axis if axis and not (self.anywhere and self.rng.random() < 0.2) else self._elsewhere()
            for axis in axes
        ]
        return f"{name}[{', '.join(at)}]"

    def _elsewhere(self) -> str:
        """Return an index that may be out of bounds."""
        names = [name for name, kind in self.names.items() if kind is INT]
        form = self.rng.choice(
            ("{i}", "{i} - 3", "{i} // 16", "{i} % 5", "({i} + {j})", "abs({i} - {j})", "{n}")
        )
        return form.format(i=self.rng.choice(names), j=self.rng.choice(names), n=self._count())

    def _number(self) -> str:
        return self.rng.choice(("0.5", "2.0", "1.5", "0.125", "0.3", "3.0", "1.0"))

    def _count(self) -> str:
        return str(self.rng.choice((0, 1, 2, 3, 5, 16, 31, 64, 100)))
