"""The kernels of norms in CUDA: what each part of a plan is called in `templates/norm/cuda/norm.cu.j2`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kgen.expr.nodes import Const, Node, Type, variables
from kgen.kernels.norm.plan.planning import H, NormPlan, Operand, Value
from kgen.kernels.norm.plan.shapes import Shape, backward_shapes, forward_shapes
from kgen.sizes import ELEMENT_SIZE
from kgen.targets.code import (
    CUDA,
    Assign,
    Code,
    If,
    Name,
    Statement,
    lines_of,
    needed,
    op,
    renamed,
    spell,
    text,
    uses_of,
)
from kgen.targets.cuda.elements import ELEMENTS
from kgen.targets.cuda.printer import Printer, literal

TYPES = {**ELEMENTS, "int32": "int", "int64": "long long", "bool": "bool"}
SCALARS = {Type.FLOAT: "float", Type.INT: "int", Type.LONG: "long long", Type.BOOL: "bool"}
ORDER = ("element", "column", "row")
"""Of parameters, by what their tensors vary along."""
ZEROS = {Type.FLOAT: "0.0f", Type.INT: "0", Type.LONG: "0", Type.BOOL: "false"}
# Names of the kernels' own (those of constants in lower case), and words and macros of C++ that are none of Python's.
TAKEN = frozenset(
    """
    t v i n p s to from left most share place first round turn step begin live rank vector vectors
    column prefetch ring moments stage stages sums sum squares deviations largest inverse scale scratch
    hs outs out_of h_of for_each held head lane stripe total shared means statistic finish one mine theirs
    row_parts row_sums row_turn largest_parts largest_turn statistic_parts statistic_turn
    threads elements cluster blocks block single stays
    forward_shapes backward_shapes over_stripes col early unroll stride further has
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
    """A parameter of a kernel: a number, or a pointer to elements of a type. `given` is what Python passes."""

    type: str
    name: str
    given: str = ""
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


def pointer(element: str, name: str, tensor: str, const: bool = False) -> Param:
    """One to the elements of a tensor of the launcher, or to floats."""
    return Param(element, name, f"{tensor}.data_ptr()", is_pointer=True, const="const " * const)


def _device(params: Params) -> str:
    return ",\n".join(", ".join(p.device for p in line) for line in params)


def _host(params: Params) -> str:
    return ",\n".join(", ".join(p.host for p in line) for line in params)


def _names(params: Params) -> str:
    return ", ".join(p.name for line in params for p in line)


def given(params: Params) -> list[str]:
    """What Python passes for them."""
    return [p.given for line in params for p in line if p.given]


def _times(n: int, of: str) -> str:
    return of if n == 1 else f"{n} * {of}"


def _more(n: int) -> int | None:
    """A factor, unless it is 1."""
    return n if n > 1 else None


class Body(NamedTuple):
    """Lines, the operands that they read an element of, and the names that they use."""

    lines: list[str]
    reads: frozenset[str]
    uses: frozenset[str]


def without_copies(statements: Iterable[Statement]) -> list[Statement]:
    """Statements with names in place of others that are defined as nothing else."""
    copies: dict[str, Code] = {}
    found = []
    for statement in statements:
        changed = statement.map(lambda code: renamed(code, copies))
        if isinstance(changed, Assign) and changed.type and isinstance(changed.value, Name):
            copies[changed.name] = changed.value
        else:
            found.append(changed)
    return found


