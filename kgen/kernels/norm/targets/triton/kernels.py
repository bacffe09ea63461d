"""The kernels of norms in Triton: one dataclass for each template."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.hoist import Place, Program
from kgen.expr.index_ranges import IndexRanges
from kgen.kernels.norm.plan.planning import Backward, Gradient, NormPlan, Operand, Value
from kgen.targets.code import (
    Code,
    If,
    Name,
    Statement,
    as_type,
    assign,
    op,
    row,
    text,
    total,
)
from kgen.targets.template import Template
from kgen.targets.triton.printer import BufferLayout, Printer, along_row, column

TL_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "float8e4nv"}
ROW, COL = "row", "col"
ROW_VALUES = ("mean", "rstd", "c1", "c2")


@dataclass(frozen=True)
class RowProgram(Template):
    """The beginning of a kernel whose programs share rows."""

    template: ClassVar[str] = "norm/triton/_row_program.j2"


@dataclass(frozen=True)
class HeadProgram(Template):
    """The beginning of a kernel whose programs share the heads of positions."""

    template: ClassVar[str] = "norm/triton/_head_program.j2"


@dataclass(frozen=True)
class Walk:
    """The loop of a program over its tiles."""

    program: RowProgram | HeadProgram
    loop: str
    tile: tuple[str, ...]
    """The rows of a tile, and the guard of its elements."""


@dataclass(frozen=True)
class RmsStatistics(Template):
    """The statistics of a row in RMS norm: its sum of squares."""

    template: ClassVar[str] = "norm/triton/_rms_statistics.j2"

    shared: bool


@dataclass(frozen=True)
class LayerStatistics(Template):
    """The statistics of a row in layer norm: its mean, and its squared deviations."""

    template: ClassVar[str] = "norm/triton/_layer_statistics.j2"

    shared: bool


Statistics = RmsStatistics | LayerStatistics


@dataclass(frozen=True)
class RowScale(Template):
    """The computation of the scale of each row of an eight-bit output."""

    template: ClassVar[str] = "norm/triton/_row_scale.j2"

    shared: bool


@dataclass(frozen=True)
class Store:
    """Elements of a tile that a kernel stores."""

    pointer: str
    value: Code


@dataclass(frozen=True)
class ForwardKernel(Template):
    """The forward kernel."""

    template: ClassVar[str] = "norm/triton/_forward.j2"

    unspecialized: str
    """The parameters on which Triton does not specialize."""
    params: tuple[tuple[str, ...], ...]
    """The parameters, by lines."""
    words: str
    walk: Walk
    loads: tuple[Statement, ...]
    before: tuple[Statement, ...]
    """The values that statistics need."""
    statistics: Statistics
    after: tuple[Statement, ...]
    row_scale: RowScale | None
    quantized: tuple[Statement, ...]
    """The scaling of the output into the range of eight bits."""
    stores: tuple[Store, ...]
    saves: tuple[str, ...]
    """The statistics that backward reads."""


@dataclass(frozen=True)
class Mean:
    """The mean of a value over a row. `later` is the number of means before it, or None."""

    name: str
    value: Code
    later: int | None


@dataclass(frozen=True)
class ColumnSum:
    """A sum over rows: each program stores a part."""

    name: str
    value: Code
    part: Code
    """The address of the partial sum, the value and the guard."""


@dataclass(frozen=True)
class RowSum:
    """A sum over a row."""

    name: str
    value: Code


@dataclass(frozen=True)
class Finalize(Template):
    """The kernel that adds the partial sums of programs."""

    template: ClassVar[str] = "norm/triton/_finalize.j2"

    names: tuple[str, ...]

    @property
    def params(self) -> str:
        return ", ".join(f"{name}{tail}" for tail in ("_parts_ptr", "_ptr") for name in self.names)


@dataclass(frozen=True)
class BackwardKernel(Template):
    """The backward kernel."""

    template: ClassVar[str] = "norm/triton/_backward.j2"

    unspecialized: str
    params: tuple[tuple[str, ...], ...]
    walk: Walk
    loads: tuple[Statement, ...]
    before: tuple[Statement, ...]
    """The values that statistics need."""
    statistics: Statistics | None
    """None if they are among `loads`."""
    middle: tuple[Statement, ...]
    means: tuple[Mean, ...]
    after: tuple[Statement, ...]
    stores: tuple[Store, ...]
    sums: tuple[ColumnSum, ...]
    rows: tuple[RowSum, ...]
    shared: bool
    """True if several programs share a row."""
    finalize: Finalize | None

    @property
    def n_means(self) -> int:
        return len(self.means)


class Kernels:
    """Print the kernels of one plan."""

    def __init__(self, plan: NormPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.heads = self.spec.heads is not None
        params = self.spec.params
        self.constants = {n: p.value for n, p in params.items() if not p.runtime}
        self.runtime = tuple(n for n, p in params.items() if p.runtime)
        self.printer = self._printer()
        statistics = LayerStatistics if plan.layer else RmsStatistics
        self.statistics: Statistics = statistics(shared=not self.heads)
        self.walk = HEAD_WALK if self.heads else ROW_WALK
        sizes = ["n_positions", "H"] if self.heads else ["n_rows"]
        self.unspecialized = "[" + ", ".join(f'"{n}"' for n in (*sizes, *self.runtime)) + "]"

    def _printer(self) -> Printer:
        plan = self.plan
        places = {n: Place(True, (ROW,)) for n in ROW_VALUES}
        loads = [
            *plan.forward.loads,
            *plan.upstream,
            *(plan.backward.loads if plan.backward else ()),
        ]
        for o in plan.operands:
            columns = (ROW, COL) if self.heads else (COL,)
            axes = {"element": (ROW, COL), "row": (ROW,), "column": columns}[o.along]
            places[o.name] = Place(True, axes)
        return Printer(
            program=Program((), {}, places),
            rows=ROW,
            buffers={o.name: BufferLayout(o.dtype, ()) for o in loads},
            ranges=IndexRanges({}, frozenset()),
            constants=frozenset(self.constants),
            accuracy=self.spec.accuracy,
            axes=(ROW, COL),
        )

    # --- kernels ---

    def forward(self) -> ForwardKernel:
        plan, forward, spec = self.plan, self.plan.forward, self.spec
        outputs, stores = ["out"], [Store("out_ptr", Name("out"))]
        if plan.stores_h:
            outputs.append("h")
            stores.append(Store("h_ptr", Name("h")))
        if spec.quantize is not None:
            outputs.append("scale")
        pointers = [*(o.name for o in forward.loads), *outputs, *plan.saves]
        flags = ["SAVE: tl.constexpr"] if plan.saves else []
        per_row = spec.quantize is not None and spec.quantize.scale == "per_row"
        return ForwardKernel(
            unspecialized=self.unspecialized,
            params=self._params(pointers, forward.loads, ["eps"], flags),
            words=f"{_listed([*outputs, *plan.saves])} of each row.",
            walk=self.walk,
            loads=self._loads(forward.loads),
            before=self._values([forward.h]),
            statistics=self.statistics,
            after=self._values([*forward.normed, Value("out", forward.out.tree)]),
            row_scale=RowScale(shared=not self.heads) if per_row else None,
            quantized=self._quantized(),
            stores=tuple(stores),
            saves=plan.saves,
        )

    def _quantized(self) -> tuple[Statement, ...]:
        if self.spec.quantize is None:
            return ()
        clamped = assign("out", op("{tl}.minimum({tl}.maximum({0}, -FP8_MAX), FP8_MAX)", "out"))
        if self.spec.quantize.scale == "per_row":
            return (clamped,)
        return (assign("out", op("{0} / {tl}.load({1})", "out", "scale_ptr")), clamped)

    def backward(self) -> BackwardKernel | None:
        plan, backward = self.plan, self.plan.backward
        if backward is None:
            return None
        loads = (*backward.loads, *plan.upstream)
        pointers = [*(o.name for o in loads), *plan.saves, *stored(backward)]
        at_h = next((i + 1 for i, v in enumerate(backward.before) if v.name == "h"), 0)
        saved = [
            assign(name, op("{tl}.load({0} + rows, mask=row_live, other=0.0)", f"{name}_ptr"))
            for name in plan.saves
        ]
        means = [
            Mean(m.name, self.printer.tile(m.tree), later=i or None)
            for i, m in enumerate(backward.means)
        ]
        names = tuple(g.name for g in backward.columns)
        return BackwardKernel(
            unspecialized=self.unspecialized,
            params=self._params(pointers, loads, [] if plan.saves else ["eps"], []),
            walk=self.walk,
            loads=(*self._loads(loads), *saved),
            before=self._values(backward.before[:at_h]),
            statistics=None if plan.saves else self.statistics,
            middle=self._values(backward.before[at_h:]),
            means=tuple(means),
            after=self._values([backward.dh]),
            stores=tuple(
                Store(f"{g.name}_ptr", self.printer.tile(g.tree)) for g in backward.elements
            ),
            sums=tuple(
                ColumnSum(g.name, self._summand(g), self._part(g.name)) for g in backward.columns
            ),
            rows=tuple(RowSum(g.name, self._summand(g)) for g in backward.rows),
            shared=not self.heads,
            finalize=Finalize(names) if names else None,
        )

    def _part(self, name: str) -> Code:
        """Return the store of a program's partial sum over rows."""
        if self.heads:
            return op(
                "{tl}.store({0}_parts_ptr + group * (H * WIDTH) + columns, {0}, mask=live)", name
            )
        form = (
            "{tl}.store({0}_parts_ptr + group * WIDTH + cols, {tl}.sum({0}, 0), mask=cols < WIDTH)"
        )
        return op(form, name)

    def _params(
        self,
        pointers: Iterable[str],
        loads: Iterable[Operand],
        scalars: list[str],
        flags: list[str],
    ) -> tuple[tuple[str, ...], ...]:
        strides = [
            f"stride_{o.name}{d}: tl.int64"
            for o in loads
            if o.along == "element"
            for d in (("", "_head") if self.heads else ("",))
        ]
        sizes = ["n_positions", "H"] if self.heads else ["n_rows", "slots_ptr"]
        schedule = ["WIDTH", "ROWS", "BLOCK", *([] if self.heads else ["PARTS", "SLOTS"]), "STAGES"]
        constants = [*flags, *(f"{c}: tl.constexpr" for c in schedule)]
        lines = [
            [f"{p}_ptr" for p in pointers],
            strides,
            [*self.runtime, *scalars, *sizes],
            constants,
        ]
        return tuple(tuple(line) for line in lines if line)

    # --- statements ---

    def _loads(self, operands: Iterable[Operand]) -> tuple[Statement, ...]:
        """Return a statement `name = ...` for each tensor of a tile, converted for computation."""
        found: list[Statement] = []
        for operand in operands:
            name = operand.name
            loaded = assign(name, self.printer.loaded(name, *self._place(operand)))
            if name == "dh_out":
                # The caller may not need its gradient.
                found += [
                    assign(name, text("0.0")),
                    If(op("{0} is not None", f"{name}_ptr"), (loaded,)),
                ]
            else:
                found.append(loaded)
        return tuple(found)

    def _place(self, operand: Operand) -> tuple[Code, Code]:
        """Return the addresses of the elements of a tensor in a tile, and their guard."""
        name, pointer = operand.name, Name(f"{operand.name}_ptr")
        if operand.along == "row":
            return row("add", pointer, "rows"), Name("row_live")
        if operand.along == "column" and not self.heads:
            return row("add", pointer, "cols"), row("lt", "cols", "WIDTH")
        if operand.along == "column":
            return row("add", pointer, "columns"), Name("live")
        of_row = [row("mul", column("rows"), f"stride_{name}")]
        if self.heads:
            of_head = row("mul", column("head"), f"stride_{name}_head")
            of_row = [row("mul", "position", f"stride_{name}"), of_head]
        return total(pointer, *of_row, along_row("cols")), Name("live")

    def _values(self, values: Iterable[Value]) -> tuple[Statement, ...]:
        """Return one statement per value. Results for elements out of bounds are zero."""
        lines: list[Statement] = []
        for v in values:
            value: Code = self.printer.tile(v.tree)
            if (v.name == "h" and self.spec.input_mod) or (v.name == "dy" and self.spec.output_mod):
                value = _where_live(value)
            if v.rounded and v.rounded != "fp32":
                value = as_type(as_type(op("({0})", value), TL_DTYPES[v.rounded]), "float32")
            lines.append(assign(v.name, value))
        return tuple(lines)

    def _summand(self, gradient: Gradient) -> Code:
        value = self.printer.tile(gradient.tree)
        return value if gradient.of in ("weight", "bias") else _where_live(value)


ROW_WALK = Walk(
    RowProgram(),
    "for tile in tl.range(group, tl.cdiv(n_rows, ROWS), n_groups, num_stages=STAGES):",
    (
        "rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)",
        "row_live = rows < n_rows",
        "live = row_live[:, None] & (cols < WIDTH)[None, :]",
    ),
)
HEAD_WALK = Walk(
    HeadProgram(),
    "for position in tl.range(group, n_positions, n_groups, num_stages=STAGES):",
    ("rows = (position * H + head).to(tl.int64)",),
)


def stored(backward: Backward) -> list[str]:
    """Return the tensors that the backward kernel writes: gradients, or their partial sums."""
    whole = [g.name for g in (*backward.elements, *backward.rows)]
    return [*whole, *(f"{g.name}_parts" for g in backward.columns)]


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _where_live(value: Code) -> Code:
    return row("where", "live", value, text("0.0"))
