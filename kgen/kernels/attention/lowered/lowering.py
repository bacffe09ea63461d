"""Lowering of a plan's expressions to values of its kernels, and the names of kernel parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

from kgen.expr import finiteness
from kgen.expr.differentiate import is_one
from kgen.expr.hoist import Binding, Program, hoist
from kgen.expr.nodes import Node, Read, Type, Var, substitute
from kgen.expr.softmax_form import QK
from kgen.expr.spelling import MUL
from kgen.kernels.attention.lowered.model import Param, scaled, side_of
from kgen.kernels.attention.plan.extents import named_extents
from kgen.kernels.attention.plan.model import AttentionPlan, ReadGradient, TileLoop
from kgen.kernels.attention.spec import ANY
from kgen.targets.code import Code, Name, Statement, assign, op, row, text, times
from kgen.targets.triton.printer import BufferLayout, Printer, size_name

ZERO, INFINITY = text("0.0"), text('float("inf")')


class Lowering:
    """Lowers the expressions of one plan.

    `helpers` collects the functions that a file must define.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.spec = plan.spec
        self.helpers: set[str] = set()
        self.open = {n: _open(n, b.shape) for n, b in self.spec.buffers.items()}
        self.layouts = {
            n: BufferLayout(b.dtype, named_extents(n, b.shape))
            for n, b in self.spec.buffers.items()
        }
        self.constants = frozenset(n for n, p in self.spec.params.items() if not p.runtime)
        self.runtime = {n: p for n, p in self.spec.params.items() if p.runtime}
        self.tf32 = self.spec.dtype == "fp32" and self.spec.precision == "tf32"
        self.packed = self.spec.varlen
        self.kv_head = "h_kv" if plan.grouped else "h"
        self.sizes = ("B", "HQ", "TQ", "TK") if self.packed else ("B", "HQ", "SQ", "SK")
        self.not_zero = finiteness.NOT_ZERO | {n for n, p in self.spec.params.items() if p.value}
        self.problem = {p.name: p for p in self._problem()}
        """The parameters of every kernel, by name."""

    def _problem(self) -> list[Param]:
        found = [p for name in self.spec.buffers for p in self.of_buffer(name)]
        if self.packed:
            found += [Param(f"{name}_ptr", name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
        found += [Param(name, name) for name in (*self.sizes, "scale", *self.runtime)]
        if self.plan.grouped:
            found.append(Param("GQA", "GQA=HQ // HKV", "tl.constexpr"))
        return found

    @property
    def open_sizes(self) -> list[str]:
        """Names of the extents that a spec leaves open (`any`)."""
        return [size for sizes in self.open.values() for size in sizes.values()]

    def of_buffer(self, name: str) -> list[Param]:
        """Return the kernel parameters of a buffer: its pointer, strides and open extents."""
        rank = len(self.spec.buffers[name].shape)
        found = [Param(f"{name}_ptr", name), *strides_of(name, rank, wide=rank - 1)]
        return found + [
            Param(size, f"{name}.shape[{axis}]") for axis, size in self.open[name].items()
        ]

    # --- values -----------------------------------------------------------------------------------

    def printer(self, loop: TileLoop, program: Program | None = None) -> Printer:
        """Return a printer for the expressions of a loop, or of another `program` over the same
        indices.
        """
        empty = frozenset[str]() if self.plan.self_attention else frozenset({loop.inner.size.name})
        return Printer(
            program or loop.program,
            side_of(loop.outer).name,
            self.layouts,
            replace(self.plan.index_ranges, empty=empty),
            self.constants,
            self.spec.accuracy,
            self.helpers,
        )

    def lines_of(self, bindings: Iterable[Binding], printer: Printer) -> list[Statement]:
        """Return one statement per binding."""
        return [
            assign(
                b.name, printer.over(b.node, b.place.axes), self._note_on(b.name, printer.program)
            )
            for b in bindings
        ]

    def _note_on(self, name: str, program: Program) -> str:
        """Return the comment on a value whose name does not say enough."""
        scale = program.results.get("qk_scale")
        of_scores = scale == Var(name, Type.FLOAT) and self.plan.form.core != QK
        return "scale of scores after score_mod, not of qk" if of_scores else ""

    def returned(self, rest: Node, printer: Printer) -> Code:
        """Return the `row_rest` that `lse` adds.

        It is finite for rows without a visible key, even if `rest` is infinite or NaN there.
        """
        value = printer.own(rest)
        assert self.plan.form.row_rest is not None
        if not self.may_be_nan(self.plan.form.row_rest):
            return op("{0}", value, operand=MUL)
        if self.spec.sinks:
            # l_i cannot detect a row without keys here, because the sink makes every sum positive.
            return row("where", row("lt", row("abs", value), INFINITY), value, ZERO)
        return row("where", row("eq", "l_i", ZERO), ZERO, value)

    def row_rest(self, loop: TileLoop, printer: Printer) -> Code | None:
        """Return the `row_rest` of a loop, or None."""
        rest = loop.program.results.get("row_rest")
        return None if rest is None else self.returned(rest, printer)

    def sink(self, loop: TileLoop, printer: Printer) -> Code:
        """Return the sink in terms of the loop's logits, for the start of a row's sum."""
        # A row starts with its sink as maximum and 1 as sum. The logits of the loop lack
        # `row_rest`, so the sink has it subtracted.
        rest = loop.program.results.get("row_rest") if self.spec.sinks else None
        return Name("sink") if rest is None else row("sub", "sink", self.returned(rest, printer))

    def may_be_nan(self, node: Node) -> bool:
        """True if a value may be infinite or NaN for a row without visible pairs."""
        return finiteness.may_be_nan(node, self.not_zero)

    def scaled(self, x: Code | str, g: ReadGradient, printer: Printer) -> Code:
        """Return a sum times the factor of a gradient."""
        if is_one(g.factor):
            return op("{0}", x)
        return scaled(x, self.scalar(g.factor, printer), self.may_be_nan(g.factor))

    def scalar(self, node: Node, printer: Printer) -> Code:
        """Return the full expression of a number per (b, h), for a single use after the loop.

        Reads from before the loop are used by name.
        """
        alone = replace(printer, program=hoist({}, {}))
        return alone.own(substitute(node, read_before(printer.program)))

    def product(self, factors: Sequence[Node], printer: Printer) -> Code:
        """Return the product of numbers per (b, h)."""
        first, *rest = (self.scalar(f, printer) for f in factors if not is_one(f))
        return reduce(times, rest, first)


def _open(buffer: str, shape: Sequence[int | str]) -> dict[int, str]:
    """Return the kernels' names of the open extents of a buffer, by axis."""
    return {axis: size_name(buffer, axis) for axis, size in enumerate(shape) if size == ANY}


def strides_of(tensor: str, rank: int, wide: int) -> list[Param]:
    """Return the parameters of a tensor's strides, which one starred argument passes.

    The first `wide` strides are 64-bit, so that a tensor may have more than 2**31 elements.
    """
    return [
        Param(
            f"stride_{tensor}_{d}",
            None if d else f"*{tensor}.stride()",
            "tl.int64" if d < wide else "",
        )
        for d in range(rank)
    ]


def row_strides(name: str, order: str, tensor: str) -> list[Param]:
    """Return the parameters of the strides of a tensor of rows, such as Q, in the order of its
    dimensions. `name` is its name in kernels.

    All strides are 64-bit except the stride of columns.
    """
    return [
        Param(
            f"stride_{name}{d}",
            None if i else f"*{tensor}.stride()",
            "" if d == "d" else "tl.int64",
        )
        for i, d in enumerate(order)
    ]


def read_before(program: Program) -> dict[Node, Node]:
    """Return the reads that a program does once, before everything else, each with its name."""
    once = (b for b in program.before_loop() if isinstance(b.node, Read) and not b.place.axes)
    return {b.node: Var(b.name, b.node.type) for b in once}
