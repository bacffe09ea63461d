"""Mutation operators: each changes one thing in an emitted file, by its syntax tree.

A mutant is the text with one piece replaced. Docstrings, comments, annotations and messages stay
unchanged.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Replacement of the characters from `begin` to `end` by `new`."""

    operator: str
    function: str
    line: int
    begin: int
    end: int
    old: str
    new: str
    kernel: bool
    """True if the function runs on the GPU."""

    def __str__(self) -> str:
        return f"{self.line}: {self.change}"

    @property
    def change(self) -> str:
        """Description of the change, without its line."""
        return f"{self.operator} in {self.function}: `{self.old}` -> `{self.new}`"

    def of(self, text: str) -> str:
        """Return the mutated text."""
        return text[: self.begin] + self.new + text[self.end :]


Found = Iterator[tuple[ast.AST, str]]
Operator = Callable[[ast.AST, "Place"], Found]


@dataclass(frozen=True)
class Place:
    """The function that contains a node."""

    function: ast.FunctionDef
    segment: Callable[[ast.AST], str]
    kernel: bool
    """True if it runs on the GPU."""

    def names(self) -> list[str]:
        """Return the names of its parameters."""
        return [arg.arg for arg in self.function.args.args]


KEY = "_layouts"
OTHER_TILE = {
    "BLOCK_M": "BLOCK_N",
    "BLOCK_N": "BLOCK_M",
    "BLOCK_K": "BLOCK_V",
    "BLOCK_V": "BLOCK_K",
}
OTHER = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}


def comparison(node: ast.AST, at: Place) -> Found:
    """Replace `<` by `<=`, `==` by `!=`, and so on."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OTHER:
        left, right = at.segment(node.left), at.segment(node.comparators[0])
        yield node, f"{left} {OTHER[type(node.ops[0])]} {right}"


def bound(node: ast.AST, at: Place) -> Found:
    """Increase an added or subtracted constant by one, round a quotient the other way, or remove a
    `minimum` or `maximum`.
    """
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add | ast.Sub)
        and isinstance(node.right, ast.Constant)
    ):
        yield node.right, f"{node.right.value + 1}"
    if isinstance(node, ast.Call) and _called(node).endswith("cdiv"):
        a, b = map(at.segment, node.args)
        yield node, f"({a}) // ({b})"
    if isinstance(node, ast.Call) and _called(node).rpartition(".")[2] in ("minimum", "maximum"):
        for arg in node.args:
            yield node, at.segment(arg)


def stride(node: ast.AST, at: Place) -> Found:
    """Replace a stride by the stride of another tensor or another axis."""
    if not (
        at.kernel
        and isinstance(node, ast.Name)
        and node.id.startswith("stride_")
        and isinstance(node.ctx, ast.Load)
    ):
        return
    others = [n for n in at.names() if n.startswith("stride_") and n != node.id]
    same_axis = [n for n in others if n[-1] == node.id[-1]]
    same_tensor = [n for n in others if n[:-1] == node.id[:-1]]
    for name in (*same_axis[:2], *same_tensor[:2]):
        yield node, name


def mask(node: ast.AST, at: Place) -> Found:
    """Make a mask always true, or remove a part of it."""
    if isinstance(node, ast.Call) and _called(node).rpartition(".")[2] in (
        "load",
        "store",
        "atomic_add",
    ):
        for keyword in node.keywords:
            if keyword.arg == "mask" and not (isinstance(keyword.value, ast.Constant)):
                yield keyword.value, f"({at.segment(keyword.value)}) | True"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield node, at.segment(node.left)
        yield node, at.segment(node.right)


def guard(node: ast.AST, at: Place) -> Found:
    """Make a condition always true or always false."""
    if isinstance(node, ast.If):
        for value in ("True", "False"):
            yield node.test, value
    if (
        isinstance(node, ast.Call)
        and _called(node).rpartition(".")[2] == "where"
        and len(node.args) == 3
    ):
        condition = at.segment(node.args[0])
        yield node.args[0], f"({condition}) | True"
        yield node.args[0], f"({condition}) & False"


def dtype(node: ast.AST, at: Place) -> Found:
    """Remove a conversion, except a conversion to the dtype of a pointer: a store converts
    anyway.
    """
    if (
        at.kernel
        and isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and not at.segment(node.args[0]).endswith(".dtype.element_ty")
    ):
        yield node, at.segment(node.func.value)


def order(node: ast.AST, at: Place) -> Found:
    """Exchange operands, drop one, or replace an operation by its opposite."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        yield node, f"({at.segment(node.right)} - {at.segment(node.left)})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield node, at.segment(node.left)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv):
        other = "//" if isinstance(node.op, ast.Mod) else "%"
        yield node, f"{at.segment(node.left)} {other} {at.segment(node.right)}"


def tile(node: ast.AST, at: Place) -> Found:
    """Double a tile size, or replace it by the other side's."""
    if (
        at.kernel
        and isinstance(node, ast.Name)
        and node.id in OTHER_TILE
        and isinstance(node.ctx, ast.Load)
    ):
        other = OTHER_TILE[node.id]
        if other in at.names():
            yield node, other
        yield node, f"(2 * {node.id})"


