"""The kernels of norms in CUDA: what each part of a plan is called in `templates/norm/cuda/norm.cu.j2`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kgen.expr.nodes import Const, Node, Type, variables
from kgen.kernels.norm.plan.planning import Gradient, NormPlan, Operand, Value
from kgen.sizes import ELEMENT_SIZE
from kgen.targets.code import CUDA, Assign, If, Name, Statement, lines_of, needed, op, spell, uses_of
from kgen.targets.cuda.elements import ELEMENTS
from kgen.targets.cuda.printer import Printer, literal

TYPES = {**ELEMENTS, "int32": "int", "int64": "long long", "bool": "bool"}
SCALARS = {Type.FLOAT: "float", Type.INT: "int", Type.LONG: "long long", Type.BOOL: "bool"}
ZEROS = {Type.FLOAT: "0.0f", Type.INT: "0", Type.LONG: "0", Type.BOOL: "false"}
# Names of the kernels' own (those of constants in lower case), and words and macros of C++ that are none of Python's.
TAKEN = frozenset(
    """
    t v i n p s to from left most share place first round turn step begin live rank vector vectors
    column prefetch ring moments stage stages sums sum squares deviations largest inverse scale scratch
    hs outs out_of h_of for_each held head lane stripe total shared means statistic finish one mine theirs
    row_parts row_sums row_turn largest_parts largest_turn statistic_parts statistic_turn
    threads elements cluster blocks block single stays early unroll stride further has
    staged part part_of there keeps_rows load load_kept store rounded bf16 fp16 auto bool char const constexpr
    default delete do double enum extern float goto inline int long namespace new operator private
    protected public register short signed sizeof static struct switch template this throw typedef union unsigned using
    virtual void volatile
    alignas alignof and_eq asm bitand bitor char16_t char32_t compl concept const_cast decltype dynamic_cast explicit
    export false friend mutable noexcept not_eq nullptr or_eq reinterpret_cast requires static_assert static_cast
    thread_local true typeid typename wchar_t xor xor_eq
    huge_val infinity int_max int_min m_e m_pi nan null
    """.split()  # noqa: SIM905
)


OF_FILE = ("bf16", "fp16", "fp8_e4m3")
"""Types that the file defines, which C has not."""


@dataclass(frozen=True)
class Param:
    """A parameter of a kernel: a number, or a pointer to elements of a type."""

    type: str
    name: str
    is_pointer: bool = False
    const: str = ""

    @property
    def device(self) -> str:
        """As the kernel has it."""
        return f"{self.const}{self.type}{'* __restrict__' * self.is_pointer} {self.name}"

    @property
    def host(self) -> str:
        """As its C launcher has it."""
        own = "void" if self.is_pointer and self.type in OF_FILE else self.type
        return f"{self.const}{own}{'*' * self.is_pointer} {self.name}"


Params = list[list[Param]]
"""Parameters, a line at a time."""


def pointer(element: str, name: str, const: bool = False) -> Param:
    """One to tensor elements, or to floats."""
    return Param(element, name, is_pointer=True, const="const " * const)


def _device(params: Params) -> str:
    return ",\n".join(", ".join(p.device for p in line) for line in params)


class Body(NamedTuple):
    """Lines, and the operands that they read an element of."""

    lines: list[str]
    reads: frozenset[str]


class KernelFields:
    """Spells one plan. Every value is a line of scalar code inside a loop over the elements of an access."""

    def __init__(self, plan: NormPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        sizes = [ELEMENT_SIZE[self.spec.dtypes[n]] for n in ("input", "output")]
        sizes += [ELEMENT_SIZE[self.spec.dtypes["residual"]]] * bool(self.spec.residual)
        # Accesses of 16 bytes for the narrowest tensor; eight bits are stored 8 bytes at a time.
        self.vector = 16 // max(2, min(sizes))
        constants = {n: p for n, p in self.spec.params.items() if not p.runtime}
        self.runtime = {n: p for n, p in self.spec.params.items() if p.runtime}
        names = {n: self.local(n) for n in (*self.spec.buffers, *self.runtime)} | {
            n: self.local(n).upper() for n in constants
        }
        self.printer = Printer(names, self.spec.fast_math)
        self.constants = [
            {
                "name": self.local(n).upper(),
                "type": SCALARS[p.scalar],
                "value": spell(literal(Const(p.value or 0, p.scalar)), CUDA),
            }
            for n, p in constants.items()
        ]

    @staticmethod
    def local(name: str) -> str:
        """What kernels call a buffer or a parameter."""
        return f"{name}_" if name in TAKEN else name

    # --- lines ---

    def _element(self, operand: Operand) -> Assign:
        """One element of an access, by its name."""
        name = self.local(operand.name)
        form = "to_float({0}_at, i)" if operand.type is Type.FLOAT else "{0}_at.at[i]"
        return Assign((name,), (op(form, name),), type=SCALARS[operand.type])

    def _value(self, value: Value) -> Assign:
        code = self.printer.real(value.tree)
        if value.rounded is not None:
            code = op(f"rounded<{TYPES[value.rounded]}>({{0}})", code)
        return Assign((value.name,), (code,), type="float")

    def _end(self, to: str, tree: Node, sign: str = "=") -> Assign:
        """What is done with a value of each element."""
        return Assign((to,), (self.printer.real(tree),), sign)

    def _body(
        self, operands: Iterable[Operand], values: Iterable[Value], ends: Sequence[Statement], by: str = ""
    ) -> Body:
        """Statements that compute `ends`, or the value `by`, and only what these need before."""
        reads = {o.name: self._element(o) for o in operands if o.along != "row"}
        before = needed([*reads.values(), *map(self._value, values)], {*uses_of(ends), by})
        lines = lines_of([*before, *ends], CUDA)
        return Body(lines, frozenset(n for n, read in reads.items() if read in before))

    def _reads(self, operands: Iterable[Operand], body: Body) -> list[dict[str, str]]:
        """The accesses that some lines use."""
        names = [self.local(o.name) for o in operands if o.name in body.reads]
        return [{"name": n, "read": f"read_{n}(v)"} for n in names]

    # --- operands ---

    @staticmethod
    def _slots(tensors: Iterable[tuple[str, str]], before: str) -> list[dict[str, str]]:
        """Shared memory of tensors, by name and dtype, one behind the other."""
        streams = []
        for name, dtype in tensors:
            slots, begin = f"{name.title().replace('_', '')}Slots", f"{name.upper()}_BEGIN"
            streams.append(
                {"name": name, "element": TYPES[dtype], "slots": slots, "begin": begin, "after": before}
            )
            before = f"{begin} + {slots}::BYTES"
        return streams

    def _streams(self, operands: Iterable[Operand]) -> list[dict[str, str]]:
        return self._slots(((self.local(o.name), o.dtype) for o in operands), "0")

    def _after(self, streams: Sequence[dict[str, str]]) -> str:
        return f"{streams[-1]['begin']} + {streams[-1]['slots']}::BYTES"

    def _columns(self, operands: Iterable[Operand], head: str) -> list[dict[str, str]]:
        offset, row_offset = (f" + {head}", " + head_of_row") if self.spec.heads else ("", "")
        return [
            {
                "name": (n := self.local(o.name)),
                "element": TYPES[o.dtype],
                "address": f"{n}_ptr{offset}",
                "row_address": f"{n}_ptr{row_offset}",
            }
            for o in operands
        ]

    def _rows(self, operands: Iterable[Operand]) -> list[dict[str, str]]:
        def value(o: Operand) -> str:
            at = f"{self.local(o.name)}_ptr[row]"
            return f"to_float({at})" if o.type is Type.FLOAT else at

        return [
            {"name": self.local(o.name), "type": SCALARS[o.type], "value": value(o), "zero": ZEROS[o.type]}
            for o in operands
        ]

    def _params(self, loads: Iterable[Operand], outputs: Sequence[Param], sizes: Sequence[Param]) -> Params:
        lines: Params = []
        for o in loads:
            name = self.local(o.name)
            stride = [Param("long long", f"{name}_stride")] if o.along == "element" else []
            lines.append([pointer(TYPES[o.dtype], f"{name}_ptr", const=True), *stride])
        lines += [*([output] for output in outputs), [*sizes]]
        return lines + [[Param(SCALARS[p.scalar], self.local(n))] for n, p in self.runtime.items()]

    def _sizes(self) -> list[Param]:
        names = ["rows", "width_", *(["heads"] if self.spec.heads else [])]
        return [Param("long long", name) for name in names]

    # --- kernels ---

    def forward(self) -> dict[str, Any]:
        plan, f = self.plan, self.plan.forward
        streams = self._streams(o for o in f.loads if o.along == "element")
        h_lines = self._body(f.loads, [f.h], [], "h")
        out_lines = self._body(f.loads, f.normed, [self._end("outs[i]", f.out.tree)])
        outputs = [pointer(TYPES[self.spec.dtypes["output"]], "out_ptr")]
        if self.spec.quantize:
            given = self.spec.quantize.scale == "per_tensor"
            outputs.append(pointer("float", "scale_ptr", const=given))
        if plan.stores_h:
            outputs.append(pointer(TYPES[self.spec.dtypes["residual"]], "h_ptr"))
        outputs += [pointer("float", f"{s}_ptr") for s in plan.saves]
        loads = sorted(f.loads, key=lambda o: ("element", "column", "row").index(o.along))
        params = self._params(loads, outputs, [*self._sizes(), Param("float", "eps")])
        vectors = [f"{self.local(o.name)}_ptr" for o in f.loads if o.along == "column"]
        dtypes = self.spec.dtypes
        stored = [("out", dtypes["output"]), *([("h", dtypes["residual"])] if plan.stores_h else [])]
        return {
            **self._host(params, ()),
            **self._host_alignment(streams, [*vectors, *(f"{n}_ptr" for n, _ in stored)]),
            "streams": streams,
            "keeps": ["KEEPS_ROWS"],
            "from_memory": True,
            "moments": plan.layer,
            "to_come": "!REFILLS",
            "unroll": "unroll",
            "stage": self._after(streams),
            "stored": self._slots(stored, "STAGES * STAGE"),
            "columns": self._columns((o for o in f.loads if o.along == "column"), "head"),
            "rows": self._rows(o for o in f.loads if o.along == "row"),
            "early": self._reads(f.loads, h_lines),
            "late": self._reads(f.loads, out_lines),
            "h_lines": h_lines.lines,
            "out_lines": out_lines.lines,
            "saves": bool(plan.saves),
            "saves_mean": "mean" in plan.saves,
            "null_words": "; those of statistics, which backward alone needs, may be null"
            if plan.saves
            else "",
            "stores_h": plan.stores_h,
            "heads": bool(self.spec.heads) and any(o.along == "column" for o in f.loads),
            # With heads, rows of one block have different columns.
            "reads": str(sum(o.along != "row" for o in f.loads)),
            "early_words": "a row is on its way" if self.spec.heads else "the first row is on its way",
            "early_if": "EARLY" if self.spec.heads else "EARLY && round == 0",
            "parts": 2 if plan.layer else 1,
            "params": _device(params),
            "loads": loads,
        }

    def _host(self, params: Params, ours: Sequence[str]) -> dict[str, str]:
        """The same for the C launcher: typed, without those in `ours`, which callers do not give; then by name."""
        lines = [line for line in params if line[-1].name not in ours]
        return {
            "host_params": ",\n".join(", ".join(p.host for p in line) for line in lines),
            "host_names": ", ".join(p.name for line in params for p in line),
        }

    def _host_alignment(self, streams: Sequence[dict[str, str]], pointers: Sequence[str]) -> dict[str, str]:
        strides = [f"{s['name']}_stride" for s in streams]
        return {
            "host_pointers": ", ".join([*(f"{s['name']}_ptr" for s in streams), *pointers]),
            "host_strides": ", ".join(strides),
        }

    def backward(self) -> dict[str, Any]:
        plan, b, spec = self.plan, self.plan.backward, self.spec
        assert b is not None
        dout = Operand("dout", spec.dtypes["output"], Type.FLOAT, "element")
        upstream = [dout] + (
            [Operand("dh_out", spec.dtypes["residual"], Type.FLOAT, "element")] if plan.stores_h else []
        )
        operands = [*upstream, *b.loads]
        order = ("element", "column", "row")
        loads = sorted(operands, key=lambda o: order.index(o.along))
        later = {"dh", *(m.name for m in b.means)}

        def late(g: Gradient) -> bool:
            return bool(later & set(variables(g.tree)))

        def sums(gradients: Iterable[Gradient]) -> list[Assign]:
            return [self._end(f"d{self.local(g.of)}[v][i]", g.tree, "+=") for g in gradients]

        def held(gradients: Iterable[Gradient]) -> list[Statement]:
            """Sums of threads that have their columns in registers."""
            return [If(Name("ELEMENTS > 0"), (s,)) for s in sums(gradients)]

        means = [{"name": m.name, "index": str(i)} for i, m in enumerate(b.means)]
        ends = [self._end(f"means[{i}]", m.tree, "+=") for i, m in enumerate(b.means)]
        values = [*b.before, b.dh]
        first = self._body(loads, b.before, [*ends, *held(g for g in b.columns if not late(g))])
        stores = [self._end(f"d{self.local(g.of)}_at[i]", g.tree) for g in b.elements]
        row_ends = [self._end(f"row_sums[{i}]", g.tree, "+=") for i, g in enumerate(b.rows)]
        second = self._body(loads, values, [*stores, *row_ends, *held(g for g in b.columns if late(g))])
        alone = self._body(loads, values, sums(b.columns))
        # What a thread of columns_kernel needs of each row.
        recomputes = not plan.saves
        scratch = [m.name for m in b.means] if any(late(g) for g in b.columns) else []
        scratch += plan.statistics if recomputes else ()
        streams = self._streams(o for o in loads if o.along == "element")
        columns = [o for o in loads if o.along == "column"]
        partial = [
            {"name": f"d{self.local(g.of)}", "index": str(i), "element": TYPES[g.dtype]}
            for i, g in enumerate(b.columns)
        ]
        h_lines = self._body(loads, b.before, [], "h")
        saved = [pointer("float", f"{s}_ptr", const=True) for s in plan.saves]
        outputs = [
            *saved,
            *(pointer(TYPES[g.dtype], f"d{self.local(g.of)}_ptr") for g in (*b.elements, *b.rows)),
        ]
        outputs += [pointer("float", f"{s['name']}_part") for s in partial]
        outputs += [pointer("float", "scratch_ptr")] * bool(scratch)
        finalize: Params = [[pointer("float", f"{s['name']}_part", const=True)] for s in partial]
        finalize += [[pointer(s["element"], f"{s['name']}_ptr")] for s in partial]
        eps = [Param("float", "eps")] * recomputes
        params = self._params(loads, outputs, [*self._sizes(), *eps])
        ours = [*(f"{s['name']}_part" for s in partial), "scratch_ptr"]
        host = self._host(params, ours)
        host["host_params"] += "".join(
            f",\n{'void' if s['element'] in ('bf16', 'fp16') else s['element']}* {s['name']}_ptr"
            for s in partial
        )
        parts = [
            {"name": s["name"] + "_part", "begin": f"{i} * parts * width_"} for i, s in enumerate(partial)
        ]
        if scratch:
            parts.append({"name": "scratch_ptr", "begin": f"{len(partial)} * parts * width_"})
        floats = f"{len(partial)} * parts * width_" + (f" + {len(scratch)} * rows" if scratch else "")
        vectors = [f"{self.local(o.name)}_ptr" for o in columns]
        return {
            **host,
            **self._host_alignment(streams, [*vectors, *(f"d{self.local(g.of)}_ptr" for g in b.elements)]),
            "host_parts": parts,
            "host_floats": floats if partial else "",
            "host_blocks": "heads" if spec.heads else "1",
            "host_multiple": "heads" if spec.heads else "1LL",
            "host_share": "(64 * heads)" if spec.heads else "64",
            "host_rows": "shape.rows" if spec.heads else None,
            "host_heads": "heads" if spec.heads else None,
            "host_refused": ["heads < 1", "rows % heads != 0"] if spec.heads else [],
            "host_finalize": ", ".join(
                [
                    *(f"{s['name']}_part" for s in partial),
                    *(f"{s['name']}_ptr" for s in partial),
                    "parts",
                    "width_",
                ]
            ),
            "streams": streams,
            "keeps": [],
            "from_memory": False,
            "moments": False,
            "to_come": "1",
            "unroll": "unroll (COPIES)",
            "stage": self._after(streams),
            "stored": self._slots(((f"d{self.local(g.of)}", g.dtype) for g in b.elements), "STAGES * STAGE"),
            "columns": self._columns(columns, "head"),
            "rows": self._rows(o for o in loads if o.along == "row"),
            "statistics": list(plan.saves),
            "first_reads": self._reads(loads, first),
            "second_reads": self._reads(loads, second),
            "column_reads": self._reads(loads, alone),
            "column_streams": [
                x for x in streams if x["name"] in {r["name"] for r in self._reads(loads, alone)}
            ],
            "column_columns": [
                x
                for x in self._columns(columns, "head")
                if x["name"] in {r["name"] for r in self._reads(loads, alone)}
            ],
            "first_lines": first.lines,
            "second_lines": second.lines,
            "column_lines": alone.lines,
            "means": means,
            "means_count": str(len(means)),
            "parts": str(len(means)),
            "elements": [{"name": f"d{self.local(g.of)}"} for g in b.elements],
            "sums": partial,
            "sums_count": str(len(partial)),
            "row_sums": [
                {"store": f"store_one(d{self.local(g.of)}_ptr + row, row_sums[{i}]);"}
                for i, g in enumerate(b.rows)
            ],
            "row_sums_count": str(len(b.rows)),
            "scratch": [{"name": n, "index": str(i)} for i, n in enumerate(scratch)],
            "recomputes": recomputes,
            "statistic_parts": 2 if plan.layer else 1,
            "h_lines": h_lines.lines,
            "early": self._reads(loads, h_lines),
            "heads": bool(spec.heads) and bool(columns),
            "held_words": "every row of a head" if spec.heads else "every row",
            "params": _device(params),
            "finalize_params": _device([*finalize, [Param("long long", n) for n in ("parts", "width")]]),
            "loads": loads,
        }
