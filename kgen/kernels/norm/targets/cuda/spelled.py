"""Statements and parameters of norms in CUDA, of one plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.expr.nodes import Const, Node, Type
from kgen.kernels.norm.plan.planning import NormPlan, Operand, Value
from kgen.kernels.norm.plan.shapes import backward_shapes, forward_shapes
from kgen.kernels.norm.targets.cuda.names import given_way, made_of, slots
from kgen.kernels.norm.targets.cuda.parts import Column, Elements, Read, RowValue, Slots
from kgen.sizes import ELEMENT_SIZE
from kgen.targets.code import Assign, Code, Statement, needed, op, text, uses_of
from kgen.targets.cuda.elements import ELEMENTS
from kgen.targets.cuda.params import Param, Params, pointer
from kgen.targets.cuda.printer import Printer, literal
from kgen.targets.cuda.statements import stored_at_once, without_copies

TYPES = {**ELEMENTS, "int32": "int", "int64": "long long", "bool": "bool"}
SCALARS = {Type.FLOAT: "float", Type.INT: "int", Type.LONG: "long long", Type.BOOL: "bool"}
ORDER = ("element", "column", "row")
"""The types of parameters, by the axes that their tensors vary along."""
ZEROS = {Type.FLOAT: "0.0f", Type.INT: "0", Type.LONG: "0", Type.BOOL: "false"}


@dataclass(frozen=True)
class Constant:
    """A constant of a file."""

    name: str
    type: str
    value: Code


@dataclass(frozen=True)
class Body:
    """Statements, the operands that they read, and the names that they use."""

    lines: tuple[Statement, ...]
    reads: frozenset[str]
    uses: frozenset[str]


class Spelled:
    """Print the statements of one plan.

    Each value is a line of scalar code in a loop over an access.
    """

    def __init__(self, plan: NormPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        sizes = [ELEMENT_SIZE[self.spec.dtypes[n]] for n in ("input", "output")]
        if self.spec.residual:
            sizes.append(ELEMENT_SIZE[self.spec.dtypes["residual"]])
        # Accesses of 16 bytes for the narrowest tensor; eight bits are stored 8 bytes at a time.
        self.vector = 16 // max(2, min(sizes))
        constants = {n: p for n, p in self.spec.params.items() if not p.runtime}
        self.runtime = {n: p for n, p in self.spec.params.items() if p.runtime}
        self.locals = given_way((*self.spec.buffers, *self.spec.params), self.taken())
        names = {n: self.local(n) for n in (*self.spec.buffers, *self.runtime)} | {
            n: self.local(n).upper() for n in constants
        }
        self.forward_shapes = forward_shapes(plan)
        self.backward_shapes = backward_shapes(plan) if plan.backward else ()
        shapes = (*self.forward_shapes, *self.backward_shapes)
        self.clusters = any(s.cluster > 1 for s in shapes)
        self.any_width = any(s.elements == 0 for s in shapes)
        self.printer = Printer(names, self.spec.accuracy)
        self.rounds = False
        self.multiples = bool(self.spec.heads and plan.backward)
        self.constants = tuple(
            Constant(
                self.local(n).upper(), SCALARS[p.scalar], literal(Const(p.value or 0, p.scalar))
            )
            for n, p in constants.items()
        )

    def taken(self) -> set[str]:
        """Return the names in the file that depend on the spec."""
        plan, name = self.plan, self.spec.name
        backward = [*plan.upstream, *(plan.backward.loads if plan.backward else ())]
        tensors = [
            o.name for o in (*plan.forward.loads, *backward) if o.name not in self.spec.buffers
        ]
        made = (made_of(n) for n in (*tensors, "out", "h", *plan.saves))
        return {f"{name}_forward", f"{name}_backward", f"{name}_kernels"}.union(*made)

    def local(self, name: str) -> str:
        """Return the name of a tensor or parameter in kernels."""
        return self.locals.get(name, name)

    # --- lines ---

    def _element(self, operand: Operand, at: str) -> Assign:
        """Read an element of a tensor. `at` is a format for the access of a tensor by its name."""
        name = self.local(operand.name)
        form = "to_float({0})" if operand.type is Type.FLOAT else "{0}"
        return Assign((name,), (op(form, text(at.format(name))),), type=SCALARS[operand.type])

    def of_access(self, operand: Operand) -> Assign:
        """Read an element of an access that was loaded."""
        return self._element(operand, "{0}_at, i" if operand.type is Type.FLOAT else "{0}_at.at[i]")

    def of_column(self, operand: Operand) -> Assign:
        """Load an element from memory, at a row and a column."""
        of_head = "blockIdx.z * width_ + " if self.spec.heads else ""
        places = {"element": "row * {0}_stride + col", "row": "row", "column": f"{of_head}col"}
        return self._element(operand, f"{{0}}_ptr[{places[operand.along]}]")

    def _value(self, value: Value) -> Assign:
        code = self.printer.real(value.tree)
        if value.rounded is not None:
            self.rounds = True
            code = op(f"rounded<{TYPES[value.rounded]}>({{0}})", code)
        return Assign((value.name,), (code,), type="float")

    def end(self, to: str, tree: Node, sign: str = "=") -> Assign:
        """Return the statements for the value of each element."""
        return Assign((to,), (self.printer.real(tree),), sign)

    def body(
        self, reads: Mapping[str, Assign], values: Iterable[Value], ends: Sequence[Statement]
    ) -> Body:
        """Return the statements that compute `ends`, without unneeded ones."""
        before = needed([*reads.values(), *map(self._value, values)], uses_of(ends))
        read = frozenset(n for n, assign in reads.items() if assign in before)
        statements = without_copies([*before, *ends])
        return Body(tuple(stored_at_once(statements)), read, uses_of(statements))

    def accesses(self, operands: Iterable[Operand]) -> dict[str, Assign]:
        return {o.name: self.of_access(o) for o in operands if o.along != "row"}

    def elements(self, operands: Iterable[Operand], body: Body) -> Elements:
        """Return a loop over some lines, with the accesses that they read."""
        return Elements(
            tuple(Read(self.local(o.name)) for o in operands if o.name in body.reads), body.lines
        )

    # --- operands ---

    def columns(self, operands: Iterable[Operand]) -> tuple[Column, ...]:
        offset, row_offset = (" + head", " + head_of_row") if self.spec.heads else ("", "")
        own = [(self.local(o.name), TYPES[o.dtype]) for o in operands if o.along == "column"]
        return tuple(
            Column(n, element, f"{n}_ptr{offset}", f"{n}_ptr{row_offset}") for n, element in own
        )

    def rows(self, operands: Iterable[Operand]) -> tuple[RowValue, ...]:
        found = [(o, self._element(o, "{0}_ptr[row]")) for o in operands if o.along == "row"]
        return tuple(RowValue(a.name, a.type, a.value, ZEROS[o.type]) for o, a in found)

    def inputs(self, loads: Iterable[Operand]) -> Params:
        """Return the parameters of the tensors that a kernel reads."""
        lines: Params = []
        for o in loads:
            name, rows = self.local(o.name), o.along == "element"
            first = pointer(TYPES[o.dtype], f"{name}_ptr", o.name, const=True)
            stride = [Param("long long", f"{name}_stride")] if rows else []
            lines.append([replace(first, given=f"*_rows({o.name})") if rows else first, *stride])
        return lines

    def numbers(self, heads: bool, eps: bool, uses: frozenset[str]) -> Params:
        """Return the parameters for sizes, and for the numbers that a kernel uses."""
        names = ["rows", "width_", "heads"] if heads else ["rows", "width_"]
        sizes = [Param("long long", n, n.strip("_")) for n in names]
        if eps:
            sizes.append(Param("float", "eps", "ctypes.c_float(eps)"))
        lines = [sizes]
        for n, p in self.runtime.items():
            if self.local(n) in uses:
                kind = "ctypes.c_int" if p.scalar is Type.INT else "ctypes.c_float"
                lines.append([Param(SCALARS[p.scalar], self.local(n), f"{kind}({n})")])
        return lines


def slots_of(tensors: Iterable[tuple[str, str]], begin: str) -> tuple[Slots, ...]:
    """Return the adjacent parts of shared memory of tensors, by name and dtype."""
    found: list[Slots] = []
    for name, dtype in tensors:
        found.append(Slots(name, TYPES[dtype], slots(name), found[-1].end if found else begin))
    return tuple(found)


def times(n: int, of: str) -> str:
    """Print a product, without a factor of 1."""
    return of if n == 1 else f"{n} * {of}"


def more(n: int) -> int | None:
    """Print a factor, unless it is 1."""
    return n if n > 1 else None