def _ended(statements: list[Statement]) -> list[Statement]:
    """Statements in which what is only stored has no name before: `out[i] = x * w`."""
    made = {s.name: s for s in statements if isinstance(s, Assign) and s.type}
    uses = Counter(name for s in statements for name in s.uses)
    found: list[Statement] = []
    for statement in statements:
        if isinstance(statement, Assign) and isinstance(value := statement.value, Name):
            once = made.get(value.name) if uses[value.name] == 1 else None
            if once is not None:
                found.remove(once)
                statement = replace(statement, values=once.values)
        found.append(statement)
    return found


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
        self.multiples = bool(self.spec.heads and plan.backward)
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
            self.printer.helpers.add("rounded")
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
        return Body(lines_of(_ended(statements), CUDA), read, uses_of(statements))

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
            slots, begin = f"{name.title().replace('_', '')}Slots", f"{name.upper()}_BEGIN"
            streams.append(
                {"name": name, "element": TYPES[dtype], "slots": slots, "begin": begin, "after": before}
            )
            before = f"{begin} + {slots}::BYTES"
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
        shapes: Iterable[Shape],
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
            "params": _device(params),
            "arguments": given(params),
            "host_params": _host(params),
            "host_names": _names(params),
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
        # Each column alone. What a row has as a whole comes from the other kernel, which leaves it behind.
        ends = [*sums("{}", late=False), *sums("{}", late=True)]
        reads = {o.name: self._of_column(o) for o in loads}
        uses = self._body(reads, [*b.before, b.dh], ends).uses
        candidates = [*(m.name for m in b.means), *(plan.statistics if recomputes else ())]
        scratch = [
            {"name": n, "at": f"scratch_ptr[{_times(i, 'rows + ') * (i > 0)}row]"}
            for i, n in enumerate(n for n in candidates if n in uses)
        ]
        of_row = [*((s["name"], s["at"]) for s in scratch), *((s, f"{s}_ptr[row]") for s in plan.saves)]
        reads |= {n: Assign((n,), (op(at),), type="float") for n, at in of_row}
        alone = self._body(reads, [*b.before, b.dh], ends)

        partial = [
            {"name": f"d{self.local(g.of)}", "index": str(i), "element": TYPES[g.dtype]}
            for i, g in enumerate(b.columns)
        ]
        n = len(partial)
        saved = {s: pointer("float", f"{s}_ptr", s, const=True) for s in plan.saves}
        results = [
            pointer(TYPES[g.dtype], f"d{self.local(g.of)}_ptr", f"d_{g.of}") for g in (*b.elements, *b.rows)
        ]
        parts = [pointer("float", f"d{self.local(g.of)}_part", f"d_{g.of}_part") for g in b.columns]
        totals = [pointer(TYPES[g.dtype], f"d{self.local(g.of)}_ptr", f"d_{g.of}") for g in b.columns]
        ours = [*parts, *[pointer("float", "scratch_ptr", "scratch")] * bool(scratch)]
        inputs, uses = self._inputs(loads), first.uses | second.uses | h.uses
        own, outside = (self._numbers(there, recomputes, uses) for there in (kernel["heads"], heads))
        params = [*inputs, *([p] for p in (*saved.values(), *results, *ours)), *own]
        host = [*inputs, *([p] for p in (*saved.values(), *results)), *outside, *([p] for p in totals)]
        columns = [line for o, line in zip(loads, inputs, strict=True) if o.name in alone.reads]
        columns += [[p] for p in (*(saved[s] for s in plan.saves if s in alone.reads), *parts)]
        columns += [[pointer("float", "scratch_ptr", "scratch", const=True)]] * bool(scratch)
        columns += self._numbers(heads=False, eps=False, uses=alone.uses)
        finalize = [*([replace(p, const="const ")] for p in parts), *([p] for p in totals)]
        finalize.append([Param("long long", name, name) for name in ("parts", "width")])
        begins = [None, *(_times(i, "parts * width_") for i in range(1, n + 1))]
        calls = [f"finalize({s['name']}_part, {s['name']}_ptr, parts, (int)width);" for s in partial]
        grid = ["columns", "static_cast<unsigned int>(heads)" if heads else "1", str(n)]
        return kernel | {
            "params": _device(params),
            "arguments": given(params),
            "host_params": _host(host),
            "host_names": _names(params),
            "host_multiple": ["heads"] if self.multiples else [],
            "host_parts": [{"name": p.name, "begin": begin} for p, begin in zip(ours, begins, strict=False)],
            "host_floats": " + ".join(
                [_times(n, "parts * width_"), *[_times(len(scratch), "rows")] * bool(scratch)]
            ),
            "host_share": "(64 * heads)" if heads else "64",
            "host_rows": "shape.rows" if heads else None,
            "host_heads": "heads" if heads else None,
            "host_refused": ["heads < 1", "rows % heads != 0"] if heads else [],
            "host_columns_grid": ["columns", "static_cast<unsigned int>(shares)", *grid[1:2] * heads],
            "host_columns_names": _names(columns),
            "host_finalize_grid": grid if heads or n > 1 else grid[:1],
            "host_finalize_names": _names([*finalize[:-1], [Param("", "parts"), Param("", "width_")]]),
            "keeps": [],
            "from_memory": False,
            "to_come": "1",
            "moments": False,
            "unroll": "unroll (COPIES)",
            "statistics": list(plan.saves),
            "first_reads": self._reads(loads, first),
            "first_lines": first.lines,
            "second_reads": self._reads(loads, second),
            "second_lines": second.lines,
            "means": [{"name": m.name, "index": str(i)} for i, m in enumerate(b.means)],
            "means_count": str(len(b.means)),
            "parts": _more(len(b.means)),
            "elements": [{"name": name} for name, _ in stored],
            "row_sums": [
                {"store": f"store_one(d{self.local(g.of)}_ptr + row, row_sums[{i}]);"}
                for i, g in enumerate(b.rows)
            ],
            "row_sums_count": str(len(b.rows)),
            "row_parts": _more(len(b.rows)),
            "recomputes": recomputes,
            "statistic_parts": _more(2 if plan.layer else 1),
            "held_words": "every row of a head" if heads else "every row",
            "sums": partial,
            "sums_count": str(n),
            "scratch": scratch,
            "columns_params": _device(columns),
            "columns_arguments": given(columns),
            "columns_lines": alone.lines,
            "columns_words": "gridDim.y shares of the rows" + ", gridDim.z heads" * heads,
            "columns_first": "(long long)(blockIdx.y * 8 + stripe) * gridDim.z + blockIdx.z"
            if heads
            else "blockIdx.y * 8 + stripe",
            "columns_step": "8LL * gridDim.y * gridDim.z" if heads else "gridDim.y * 8",
            "columns_part": "(long long)(blockIdx.y * gridDim.z + blockIdx.z)"
            if heads
            else "(long long)blockIdx.y",
            "finalize_params": _device(finalize),
            "finalize_arguments": given(finalize),
            "finalize_lines": [f"if (blockIdx.z == {i}) {call}" for i, call in enumerate(calls)]
            if n > 1
            else calls,
            "finalize_words": "32 columns a block"
            + ", gridDim.y heads, to which every gridDim.y-th part belongs" * heads,
            "finalize_first": "blockIdx.y + (long long)stripe * gridDim.y" if heads else "stripe",
            "finalize_step": "32 * gridDim.y" if heads else "32",
            "finalize_head": "(long long)blockIdx.y * width" if heads else None,
        }
