"""The kernels of norms in CUDA: what each part of a plan is called in `templates/norm/cuda/norm.cu.j2`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kgen.expr.nodes import Const, Node, Type, variables
from kgen.kernels.norm.plan.planning import H, NormPlan, Operand, Value
from kgen.kernels.norm.plan.shapes import Shape, backward_shapes, forward_shapes
from kgen.kernels.norm.targets.cuda.names import given_way, made_of, slots
from kgen.sizes import ELEMENT_SIZE
from kgen.targets.code import (
    CUDA,
    Assign,
    If,
    Name,
    Statement,
    needed,
    op,
    spell,
    text,
    uses_of,
)
from kgen.targets.cuda.elements import ELEMENTS
from kgen.targets.cuda.params import Param, Params, device, given, host, names, pointer
from kgen.targets.cuda.printer import Printer, literal
from kgen.targets.cuda.statements import stored_at_once, without_copies

TYPES = {**ELEMENTS, "int32": "int", "int64": "long long", "bool": "bool"}
SCALARS = {Type.FLOAT: "float", Type.INT: "int", Type.LONG: "long long", Type.BOOL: "bool"}
ORDER = ("element", "column", "row")
"""Of parameters, by what their tensors vary along."""
ZEROS = {Type.FLOAT: "0.0f", Type.INT: "0", Type.LONG: "0", Type.BOOL: "false"}

OF_ROWS: dict[bool, dict[str, object]] = {
    False: {
        "held_words": "every row",
        "host_share": "64",
        "host_rows": None,
        "host_heads": None,
        "host_refused": [],
        "columns_words": "gridDim.y shares of the rows",
        "columns_first": "blockIdx.y * 8 + stripe",
        "columns_step": "gridDim.y * 8",
        "columns_part": "(long long)blockIdx.y",
        "finalize_words": "32 columns a block",
        "finalize_first": "stripe",
        "finalize_step": "32",
        "finalize_head": None,
    },
    True: {
        "held_words": "every row of a head",
        "host_share": "(64 * heads)",
        "host_rows": "shape.rows",
        "host_heads": "heads",
        "host_refused": ["heads < 1", "rows % heads != 0"],
        "columns_words": "gridDim.y shares of the rows, gridDim.z heads",
        "columns_first": "(long long)(blockIdx.y * 8 + stripe) * gridDim.z + blockIdx.z",
        "columns_step": "8LL * gridDim.y * gridDim.z",
        "columns_part": "(long long)(blockIdx.y * gridDim.z + blockIdx.z)",
        "finalize_words": "32 columns a block, gridDim.y heads, to which every gridDim.y-th part belongs",
        "finalize_first": "blockIdx.y + (long long)stripe * gridDim.y",
        "finalize_step": "32 * gridDim.y",
        "finalize_head": "(long long)blockIdx.y * width",
    },
}
"""How kernels go through rows to sum over them: all of them, or those of each head."""


def _times(n: int, of: str) -> str:
    return of if n == 1 else f"{n} * {of}"


def _more(n: int) -> int | None:
    """A factor, unless it is 1."""
    return n if n > 1 else None


class Body(NamedTuple):
    """Statements, the operands that they read an element of, and the names that they use."""

    lines: list[str]
    reads: frozenset[str]
    uses: frozenset[str]


IN_BACKWARD = {
    "keeps": [],
    "from_memory": False,
    "fetches": ["STAGES > 0"],
    "held_if": "ELEMENTS > 0",
    "to_come": "1",
    "moments": False,
    "unroll": "unroll (COPIES)",
}
"""Fields of every backward kernel, whatever the spec."""


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
        self.locals = given_way((*self.spec.buffers, *self.spec.params), self.taken())
        names = {n: self.local(n) for n in (*self.spec.buffers, *self.runtime)} | {
            n: self.local(n).upper() for n in constants
        }
        self.printer = Printer(names, self.spec.accuracy)
        self.rounds = False
        self.multiples = bool(self.spec.heads and plan.backward)
        self.constants = [
            {
                "name": self.local(n).upper(),
                "type": SCALARS[p.scalar],
                "value": spell(literal(Const(p.value or 0, p.scalar)), CUDA),
            }
            for n, p in constants.items()
        ]

    def taken(self) -> set[str]:
        """Names that the file has because of the spec."""
        plan, name = self.plan, self.spec.name
        backward = [*plan.upstream, *(plan.backward.loads if plan.backward else ())]
        tensors = [o.name for o in (*plan.forward.loads, *backward) if o.name not in self.spec.buffers]
        made = (made_of(n) for n in (*tensors, "out", "h", *plan.saves))
        return {f"{name}_forward", f"{name}_backward", f"{name}_kernels"}.union(*made)

    def local(self, name: str) -> str:
        """What kernels call a tensor or a parameter."""
        return self.locals.get(name, name)

    # --- lines ---

    def _element(self, operand: Operand, at: str) -> Assign:
        """An element of a tensor, by the tensor's name, which `at` has a hole for."""
        name = self.local(operand.name)
        form = "to_float({0})" if operand.type is Type.FLOAT else "{0}"
        return Assign((name,), (op(form, text(at.format(name))),), type=SCALARS[operand.type])

    def _of_access(self, operand: Operand) -> Assign:
        """The same of an access that was loaded."""
        return self._element(operand, "{0}_at, i" if operand.type is Type.FLOAT else "{0}_at.at[i]")

    def _of_column(self, operand: Operand) -> Assign:
        """The same straight from memory, at a row and a column."""
        of_head = "blockIdx.z * width_ + " if self.spec.heads else ""
        places = {"element": "row * {0}_stride + col", "row": "row", "column": f"{of_head}col"}
        return self._element(operand, f"{{0}}_ptr[{places[operand.along]}]")

    def _value(self, value: Value) -> Assign:
        code = self.printer.real(value.tree)
        if value.rounded is not None:
            self.rounds = True
            code = op(f"rounded<{TYPES[value.rounded]}>({{0}})", code)
        return Assign((value.name,), (code,), type="float")

    def _end(self, to: str, tree: Node, sign: str = "=") -> Assign:
        """What is done with a value of each element."""
        return Assign((to,), (self.printer.real(tree),), sign)

    def _body(self, reads: Mapping[str, Assign], values: Iterable[Value], ends: Sequence[Statement]) -> Body:
        """Statements that compute `ends`, and only what these need before."""
        before = needed([*reads.values(), *map(self._value, values)], uses_of(ends))
        read = frozenset(n for n, assign in reads.items() if assign in before)
        statements = without_copies([*before, *ends])
        written = ["\n".join(s.lines(CUDA)) for s in stored_at_once(statements)]
        return Body(written, read, uses_of(statements))

    def _accesses(self, operands: Iterable[Operand]) -> dict[str, Assign]:
        return {o.name: self._of_access(o) for o in operands if o.along != "row"}

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
            own, begin = slots(name), f"{name.upper()}_BEGIN"
            streams.append(
                {"name": name, "element": TYPES[dtype], "slots": own, "begin": begin, "after": before}
            )
            before = f"{begin} + {own}::BYTES"
        return streams

    def _columns(self, operands: Iterable[Operand]) -> list[dict[str, str]]:
        offset, row_offset = (" + head", " + head_of_row") if self.spec.heads else ("", "")
        return [
            {
                "name": (n := self.local(o.name)),
                "element": TYPES[o.dtype],
                "address": f"{n}_ptr{offset}",
                "row_address": f"{n}_ptr{row_offset}",
            }
            for o in operands
            if o.along == "column"
        ]

    def _rows(self, operands: Iterable[Operand]) -> list[dict[str, str]]:
        found = [(o, self._element(o, "{0}_ptr[row]")) for o in operands if o.along == "row"]
        return [
            {"name": a.name, "type": a.type, "value": spell(a.value, CUDA), "zero": ZEROS[o.type]}
            for o, a in found
        ]

    def _inputs(self, loads: Iterable[Operand]) -> Params:
        lines: Params = []
        for o in loads:
            name, rows = self.local(o.name), o.along == "element"
            first = pointer(TYPES[o.dtype], f"{name}_ptr", o.name, const=True)
            stride = [Param("long long", f"{name}_stride")] if rows else []
            lines.append([replace(first, given=f"*_rows({o.name})") if rows else first, *stride])
        return lines

    def _numbers(self, heads: bool, eps: bool, uses: frozenset[str]) -> Params:
        """Sizes, and those numbers that a kernel uses."""
        sizes = [Param("long long", n, n.strip("_")) for n in ("rows", "width_", *["heads"] * heads)]
        sizes += [Param("float", "eps", "ctypes.c_float(eps)")] * eps
        lines = [sizes]
        for n, p in self.runtime.items():
            if self.local(n) in uses:
                kind = "ctypes.c_int" if p.scalar is Type.INT else "ctypes.c_float"
                lines.append([Param(SCALARS[p.scalar], self.local(n), f"{kind}({n})")])
        return lines

    # --- kernels ---

    def _row(self, s: Shape) -> list[int]:
        """A shape as the tables of a file have it."""
        vector = 1 if s.single else self.vector
        return [s.width, s.threads, s.rows, s.elements, s.cluster, vector, s.stages, s.blocks, s.turns]

    def _kernel(
        self,
        name: str,
        shapes: Sequence[Shape],
        loads: Sequence[Operand],
        stored: Sequence[tuple[str, str]],
        h: Body,
    ) -> dict[str, Any]:
        """What both kernels have: shapes, shared memory, what is loaded and stored, and how h is made."""
        streams = self._slots(((self.local(o.name), o.dtype) for o in loads if o.along == "element"), "0")
        columns = self._columns(loads)
        vectors = [*(c["name"] for c in columns), *(n for n, _ in stored)]
        return {
            "name": name,
            "table": f"{name.upper()}_SHAPES",
            "shapes": [self._row(s) for s in shapes],
            "widest": shapes[-1].width,
            "streams": streams,
            "stage": f"{streams[-1]['begin']} + {streams[-1]['slots']}::BYTES",
            "stored": self._slots(stored, "STAGES * STAGE"),
            "columns": columns,
            "rows": self._rows(loads),
            "heads": bool(self.spec.heads and columns),
            "bytes": sum(ELEMENT_SIZE[o.dtype] for o in loads if o.along == "element"),
            "stored_bytes": sum(ELEMENT_SIZE[dtype] for _, dtype in stored),
            "host_pointers": ", ".join(f"{n}_ptr" for n in (*(s["name"] for s in streams), *vectors)),
            "host_strides": ", ".join(f"{s['name']}_stride" for s in streams),
            "h_lines": h.lines,
            "early": self._reads(loads, h),
            "loads": loads,
        }

    def forward(self) -> dict[str, Any]:
        plan, f, spec = self.plan, self.plan.forward, self.spec
        loads = sorted(f.loads, key=lambda o: ORDER.index(o.along))
        accesses = self._accesses(f.loads)
        h = self._body(accesses, [f.h], [self._end("to[i]", H)])
        late = {**accesses, "h": Assign(("h",), (Name("hs[i]"),), type="float")}
        out = self._body(late, f.normed, [self._end("outs[i]", f.out.tree)])
        stored = [
            ("out", spec.dtypes["output"]),
            *([("h", spec.dtypes["residual"])] if plan.stores_h else []),
        ]
        kernel = self._kernel("forward", forward_shapes(plan), loads, stored, h)
        outputs = [pointer(TYPES[spec.dtypes["output"]], "out_ptr", "out")]
        if spec.quantize:
            outputs.append(pointer("float", "scale_ptr", "scale", const=spec.quantize.scale == "per_tensor"))
        if plan.stores_h:
            outputs.append(pointer(TYPES[spec.dtypes["residual"]], "h_ptr", "h"))
        outputs += [pointer("float", f"{s}_ptr", s) for s in plan.saves]
        # The largest of a row takes the registers that further rows would have.
        refills = not (spec.quantize and spec.quantize.scale == "per_row")
        params = [*self._inputs(loads), *([o] for o in outputs)]
        params += self._numbers(kernel["heads"], eps=True, uses=h.uses | out.uses)
        return kernel | {
            "params": device(params),
            "arguments": given(params),
            "host_params": host(params),
            "host_names": names(params),
            "host_multiple": ["1"] if self.multiples else [],
            "keeps": ["KEEPS_ROWS"],
            "from_memory": True,
            "refills": refills,
            "fetches": ["STAGES > 0", *["!REFILLS"] * refills],
            "to_come": "!REFILLS" if refills else "1",
            "moments": plan.layer,
            "unroll": "unroll",
            "late": self._reads(f.loads, out),
            "out_lines": out.lines,
            "saves": bool(plan.saves),
            "saves_mean": "mean" in plan.saves,
            "null_words": "; those of statistics, which backward alone needs, may be null"
            if plan.saves
            else "",
            "stores_h": plan.stores_h,
            "reads": str(sum(o.along != "row" for o in f.loads)),
            # With heads, rows of one block have different columns.
            "early_words": "a row is on its way" if spec.heads else "the first row is on its way",
            "early_if": "EARLY" if spec.heads else "EARLY && round == 0",
            "held_if": "EARLY",
            "parts": _more(2 if plan.layer else 1),
        }

    def backward(self) -> dict[str, Any]:
        plan, b, spec = self.plan, self.plan.backward, self.spec
        assert b is not None
        heads, recomputes = bool(spec.heads), not plan.saves
        loads = sorted([*plan.upstream, *b.loads], key=lambda o: ORDER.index(o.along))
        accesses = self._accesses(loads)
        later = {"dh", *(m.name for m in b.means)}

        def sums(form: str, late: bool) -> list[Assign]:
            """Of the gradients of columns, those that need the means of a row or not."""
            found = (g for g in b.columns if bool(later & set(variables(g.tree))) is late)
            return [self._end(form.format(f"d{self.local(g.of)}"), g.tree, "+=") for g in found]

        def held(late: bool) -> list[Statement]:
            """Sums of threads that have their columns in registers."""
            found = tuple(sums("{}[v][i]", late))
            return [If(Name("ELEMENTS > 0"), found)] * bool(found)

        h = self._body(accesses, b.before, [self._end("to[i]", H)])
        means = [self._end(f"means[{i}]", m.tree, "+=") for i, m in enumerate(b.means)]
        first = self._body(accesses, b.before, [*means, *held(late=False)])
        stores = [self._end(f"d{self.local(g.of)}_at[i]", g.tree) for g in b.elements]
        of_rows = [self._end(f"row_sums[{i}]", g.tree, "+=") for i, g in enumerate(b.rows)]
        second = self._body(accesses, [*b.before, b.dh], [*stores, *of_rows, *held(late=True)])
        stored = [(f"d{self.local(g.of)}", g.dtype) for g in b.elements]
        kernel = self._kernel("backward", backward_shapes(plan), loads, stored, h)
        saved = {s: pointer("float", f"{s}_ptr", s, const=True) for s in plan.saves}
        alone = self._of_columns(loads, saved, [*sums("{}", late=False), *sums("{}", late=True)])
        results = [*b.elements, *b.rows]
        outputs = [pointer(TYPES[g.dtype], f"d{self.local(g.of)}_ptr", f"d_{g.of}") for g in results]
        ours = [*alone["parts"], *[pointer("float", "scratch_ptr", "scratch")] * bool(alone["scratch"])]
        inputs, uses = self._inputs(loads), first.uses | second.uses | h.uses
        own, outside = (self._numbers(there, recomputes, uses) for there in (kernel["heads"], heads))
        params = [*inputs, *([p] for p in (*saved.values(), *outputs, *ours)), *own]
        public = [*inputs, *([p] for p in (*saved.values(), *outputs)), *outside]
        public += [[p] for p in alone["totals"]]
        begins = [None, *(_times(i + 1, "parts * width_") for i, _ in enumerate(ours))]
        return {
            **kernel,
            **alone["fields"],
            "params": device(params),
            "arguments": given(params),
            "host_params": host(public),
            "host_names": names(params),
            "host_multiple": ["heads"] if self.multiples else [],
            "host_parts": [{"name": p.name, "begin": begin} for p, begin in zip(ours, begins, strict=False)],
            **IN_BACKWARD,
            "holds": bool(kernel["columns"] or b.columns),
            "statistics": list(plan.saves),
            **self._row_fields(),
            "first_reads": self._reads(loads, first),
            "first_lines": first.lines,
            "second_reads": self._reads(loads, second),
            "second_lines": second.lines,
            "elements": [{"name": name} for name, _ in stored],
            "recomputes": recomputes,
        }

    def _row_fields(self) -> dict[str, Any]:
        """What the backward kernel sums over a row: means, gradients of rows, statistics."""
        b = self.plan.backward
        assert b is not None
        return {
            "means": [{"name": m.name, "index": str(i)} for i, m in enumerate(b.means)],
            "means_count": str(len(b.means)),
            "parts": _more(len(b.means)),
            "row_sums": [
                {"store": f"store_one(d{self.local(g.of)}_ptr + row, row_sums[{i}]);"}
                for i, g in enumerate(b.rows)
            ],
            "row_sums_count": str(len(b.rows)),
            "row_parts": _more(len(b.rows)),
            "statistic_parts": _more(2 if self.plan.layer else 1),
        }

    def _of_columns(
        self, loads: Sequence[Operand], saved: Mapping[str, Param], ends: Sequence[Assign]
    ) -> dict[str, Any]:
        """The kernels that sum over rows: each column alone where blocks do not hold them, and all partial sums."""
        plan, b, heads = self.plan, self.plan.backward, bool(self.spec.heads)
        assert b is not None
        reads, values = {o.name: self._of_column(o) for o in loads}, [*b.before, b.dh]
        # What a row has as a whole comes from the kernel before, which leaves it behind.
        uses = self._body(reads, values, ends).uses
        left = [n for n in (*(m.name for m in b.means), *plan.statistics) if n in uses and n not in saved]
        scratch = {n: f"scratch_ptr[{_times(i, 'rows + ') * (i > 0)}row]" for i, n in enumerate(left)}
        of_row = scratch | {s: f"{s}_ptr[row]" for s in saved}
        reads |= {n: Assign((n,), (text(at),), type="float") for n, at in of_row.items()}
        body = self._body(reads, values, ends)

        sums = [(f"d{self.local(g.of)}", TYPES[g.dtype], f"d_{g.of}") for g in b.columns]
        parts = [pointer("float", f"{name}_part", f"{tensor}_part") for name, _, tensor in sums]
        totals = [pointer(element, f"{name}_ptr", tensor) for name, element, tensor in sums]
        params = self._inputs(o for o in loads if o.name in body.reads)
        params += [[p] for p in (*(p for s, p in saved.items() if s in body.reads), *parts)]
        params += [[pointer("float", "scratch_ptr", "scratch", const=True)]] * bool(scratch)
        params += self._numbers(heads=False, eps=False, uses=body.uses)
        finalize = [*([replace(p, const=True)] for p in parts), *([p] for p in totals)]
        counts = [[Param("long long", n, n) for n in ("parts", "width")]]
        calls = [f"finalize({name}_part, {name}_ptr, parts, (int)width);" for name, _, _ in sums]
        if len(sums) > 1:
            calls = [f"if (blockIdx.z == {i}) {call}" for i, call in enumerate(calls)]
        of_heads, n = "static_cast<unsigned int>(heads)", len(sums)
        floats = [_times(n, "parts * width_"), *[_times(len(scratch), "rows")] * bool(scratch)]
        fields = {
            "sums": [
                {"name": name, "index": str(i), "element": element}
                for i, (name, element, _) in enumerate(sums)
            ],
            "sums_count": str(n),
            "scratch": [{"name": name, "at": at} for name, at in scratch.items()],
            "columns_params": device(params),
            "columns_arguments": given(params),
            "columns_lines": body.lines,
            "finalize_params": device([*finalize, *counts]),
            "finalize_arguments": given([*finalize, *counts]),
            "finalize_lines": calls,
            "host_floats": " + ".join(floats),
            "host_columns_grid": ["columns", "static_cast<unsigned int>(shares)", *[of_heads] * heads],
            "host_columns_names": names(params),
            "host_finalize_grid": ["columns", *[of_heads if heads else "1", str(n)] * (heads or n > 1)],
            "host_finalize_names": names([*finalize, [Param("", "parts"), Param("", "width_")]]),
        }
        return {"parts": parts, "totals": totals, "scratch": scratch, "fields": fields | OF_ROWS[heads]}
