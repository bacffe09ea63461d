"""Lowering of torch terms to trees of the language, with torch's type rules.

Unsupported terms are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var
from kgen.flex import limits
from kgen.flex.ascending import not_negative
from kgen.flex.composed import FUNCTIONS
from kgen.flex.inference import COMPARISONS, walk
from kgen.flex.operations import Operations
from kgen.flex.source import Place
from kgen.flex.tables import DTYPES
from kgen.flex.values import FromEnd, Tensor, Term
from kgen.spec.common import ELEMENTS

INT, LONG, FLOAT, BOOL = Type.INT, Type.LONG, Type.FLOAT, Type.BOOL

# --- terms to trees ------------------------


class End(NamedTuple):
    """An index from the end of a dimension of a tensor, or the length of the dimension."""

    tensor: Tensor
    axis: int | None
    """None if the tensor has one dimension."""
    position: int | None
    """Negative position; None for the length itself."""
    place: Place


class Lowering(Operations):
    """Builder of trees from terms."""

    def __init__(self, dtypes: Mapping[Tensor, str], names: Mapping[Tensor, str]) -> None:
        super().__init__()
        self.dtypes = dtypes
        self.names = names
        self.made: dict[int, Node] = {}
        self.labels: dict[Node, str] = {}
        self.ends: dict[Node, End] = {}
        """Markers of indices from the end, replaced when the shapes of buffers are known."""

    def tree(self, root: Term) -> Node:
        """Return the tree of a term."""
        for term in walk([root]):
            if id(term) not in self.made:
                self.place = term.place
                node = self.node(term)
                self.made[id(term)] = node
                if term.label is not None and not isinstance(node, Const | Var):
                    self.labels.setdefault(node, term.label)
        return self.made[id(root)]

    def node(self, term: Term) -> Node:
        match term.fn:
            case "var":
                return self.one(Var(term.args[0], FLOAT if term.args[0] == "score" else INT))
            case "const":
                return self.number(term.args[0])
            case "length":
                tensor, axis = term.args
                return self.marker(End(tensor, axis, None, term.place))
            case "read":
                return self.read(term)
            case "cast":
                return self.cast(self.of(term.args[0]), term.args[1])
            case "like":
                value, other = map(self.of, term.args)
                wanted = {FLOAT: "fp32", BOOL: "bool", INT: "int32", LONG: "int64"}[other.type]
                return self.cast(value, wanted)
        if any(map(limits.large, term.args)):
            others = [None if limits.large(arg) else self.of(arg) for arg in term.args]
            if limits.is_real(term, others):
                return self.node(limits.with_reals(term))
            found = limits.unlimited(self, term, others)
            if found is not None:
                return found
        args = [self.of(arg) for arg in term.args]
        if term.fn in FUNCTIONS:
            return FUNCTIONS[term.fn](self, args)
        special = getattr(self, f"_{term.fn}", None)
        if special is not None:
            node: Node = special(*args)
            return node
        if term.fn in COMPARISONS:
            return self.compared(term.fn, *args)
        if term.fn not in TABLE:
            self.missing(f"`{term.fn}`", "write it with arithmetic, `where`, `exp` and `log`")
        return self.call(term.fn, *map(self.numeric, args))

    def _mod(self, a: Node, b: Node) -> Node:
        return FUNCTIONS["remainder"](self, (a, b))

    def of(self, arg: Any) -> Node:
        return self.made[id(arg)] if isinstance(arg, Term) else self.number(arg)

    def read(self, term: Term) -> Node:
        tensor, *indices = term.args
        if term.changes != tensor.changes:
            message = f"`{self.names[tensor]}` is changed after this element is read"
            self.place.refuse("not-in-language", message, "create a new tensor under another name")
        dtype = tensor.dtype or self.dtypes[tensor]
        if dtype not in ELEMENTS:
            names = {ours: theirs for theirs, ours in reversed(DTYPES.items())}
            message = f"a tensor of {names.get(dtype, dtype)} is not in the language of specs"
            hint = f"convert it before the mods to one of {', '.join(ELEMENTS)}"
            self.place.refuse("bad-dtype", message, hint)
        nodes = [self.position(tensor, axis, index) for axis, index in enumerate(indices)]
        if any(not node.type.integral for node in nodes):
            hint = "convert it, `(...).int()`, use `//`, or a tensor of integers"
            self.place.refuse("bad-index", "an index is not an integer", hint)
        if not all(self.not_negative(node) for node in nodes):
            self.notes[
                (
                    f"a negative index of {self.names[tensor]} reads zero in kernels, and counts "
                    "from the end in torch"
                )
            ] = None
        return self.one(Read(self.names[tensor], tuple(nodes), ELEMENTS[dtype]))

    def position(self, tensor: Tensor, axis: int, index: Any) -> Node:
        """Return the tree of an index of a tensor."""
        if not isinstance(index, FromEnd):
            return self.of(index)
        return self.marker(End(tensor, axis, int(index), self.place))

    def marker(self, end: End) -> Node:
        """Return a variable for a length, replaced when the shapes of buffers are known."""
        name = Var(f"{self.names[end.tensor]} {end.axis} {end.position or ''}", INT)
        self.ends.setdefault(name, end)
        return self.one(name)

    def not_negative(self, node: Node) -> bool:
        """True if an index is never negative, by its form and the facts of its buffers."""
        match node:
            case Const(value=value):
                return value >= 0
            case Var():
                return True
            case Read(buffer=buffer):
                return any(
                    not_negative(tensor) for tensor, name in self.names.items() if name == buffer
                )
            case Call(fn="add" | "mul" | "where" | "min", args=args):
                return all(map(self.not_negative, args[1:] if node.fn == "where" else args))
            case Call(fn="max", args=args):
                return any(map(self.not_negative, args))
            case Call(fn="clamp", args=(_, low, high)):
                return self.not_negative(low) and self.not_negative(high)
            case Call(fn="sub", args=(Var() as length, Const(value=1))):
                return length in self.ends
            case Call(fn="abs" | "mod"):
                return True
            case Call(fn="floordiv" | "rshift" | "bitand" | "int", args=(a, *_)):
                return self.not_negative(a)
        return False
