"""The decay of chunk_output in Triton: the statements that compute exponents, and values that use
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kgen.expr.algebra import call
from kgen.expr.differentiate import is_one
from kgen.expr.hoist import Place, Program, hoist
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Const, Node, Type
from kgen.expr.spelling import MUL
from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan
from kgen.spec.names import own_names
from kgen.targets.code import Code, Name, Statement, as_type, assign, atom, op, row, times
from kgen.targets.triton.printer import Printer, along_row, column

ROW = Place(False, ("q",))
"""The place of a value per token of a chunk. Values that do not vary with `i` are scalars of a
(chunk, head).
"""

_GATES = {
    "g": op(
        "{tl}.load(g_ptr + b * stride_gb + (first + i) * stride_gt + h * stride_gh, mask=live, "
        "other=0.0)"
    ),
    "g_gamma": op("{tl}.load(g_gamma_ptr + h * stride_gamma)"),
}


@dataclass(frozen=True)
class Decay:
    """The decay in a kernel."""

    lines: list[Statement]
    """The statements that read the gates and compute the exponents."""
    exponents: Code | None
    """A vector over the tokens of the chunk; None without decay."""
    natural: bool
    """True if the base is e, False if it is 2."""
    slope: Code | None
    """The factor that turns the gradient of an exponent into the gradient of the gate; None
    for 1.
    """

    @property
    def power(self) -> Code | None:
        """The decay from the start of the chunk to each token; None without decay."""
        return (
            None
            if self.exponents is None
            else op("{tl}.exp2({0})", self._in_base_2(self.exponents))
        )

    def weighted(self, products: str, *, transposed: bool = False) -> Code:
        """Multiply products of queries and keys by their decay.

        Pairs that do not count are zero.
        """
        if self.exponents is None:
            return op("{tl}.where(pair, {0}, 0.0)", products)
        queries, keys = column(self.exponents), along_row(self.exponents)
        if transposed:
            queries, keys = along_row(self.exponents), column(self.exponents)
        difference = self._in_base_2(row("sub", queries, keys))
        form = '{0} * {tl}.exp2({tl}.where(pair, {1}, float("-inf")))'
        return op(form, products, difference, binds=MUL)

    def _in_base_2(self, exponent: Code) -> Code:
        """Convert an exponent of the spec's base to base 2."""
        return times("LOG2E", exponent) if self.natural else exponent


def decay(plan: ChunkOutputPlan, helpers: set[str], *, with_slope: bool) -> Decay:
    """Return the decay of a plan. Add the functions that its statements call to `helpers`."""
    roots: dict[str, tuple[Node, Place]] = {}
    if plan.exponent is not None and not plan.plain_gate:
        roots["c"] = (plan.exponent, ROW)
    if plan.slope is not None and with_slope:
        # d b**c / d c is log(b) * b**c.
        factor = Const(math.log(2), Type.FLOAT)
        roots["slope"] = (plan.slope if plan.natural else _scaled(plan.slope, factor), ROW)
    own = own_names(plan.spec.kernel).kinds["values"].own
    program = hoist(roots, {"i": ROW, "g": ROW}, reserved={*own, *roots})
    printer = Printer(program, "q", {}, IndexRanges({}, frozenset()), frozenset(), "usual", helpers)
    lines: list[Statement] = _gates(plan)
    lines += [assign(b.name, printer.over(b.node, b.place.axes)) for b in program.bindings]
    if "c" in roots:
        lines.append(assign("c", _row(program, program.results["c"], printer)))
    slope = program.results.get("slope")
    return Decay(
        lines,
        None if plan.exponent is None else Name("c" if "c" in roots else "g"),
        plan.natural,
        None if slope is None or is_one(slope) else atom(printer.own(slope)),
    )


def _gates(plan: ChunkOutputPlan) -> list[Statement]:
    """Read the gates, in float32."""
    in_float32 = plan.spec.gate_dtype == "fp32"
    return [
        assign(gate, _GATES[gate] if in_float32 else as_type(_GATES[gate], "float32"))
        for gate in plan.gates
    ]


def _scaled(node: Node, factor: Const) -> Node:
    return factor if node == Const(1, Type.INT) else call("mul", factor, node)


def _row(program: Program, node: Node, printer: Printer) -> Code:
    """Return a value as a float32 vector over the tokens of the chunk."""
    own = printer.own(node)
    if program.place(node).axes:
        return row("float", own) if node.type.integral else own
    return atom(own, "{tl}.zeros([BT], {tl}.float32) + {0}")