def launch(node: ast.AST, at: Place) -> Found:
    """Exchange two arguments of a launch or of a call of a launcher function, or invert a boolean
    keyword.

    `enable_fp_fusion` stays unchanged, because it affects only rounding.
    """
    if at.kernel or not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    if _called(node) != KEY and (_called(node).startswith("_") or _called(node).endswith("_op")):
        yield from _exchanged(node, at)
    for keyword in node.keywords:
        constant = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool)
        if constant and keyword.arg != "enable_fp_fusion":
            yield keyword.value, str(not keyword.value.value)


def key(node: ast.AST, at: Place) -> Found:
    """Replace an argument of the key of the launch cache by the argument of another tensor."""
    if isinstance(node, ast.Call) and _called(node) == KEY:
        yield from _exchanged(node, at)


def _exchanged(node: ast.Call, at: Place) -> Found:
    for a, b in zip(node.args[1:], node.args[2:], strict=False):
        if type(a) is type(b) and at.segment(a) != at.segment(b):
            yield a, at.segment(b)


def _statement(node: ast.AST, at: Place, *names: str) -> Found:
    """Remove a call that is a statement."""
    called = node.value if isinstance(node, ast.Expr) else None
    if at.kernel and isinstance(called, ast.Call) and _called(called).rpartition(".")[2] in names:
        yield node, "pass"


def barrier(node: ast.AST, at: Place) -> Found:
    """Remove a wait."""
    yield from _statement(
        node,
        at,
        "wait",
        "_consumer_wait",
        "barrier",
        "store_wait",
        "gdc_wait",
        "warpgroup_mma_wait",
    )


def arrival(node: ast.AST, at: Place) -> Found:
    """Remove an arrival, a release or an expected byte count, or increase a count by one."""
    yield from _statement(node, at, "arrive", "_consumer_release", "expect")
    if at.kernel and isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "count" and isinstance(keyword.value, ast.Constant):
                yield keyword.value, f"{keyword.value.value + 1}"


def fence(node: ast.AST, at: Place) -> Found:
    """Remove a fence that makes stores visible to TMA and products."""
    yield from _statement(node, at, "fence_async_shared")


def phase(node: ast.AST, at: Place) -> Found:
    """Invert a phase, or let one more product be in flight after a wait."""
    if not (at.kernel and isinstance(node, ast.Call)):
        return
    name = _called(node).rpartition(".")[2]
    if name == "wait" and len(node.args) == 2:
        yield node.args[1], f"({at.segment(node.args[1])}) ^ 1"
    if name == "warpgroup_mma_wait" and isinstance(node.args[0], ast.Constant):
        yield node.args[0], f"{node.args[0].value + 1}"


def slot(node: ast.AST, at: Place) -> Found:
    """Use the next slot."""
    if (
        at.kernel
        and isinstance(node, ast.Call)
        and _called(node).rpartition(".")[2] in ("index", "_slot", "_keys", "_values")
    ):
        yield node.args[-1], f"({at.segment(node.args[-1])} + 1)"


OPERATORS: dict[str, Operator] = {
    one.__name__: one
    for one in (
        comparison,
        bound,
        stride,
        mask,
        guard,
        dtype,
        order,
        tile,
        launch,
        key,
        barrier,
        arrival,
        fence,
        phase,
        slot,
    )
}


def mutants(text: str) -> list[Mutant]:
    """Return all mutants of a file, in the order of its text."""
    tree, starts = ast.parse(text), _starts(text)

    def offset(line: int, column: int) -> int:
        # Syntax trees count columns in bytes.
        row = text[starts[line - 1] : starts[line]].encode()
        return starts[line - 1] + len(row[:column].decode())

    def segment(node: ast.AST) -> str:
        begin = offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return text[begin : offset(node.end_lineno, node.end_col_offset)]  # type: ignore[attr-defined]

    found = []
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        at = Place(function, segment, _is_kernel(function))
        for node in _body(function):
            for name, operator in OPERATORS.items():
                for piece, new in operator(node, at):
                    begin = offset(piece.lineno, piece.col_offset)  # type: ignore[attr-defined]
                    end = offset(piece.end_lineno, piece.end_col_offset)  # type: ignore[attr-defined]
                    old, line = text[begin:end], piece.lineno  # type: ignore[attr-defined]
                    found.append(Mutant(name, function.name, line, begin, end, old, new, at.kernel))
    found = [one for one in dict.fromkeys(found) if one.old != one.new]
    return sorted(found, key=lambda one: (one.begin, one.end, one.new))


def _body(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without nested functions, annotations and error messages."""
    todo: list[ast.AST] = [*function.body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.Raise | ast.JoinedStr):
            continue
        if isinstance(node, ast.AnnAssign):
            todo += [node.value] if node.value else []
            continue
        yield node
        todo += ast.iter_child_nodes(node)


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def _starts(text: str) -> list[int]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts
