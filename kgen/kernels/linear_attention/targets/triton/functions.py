"""The expressions of a spec as functions of kernels. Each expression is printed once, and kernels
call the function.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from kgen.expr.algebra import call
from kgen.expr.differentiate import is_one
from kgen.expr.hoist import Place, hoist
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Const, Node, Type, variables
from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.spec.names import own_names
from kgen.targets.code import Code, Name, Statement, as_type, assign, load, op, row
from kgen.targets.template import Template
from kgen.targets.triton.printer import Printer

ELEMENT = Place(False, ("q",))
"""The place of all values of a function: its arguments broadcast."""
CONSTANTS = frozenset({"H", "HV"})
WORDS = {
    "decay": "Return the decay of a token as a power of 2. Powers below LOWEST are 0 in float32.",
    "beta": "Return the factor of the update of a token.",
    "skip": "Return the term of the output that does not pass through the state.",
    "output_gate": "Return the factor of the output before the norm.",
    "output": "Return the output from its value after the norm.",
    "q_map": "Return the feature map of queries.",
    "k_map": "Return the feature map of keys.",
}
OF_SLOPE = "Return the derivative of {} with respect to {}."


@dataclass(frozen=True)
class Function(Template):
    """A function of elements."""

    template: ClassVar[str] = "linear_attention/triton/_function.j2"

    name: str
    parameters: list[str]
    """The declarations of the parameters, which the trees of the spec name."""
    words: str
    lines: list[Statement]
    value: Code


class Functions:
    """Build the functions of one plan. `helpers` collects the functions that they call."""

    def __init__(self, plan: LinearAttentionPlan, helpers: set[str]) -> None:
        self.plan, self.helpers = plan, helpers
        self.own = own_names(plan.spec.kernel).kinds["values"].own

    def all(self) -> list[Function]:
        """Return the functions of all expressions, then of their derivatives."""
        found = [self.function(field) for field in self.plan.formulas]
        if self.plan.backward:
            found += self.slopes()
        return found

    def slopes(self) -> Iterator[Function]:
        """Yield the functions of the derivatives."""
        for field, formula in self.plan.formulas.items():
            for name, slope in formula.slopes.items():
                if is_one(slope):
                    continue
                words = OF_SLOPE.format(field, name)
                yield self._function(f"_{field}_by_{name}", slope, words)

    def function(self, field: str) -> Function:
        """Return the function of an expression."""
        value = self.plan.formulas[field].value
        if field == "decay" and self.plan.natural:
            value = call("mul", value, Const(math.log2(math.e), Type.FLOAT))
        made = self._function(f"_{field}", value, WORDS[field])
        if field != "decay":
            return made
        bounded = op("{tl}.where(decay < LOWEST, LOWEST, decay)")
        lines = [*made.lines, assign("decay", made.value)]
        return replace(made, lines=lines, value=bounded)

    def _function(self, name: str, node: Node, words: str) -> Function:
        names = self.parameters_of(node)
        reserved = {*self.own, *variables(node), "decay"}
        program = hoist({"value": (node, ELEMENT)}, dict.fromkeys(names, ELEMENT), reserved)
        no_ranges = IndexRanges({}, frozenset())
        printer = Printer(program, "q", {}, no_ranges, CONSTANTS, "usual", self.helpers)
        lines: list[Statement] = [
            assign(b.name, printer.over(b.node, b.place.axes)) for b in program.bindings
        ]
        value = printer.own(result := program.results["value"])
        if not variables(result) - CONSTANTS:
            value = op("{tl}.full([], {0}, {tl}.float32)", value)
        elif result.type.integral:
            value = row("float", value)
        parameters = [f"{n}: tl.constexpr" if n in CONSTANTS else n for n in names]
        return Function(name, parameters, words, lines, value)

    def parameters_of(self, node: Node) -> tuple[str, ...]:
        """Return the names in a tree, in the order of the parameters."""
        there = variables(node)
        others = ("x", "v", "o", "h", "c", "H", "HV")
        return tuple(n for n in (*self.plan.buffers, *others) if n in there)

    def called(self, name: str, node: Node, at: At) -> Code:
        """Return the call of a function at the elements of a kernel."""
        return op(f"{name}({', '.join(at.value(n) for n in self.parameters_of(node))})")

    def call(self, field: str, at: At) -> Code:
        """Return the call of the function of an expression."""
        return self.called(f"_{field}", self.plan.formulas[field].value, at)

    def slope(self, field: str, name: str, at: At) -> Code:
        """Return the call of the function of a derivative."""
        return self.called(f"_{field}_by_{name}", self.plan.formulas[field].slopes[name], at)


@dataclass(frozen=True)
class At:
    """The elements that a kernel processes: a row or a tile of a chunk, or one token."""

    token: str
    """The index of the tokens."""
    live: str | None
    """The guard of the tokens."""
    columns: str | None
    """The index of the columns, if there are any."""
    suffix: str
    """The end of the names of values of buffers."""
    x: str = "x"
    """The value of `x`, `v` or `o`."""

    def value(self, name: str) -> str:
        """Return the name of a value in the kernel."""
        if name in ("x", "v", "o"):
            return self.x
        if name == "c":
            return str(self.columns)
        return name if name in ("h", *CONSTANTS) else f"{name}_{self.suffix}"

    def reads(self, plan: LinearAttentionPlan, names: Collection[str]) -> list[Statement]:
        """Return the statements that load the buffers among some names, in float32."""
        return [assign(self.value(n), self._read(plan, n)) for n in plan.buffers if n in names]

    def _read(self, plan: LinearAttentionPlan, name: str) -> Code:
        buffer = plan.spec.buffers[name]
        terms = {"t": self.token, "h": "h", "c": str(self.columns)}
        address = f"{name}_ptr"
        if buffer.tokens:
            address += f" + batch * stride_{name}_b"
        for index in buffer.indices:
            address += f" + {terms[index]} * stride_{name}_{index}"
        guard = Name(self.live) if buffer.tokens and self.live is not None else None
        value = load(Name(address), guard)
        return value if buffer.dtype == "fp32" else as_type(value, "float32")


ROWS = At("(first + i)", "live", None, "row")
"""One value for each token of a chunk."""
TILE = At("(first + i)[:, None]", "live[:, None]", "c[None, :]", "tile")
"""The columns of the keys for each token of a chunk."""
VALUES = At("(first + i)[:, None]", "live[:, None]", "offs_v[None, :]", "tile", "v")
"""The columns of the values for each token of a chunk."""
RESULTS = At("(first + i)[:, None]", "live[:, None]", "offs_v[None, :]", "tile", "x")
"""The columns of the output for each token of a block of rows."""
STEP = At("token", None, "offs_k", "now")
STEP_VALUES = At("token", None, "offs_v", "now", "v")
"""One token of a decoding step, with the columns of keys or of values."""
