"""The Triton target of norms: a plan becomes the names that `templates/norm/triton/norm.j2` uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kgen.expr.functions import in_order
from kgen.expr.hoist import Place, Program
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Node
from kgen.kernels.norm.plan.planning import Gradient, NormPlan, Operand, Value, plan_norm
from kgen.kernels.norm.plan.tiles import norm_tiles
from kgen.kernels.norm.spec import MAX_WIDTH
from kgen.kernels.norm.targets.formula import formula
from kgen.kernels.norm.targets.triton.launcher import NormLauncher
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.triton.printer import Printer
from kgen.targets.triton.tritons import FIELDS

TL_DTYPES = {"fp32": "tl.float32", "bf16": "tl.bfloat16", "fp16": "tl.float16", "fp8_e4m3": "tl.float8e4nv"}
ROW, COL = "row", "col"
ROW_VALUES = ("mean", "rstd", "c1", "c2")


def sources(loaded: Loaded) -> list[Source]:
    """The one file of this target."""
    plan = plan_norm(loaded)
    return [Source("triton.py", "norm/triton/norm.j2", _Fields(plan).context(), rank=1)]


class _Fields:
    """Spells the kernels of one plan."""

    def __init__(self, plan: NormPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.heads = self.spec.heads is not None
        params = self.spec.params
        self.constants = {n: p.value for n, p in params.items() if not p.runtime}
        self.runtime = tuple(n for n, p in params.items() if p.runtime)
        places = {n: Place(True, (ROW,)) for n in ROW_VALUES}
        for o in plan.operands:
            columns = (ROW, COL) if self.heads else (COL,)
            axes = {"element": (ROW, COL), "row": (ROW,), "column": columns}[o.along]
            places[o.name] = Place(True, axes)
        self.printer = Printer(
            program=Program((), {}, places),
            rows=ROW,
            buffers={},
            ranges=IndexRanges({}, frozenset()),
            constants=frozenset(self.constants),
            fast_math=self.spec.fast_math,
            axes=(ROW, COL),
        )

    def context(self) -> dict[str, object]:
        """Every name of the template."""
        spec, plan = self.spec, self.plan
        quantize = spec.quantize.scale if spec.quantize else None
        context: dict[str, object] = {
            "name": spec.name,
            "summary": opening(spec),
            "formula": formula(plan),
            "constants": [{"name": n.upper(), "value": repr(v)} for n, v in self.constants.items()],
            "heads": self.heads,
            "shared": not self.heads,
            "layer": plan.layer,
            "saves": plan.saves,
            "recomputes": plan.backward is not None and not plan.saves,
            "quantized": quantize is not None,
            "per_row": quantize == "per_row",
            "per_tensor": quantize == "per_tensor",
            "backward": self._backward() if plan.backward else None,
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
            {"name": name, "chips": [{"chip": c, "tiles": t} for c, t in sorted(table.items(), reverse=True)]}
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
            "loads": [self._load(o) for o in forward.loads],
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
            {"name": m.name, "value": self._print(m.tree), "later": i or None}
            for i, m in enumerate(backward.means)
        ]
        return {
            "words": "Gradients; a program sums those of columns over the rows that it takes.",
            "params": self._params(pointers, loads, [] if plan.saves else ["eps"], []),
            "loads": [self._load(o) for o in loads],
            "before": self._lines(backward.before[:at_h]),
            "middle": self._lines(backward.before[at_h:]),
            "means": means,
            "n_means": len(means),
            "after": self._lines([backward.dh]),
            "stores": [{"ptr": f"{g.name}_ptr", "value": self._print(g.tree)} for g in backward.elements],
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

    def _load(self, operand: Operand) -> str:
        """`name = ...` for the elements of a tensor in a tile, as values to compute with."""
        name = operand.name
        if operand.along == "row":
            load = f"tl.load({name}_ptr + rows, mask=row_live, other=0)"
        elif operand.along == "column" and not self.heads:
            load = f"tl.load({name}_ptr + cols, mask=cols < WIDTH, other=0)"
        elif operand.along == "column":
            load = f"tl.load({name}_ptr + columns, mask=live, other=0)"
        else:
            row = f"rows[:, None] * stride_{name}"
            if self.heads:
                row = f"position * stride_{name} + head[:, None] * stride_{name}_head"
            load = f"tl.load({name}_ptr + {row} + cols[None, :], mask=live, other=0)"
        if operand.dtype in ("bf16", "fp16"):
            load += ".to(tl.float32)"
        elif operand.dtype == "bool":
            load += " != 0"
        if name == "dh_out":
            # Its gradient may not be asked for.
            return f"dh_out = 0.0\nif dh_out_ptr is not None:\n    dh_out = {load}"
        return f"{name} = {load}"

    def _lines(self, values: Iterable[Value]) -> list[str]:
        """One line for each value. What an expression makes of elements that are not there is zero."""
        lines = []
        for v in values:
            text = self._print(v.tree)
            if (v.name == "h" and self.spec.input_mod) or (v.name == "dy" and self.spec.output_mod):
                text = f"tl.where(live, {text}, 0.0)"
            if v.rounded and v.rounded != "fp32":
                text = f"({text}).to({TL_DTYPES[v.rounded]}).to(tl.float32)"
            lines.append(f"{v.name} = {text}")
        return lines

    def _summand(self, gradient: Gradient) -> str:
        text = self._print(gradient.tree)
        return text if gradient.of in ("weight", "bias") else f"tl.where(live, {text}, 0.0)"

    def _print(self, node: Node) -> str:
        return str(self.printer.tile(node))
