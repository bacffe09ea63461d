"""The Triton target of norms: a plan becomes the names that `templates/norm/triton/norm.j2` uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kgen.expr.functions import in_order
from kgen.expr.hoist import Place, Program
from kgen.expr.index_ranges import IndexRanges
from kgen.kernels.norm.plan.planning import Gradient, NormPlan, Operand, Value, plan_norm
from kgen.kernels.norm.plan.tiles import norm_tiles
from kgen.kernels.norm.spec import MAX_WIDTH
from kgen.kernels.norm.targets.formula import formula
from kgen.kernels.norm.targets.triton.launcher import NormLauncher
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.code import (
    Code,
    If,
    Name,
    Statement,
    as_type,
    assign,
    op,
    printed,
    row,
    text,
    total,
)
from kgen.targets.triton import tables as by_chip
from kgen.targets.triton.printer import BufferLayout, Printer, along_row, column
from kgen.targets.triton.tritons import FIELDS

TL_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "float8e4nv"}
ROW, COL = "row", "col"
ROW_VALUES = ("mean", "rstd", "c1", "c2")


def sources(loaded: Loaded) -> list[Source]:
    """The one file of this target."""
    plan = plan_norm(loaded)
    return [
        Source(
            "triton.py",
            "norm/triton/norm.j2",
            printed(_Fields(plan).context()),
            rank=1,
            alone={},
            docstring="norm/triton/_docstring.j2",
        )
    ]


class _Fields:
    """Spells the kernels of one plan."""

    def __init__(self, plan: NormPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.heads = self.spec.heads is not None
        params = self.spec.params
        self.constants = {n: p.value for n, p in params.items() if not p.runtime}
        self.runtime = tuple(n for n, p in params.items() if p.runtime)
        places = {n: Place(True, (ROW,)) for n in ROW_VALUES}
        loads = [*plan.forward.loads, *plan.upstream, *(plan.backward.loads if plan.backward else ())]
        for o in plan.operands:
            columns = (ROW, COL) if self.heads else (COL,)
            axes = {"element": (ROW, COL), "row": (ROW,), "column": columns}[o.along]
            places[o.name] = Place(True, axes)
        self.printer = Printer(
            program=Program((), {}, places),
            rows=ROW,
            buffers={o.name: BufferLayout(o.dtype, ()) for o in loads},
            ranges=IndexRanges({}, frozenset()),
            constants=frozenset(self.constants),
            accuracy=self.spec.accuracy,
            axes=(ROW, COL),
        )

    def context(self) -> dict[str, object]:
        """Every name of the template."""
        spec, plan = self.spec, self.plan
        quantize = spec.quantize.scale if spec.quantize else None
        backward = self._backward() if plan.backward else None
        context: dict[str, object] = {
            "name": spec.name,
            "summary": opening(spec),
            "formula": formula(plan),
            "constants": [{"name": n.upper(), "value": repr(v)} for n, v in self.constants.items()],
            "heads": self.heads,
            "shared": not self.heads,
            "layer": plan.layer,
            "totals": not plan.layer or bool(backward and backward["rows"]),
            "saves": plan.saves,
            "recomputes": plan.backward is not None and not plan.saves,
            "quantized": quantize is not None,
            "per_row": quantize == "per_row",
            "per_tensor": quantize == "per_tensor",
            "backward": backward,
            "forward": self._forward(),
            "unspecialized": self._list(["n_positions", "H"] if self.heads else ["n_rows"]),
            "tile_tables": self._tables(),
            "max_width": MAX_WIDTH,
        }
        context |= NormLauncher(plan).fields() | FIELDS
        context["helpers"] = in_order(self.printer.helpers)
        return context

    def _list(self, sizes: list[str]) -> str:
        return "[" + ", ".join(f'"{n}"' for n in (*sizes, *self.runtime)) + "]"

    def _tables(self) -> list[dict[str, object]]:
        plan = self.plan
        tables = {"_FORWARD_TILES": norm_tiles(self.spec, "forward", plan.forward.loads)}
        if plan.backward:
            loads = (*plan.backward.loads, *plan.upstream)
            tables["_BACKWARD_TILES"] = norm_tiles(self.spec, "backward", loads)
        return [
            {
                "name": name,
                "rows": [
                    {"chips": chips, "tiles": tiles}
                    for chips, tiles in by_chip.rows({chip: [tiles] for chip, tiles in table.items()})
                ],
            }
            for name, table in tables.items()
        ]

    # --- kernels ---

    def _forward(self) -> dict[str, object]:
        plan, forward = self.plan, self.plan.forward
        outputs = ["out"] + ["h"] * plan.stores_h + ["scale"] * (self.spec.quantize is not None)
        stores = [{"ptr": "out_ptr", "value": "out"}] + [{"ptr": "h_ptr", "value": "h"}] * plan.stores_h
        pointers = [o.name for o in forward.loads] + outputs + list(plan.saves)
        save = ["SAVE: tl.constexpr"] if plan.saves else []
        words = outputs + list(plan.saves)
        return {
            "words": ", ".join(words[:-1]) + (" and " if words[:-1] else "") + f"{words[-1]} of each row.",
            "params": self._params(pointers, forward.loads, ["eps"], save),
            "loads": [line for o in forward.loads for line in self._load(o)],
            "before": self._lines([forward.h]),
            "after": self._lines([*forward.normed, Value("out", forward.out.tree)]),
            "stores": stores,
        }

    def _backward(self) -> dict[str, object]:
        plan, backward = self.plan, self.plan.backward
        assert backward is not None
        grads = [*backward.elements, *backward.rows, *backward.columns]
        loads = [*backward.loads, *plan.upstream]
        parts = {g.name for g in backward.columns}
        pointers = [o.name for o in loads] + list(plan.saves)
        pointers += [f"{g.name}_parts" if g.name in parts else g.name for g in grads]
        at_h = next((i + 1 for i, v in enumerate(backward.before) if v.name == "h"), 0)
        means = [
            {"name": m.name, "value": self.printer.tile(m.tree), "later": i or None}
            for i, m in enumerate(backward.means)
        ]
        return {
            "words": "Gradients; a program sums those of columns over the rows that it takes.",
            "params": self._params(pointers, loads, [] if plan.saves else ["eps"], []),
            "loads": [line for o in loads for line in self._load(o)],
            "before": self._lines(backward.before[:at_h]),
            "middle": self._lines(backward.before[at_h:]),
            "means": means,
            "n_means": len(means),
            "after": self._lines([backward.dh]),
            "stores": [
                {"ptr": f"{g.name}_ptr", "value": self.printer.tile(g.tree)} for g in backward.elements
            ],
            "sums": [{"name": g.name, "value": self._summand(g)} for g in backward.columns],
            "rows": [{"name": g.name, "value": self._summand(g)} for g in backward.rows],
            "finalize_params": ", ".join(
                f"{g.name}{tail}" for tail in ("_parts_ptr", "_ptr") for g in backward.columns
            ),
        }

    def _params(
        self, pointers: Sequence[str], loads: Iterable[Operand], scalars: list[str], flags: list[str]
    ) -> list[list[str]]:
        strides = [
            f"stride_{o.name}{d}: tl.int64"
            for o in loads
            if o.along == "element"
            for d in (("", "_head") if self.heads else ("",))
        ]
        sizes = ["n_positions", "H"] if self.heads else ["n_rows", "slots_ptr"]
        schedule = ["WIDTH", "ROWS", "BLOCK", *([] if self.heads else ["PARTS", "SLOTS"]), "STAGES"]
        lines = [[f"{p}_ptr" for p in pointers], strides, [*self.runtime, *scalars, *sizes]]
        lines.append([*flags, *(f"{c}: tl.constexpr" for c in schedule)])
        return [line for line in lines if line]

    def _load(self, operand: Operand) -> list[Statement]:
        """`name = ...` for the elements of a tensor in a tile, as values to compute with."""
        name = operand.name
        loaded = assign(name, self.printer.loaded(name, *self._place(operand)))
        if name == "dh_out":
            # Its gradient may not be asked for.
            return [assign(name, text("0.0")), If(op("{0} is not None", f"{name}_ptr"), (loaded,))]
        return [loaded]

    def _place(self, operand: Operand) -> tuple[Code, Code]:
        """The addresses of the elements of a tensor in a tile, and which of them are there."""
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

    def _lines(self, values: Iterable[Value]) -> list[Statement]:
        """One line for each value. What an expression makes of elements that are not there is zero."""
        lines: list[Statement] = []
        for v in values:
            value: Code = self.printer.tile(v.tree)
            if (v.name == "h" and self.spec.input_mod) or (v.name == "dy" and self.spec.output_mod):
                value = _where_live(value)
            if v.rounded and v.rounded != "fp32":
                value = as_type(as_type(op("({0})", value), TL_DTYPES[v.rounded]), "float32")
            lines.append(assign(v.name, value))
        return lines

    def _summand(self, gradient: Gradient) -> Code:
        value = self.printer.tile(gradient.tree)
        return value if gradient.of in ("weight", "bias") else _where_live(value)


def _where_live(value: Code) -> Code:
    return row("where", "live", value, text("0.0"))
