"""How Triton spells an expression of a tile.

A value has tile axes; inside an expression over two axes a vector is written with `[:, None]` or `[None,
:]`, depending on which
axis the kernel lays along its rows. Everything else is a lookup in the function table, with brackets where
precedence asks
for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kgen.expr.functions import ADD, ATOM, BITAND, COMPARE, MUL, SHIFT, TABLE, UNARY
from kgen.expr.hoist import Program
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var
from kgen.expr.tile_ranges import FIRST_AT_LEAST
from kgen.targets.triton.text import bracketed


@dataclass(frozen=True)
class BufferLayout:
    """What a load of a declared buffer needs: its element type and its dimensions."""

    dtype: str
    shape: tuple[int | str, ...]


@dataclass
class Printer:
    """Prints the expressions of one program.

    `axes` are those of a tile, and `rows` is the one along its rows. Names in `constants` are compile-time
    parameters, printed in
    capitals. `helpers` collects the functions that the file has to define.
    """

    program: Program
    rows: str
    buffers: dict[str, BufferLayout]
    ranges: IndexRanges
    constants: frozenset[str]
    fast_math: bool
    helpers: set[str] = field(default_factory=set)
    axes: tuple[str, str] = ("q", "kv")

    def tile(self, node: Node) -> str:
        """The value over the whole tile (it may still be a scalar or a vector that broadcasts)."""
        return self._print(node, self.axes, 0)

    def own(self, node: Node, context: int = 0) -> str:
        """The value over exactly the axes that it has, bracketed if it binds less tightly than `context`."""
        return self._print(node, self.program.place(node).axes, context)

    def over(self, node: Node, axes: tuple[str, ...]) -> str:
        """The value over some tile axes."""
        return self._print(node, axes, 0)

    def position(self, node: Node) -> str:
        """A scalar that is known to be between 0 and a length, in 32 bits."""
        text = self.own(node)
        return f"{bracketed(text)}.to(tl.int32)" if node.type is Type.LONG else text

    def _print(self, node: Node, axes: tuple[str, ...], context: int) -> str:
        text, binds = self._form(node, axes)
        return f"({text})" if binds < context else text

    def _form(self, node: Node, axes: tuple[str, ...]) -> tuple[str, int]:
        if isinstance(node, Const):
            return literal(node)
        if isinstance(node, Var):
            if node.name == "inf":
                return 'float("inf")', ATOM
            if node.name == "HKV":
                return "HQ // GQA", MUL
            name = node.name.upper() if node.name in self.constants else node.name
            return name + self._broadcast(node, axes), ATOM
        if isinstance(node, Read):
            if node.buffer.endswith(FIRST_AT_LEAST):
                return f"{self.search(node, node)}[0]", ATOM
            return self._load(node, axes)
        return self._call(node, axes)

    def _broadcast(self, var: Var, axes: tuple[str, ...]) -> str:
        own = self.program.place(var).axes
        if len(axes) < 2 or len(own) != 1:
            return ""
        return "[:, None]" if own[0] == self.rows else "[None, :]"

    def _call(self, node: Call, axes: tuple[str, ...]) -> tuple[str, int]:
        if node.fn in ("floordiv", "mod") and (short := self._power_of_two(node, axes)):
            return short
        if node.fn == "float" and node.args[0].type.integral:
            return self._real(node.args[0], self._print(node.args[0], axes, 0)), ATOM
        row = TABLE[node.fn]
        spelling = row.fast["triton"] if self.fast_math and "triton" in row.fast else row.spelled["triton"]
        if spelling.helper:
            self.helpers.add(spelling.helper)
        infix = spelling.binds != ATOM
        args = [
            # The right operand of a left-associative operator is bracketed at equal strength: a - (b - c).
            self._print(
                a, axes, spelling.operand + (infix and i > 0 and spelling.binds in (ADD, MUL, COMPARE))
            )
            for i, a in enumerate(node.args)
        ]
        if row.result is Type.FLOAT and not infix:
            args = [self._real(a, text) for a, text in zip(node.args, args, strict=True)]
        return spelling.form.format(*args), spelling.binds

    def _real(self, node: Node, text: str) -> str:
        """An operand of a function of reals: Triton's take fp32 tensors, neither integers nor Python's numbers."""
        if isinstance(node, Const) or (isinstance(node, Var) and node.name in self.constants):
            return f"tl.full([], {text}, tl.float32)"
        return f"({text}).to(tl.float32)" if node.type.integral else text

    def _power_of_two(self, node: Call, axes: tuple[str, ...]) -> tuple[str, int] | None:
        """`// 2**n` and `% 2**n` are a shift and a mask, with Python's floor for negative numbers too."""
        left, right = node.args
        if not (isinstance(right, Const) and isinstance(right.value, int) and right.value > 0):
            return None
        if right.value & (right.value - 1):
            return None
        if node.fn == "floordiv":
            return f"{self._print(left, axes, ADD)} >> {int(right.value).bit_length() - 1}", SHIFT
        return f"{self._print(left, axes, BITAND)} & {right.value - 1}", BITAND

    # --- buffers -------------------------------------------------------------------------------------------------

    def address(self, buffer: str, indices: tuple[Node, ...], axes: tuple[str, ...]) -> str:
        """`ptr + i * stride + ...`; strides are 64-bit, so that a buffer may pass 2**31 elements."""
        terms = [f"{self._print(i, axes, MUL)} * stride_{buffer}_{dim}" for dim, i in enumerate(indices)]
        return " + ".join([f"{buffer}_ptr", *terms])

    def guard(self, buffer: str, indices: tuple[Node, ...], axes: tuple[str, ...]) -> str:
        """The condition under which an element exists, empty when it is known to."""
        ranges = replace(self.ranges, definitions={b.name: b.node for b in self.program.bindings})
        conditions = []
        for index, size in zip(indices, self.buffers[buffer].shape, strict=True):
            length = _length(size)
            text = self._print(index, axes, COMPARE + 1)
            if not ranges.not_negative(index):
                conditions.append(f"({text} >= 0)")
            if not ranges.below(index, length):
                conditions.append(f"({text} < {self.own(length, SHIFT)})")
        return " & ".join(conditions) if len(conditions) != 1 else conditions[0][1:-1]

    def _load(self, node: Read, axes: tuple[str, ...]) -> tuple[str, int]:
        address = self.address(node.buffer, node.indices, axes)
        return self.loaded(node.buffer, address, self.guard(node.buffer, node.indices, axes))

    def loaded(self, buffer: str, address: str, guard: str) -> tuple[str, int]:
        """The elements of a buffer at an address, as numbers that expressions compute with."""
        text = f"tl.load({address}, mask={guard}, other=0)" if guard else f"tl.load({address})"
        dtype = self.buffers[buffer].dtype
        if dtype in ("bf16", "fp16"):
            return f"{text}.to(tl.float32)", ATOM
        if dtype == "bool":
            return f"{text} != 0", COMPARE
        return text, ATOM

    def search(self, first: Read, second: Read) -> str:
        """Two searches of one row of a sorted buffer."""
        self.helpers.add("first_at_least")
        buffer = first.buffer.removesuffix(FIRST_AT_LEAST)
        base = self.address(buffer, first.indices[:-1], ())
        last = len(first.indices) - 1
        size = self.buffers[buffer].shape[-1]
        values = ", ".join(self._print(node.indices[-1], (), 0) for node in (first, second))
        return f"_first_at_least({base}, stride_{buffer}_{last}, {size}, {values})"


def _length(size: int | str) -> Node:
    return Const(size, Type.INT) if isinstance(size, int) else Var(size, Type.INT)


def literal(node: Const) -> tuple[str, int]:
    """A number as Python writes it; a negative one binds like a unary minus."""
    text = repr(node.value)
    return text, UNARY if text.startswith("-") else ATOM
