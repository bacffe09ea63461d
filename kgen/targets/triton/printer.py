"""Print expressions over a tile in Triton and Gluon.

A value has tile axes. In an expression over two axes, a vector gets `[:, None]` or `[None, :]`. The
choice depends on the axis that the kernel puts along its rows. All other spellings are rows of the
function table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from textwrap import dedent

from kgen.expr.functions import TABLE
from kgen.expr.hoist import Program
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import FIRST_AT_LEAST, Call, Const, Node, Read, Type, Var, measured
from kgen.expr.spelling import ATOM, BITAND, MUL, SHIFT, Accuracy
from kgen.targets.code import (
    Code,
    Name,
    Op,
    as_type,
    conjunction,
    load,
    number,
    op,
    row,
    text,
    total,
)

SEARCH = dedent('''
    @triton.jit
    def _first_at_least(ptr, stride, size, a, b):
        """Return the first positions in an ascending array of elements >= a and >= b; `size` if there is none."""
        lanes = tl.arange(0, 256)
        first_a = tl.zeros([], tl.int32)
        first_b = first_a
        # A round divides the range into 256 blocks of `step` elements. It skips the blocks whose last element is too
        # small, and the next round divides the block after them. 2**24 elements take three waits for memory; halving
        # would take 24.
        step = tl.cdiv(size, 256)
        while step > 0:
            last_a = first_a + lanes * step + step - 1
            last_b = first_b + lanes * step + step - 1
            at_a = tl.load(ptr + last_a * stride, mask=last_a < size, other=a)
            at_b = tl.load(ptr + last_b * stride, mask=last_b < size, other=b)
            first_a += tl.sum((at_a < a).to(tl.int32)) * step
            first_b += tl.sum((at_b < b).to(tl.int32)) * step
            step = tl.cdiv(step - 1, 256)
        return first_a, first_b
''').strip()  # noqa: E501
"""The text of the function that searches a sorted buffer in a kernel."""


KV_HEAD = Call(
    "floordiv",
    (
        Var("h", Type.INT),
        Call("floordiv", (Var("HQ", Type.INT), Var("HKV", Type.INT)), Type.INT),
    ),
    Type.INT,
)
"""The key-value head of query head `h`; kernels have the number of query heads per key-value head,
GQA.
"""


@dataclass(frozen=True)
class BufferLayout:
    """Dtype of the elements of a declared buffer, and its shape."""

    dtype: str
    shape: tuple[int | str, ...]


@dataclass
class Printer:
    """Print the expressions of one program for a kernel.

    `axes` are the axes of a tile, and `rows` is the axis along its rows. Names in `constants` are
    compile-time parameters, printed in capitals. `helpers` collects the texts of functions that the
    file must define.
    """

    program: Program
    rows: str
    buffers: dict[str, BufferLayout]
    ranges: IndexRanges
    constants: frozenset[str]
    accuracy: Accuracy
    helpers: set[str] = field(default_factory=set)
    axes: tuple[str, str] = ("q", "kv")

    def tile(self, node: Node) -> Code:
        """Print a value that is used over the whole tile.

        It may be a scalar or a vector, which broadcasts.
        """
        return self.over(node, self.axes)

    def own(self, node: Node) -> Code:
        """Print a value over exactly its own axes."""
        return self.over(node, self.program.place(node).axes)

    def position(self, node: Node) -> Code:
        """Print a scalar as int32. The caller knows that it is between 0 and a length."""
        own = self.own(node)
        return as_type(own, "int32") if node.type is Type.LONG else own

    def over(self, node: Node, axes: tuple[str, ...]) -> Code:
        """Print a value so that it broadcasts over `axes`."""
        if isinstance(node, Const):
            return number(node)
        if isinstance(node, Var):
            if node.name == "inf":
                return text('float("inf")')
            if node.name == "HKV":
                return op("{0} // {1}", "HQ", "GQA", fn="over", binds=MUL, operand=MUL)
            if length := measured(node.name):
                return Name(size_name(*length))
            name = Name(node.name.upper() if node.name in self.constants else node.name)
            return self._broadcast(name, node, axes)
        if isinstance(node, Read):
            if node.buffer.endswith(FIRST_AT_LEAST):
                return op("{0}[0]", self.search(node, node))
            return self._load(node, axes)
        return self._call(node, axes)

    def _broadcast(self, name: Name, var: Var, axes: tuple[str, ...]) -> Code:
        own = self.program.place(var).axes
        if len(axes) < 2 or len(own) != 1:
            return name
        return column(name) if own[0] == self.rows else along_row(name)

    def _call(self, node: Call, axes: tuple[str, ...]) -> Code:
        if node == KV_HEAD:
            return op("{0} // {1}", "h", "GQA", fn="over", binds=MUL, operand=MUL)
        if node.fn in ("floordiv", "mod") and (short := self._power_of_two(node, axes)):
            return short
        if node.fn == "float" and node.args[0].type.integral:
            return self._real(node.args[0], axes)
        of = TABLE[node.fn]
        spelling = of.spelling("triton", self.accuracy)
        if spelling.helper:
            self.helpers.add(spelling.helper)
        args = [self.over(a, axes) for a in node.args]
        if of.result is Type.FLOAT and spelling.binds == ATOM:
            args = [self._real(a, axes) for a in node.args]
        return row(node.fn, *args, accuracy=self.accuracy)

    def _real(self, node: Node, axes: tuple[str, ...]) -> Code:
        """Print an operand as an fp32 tensor: functions of reals accept neither integers nor Python
        numbers.
        """
        own = self.over(node, axes)
        if self._is_number(node):
            return op("{tl}.full([], {0}, {tl}.float32)", own)
        return row("float", own) if node.type.integral else own

    def _is_number(self, node: Node) -> bool:
        """Return True if the value is known at compile time, so that Triton computes it as a Python
        number.
        """
        if isinstance(node, Call):
            return not TABLE[node.fn].callable and all(map(self._is_number, node.args))
        return isinstance(node, Const) or (isinstance(node, Var) and node.name in self.constants)

    def _power_of_two(self, node: Call, axes: tuple[str, ...]) -> Code | None:
        """Print `// 2**n` and `% 2**n` as a shift and a mask, which round towards minus infinity as
        Python does.
        """
        left, right = node.args
        if not (isinstance(right, Const) and isinstance(right.value, int) and right.value > 0):
            return None
        if right.value & (right.value - 1):
            return None
        value = self.over(left, axes)
        if node.fn == "floordiv":
            bits = int(right.value).bit_length() - 1
            return op("{0} >> {1}", value, bits, fn="shift", binds=SHIFT, operand=SHIFT + 1)
        return op("{0} & {1}", value, right.value - 1, fn="bits", binds=BITAND, operand=BITAND)

    # --- buffers ----------------------------------------------------------------------------------

    def address(self, buffer: str, indices: tuple[Node, ...], axes: tuple[str, ...]) -> Code:
        """Return `ptr + i * stride + ...`.

        Strides are int64, so a buffer may have more than 2**31 elements.
        """
        terms = [
            row("mul", self.over(i, axes), f"stride_{buffer}_{dim}")
            for dim, i in enumerate(indices)
        ]
        return total(Name(f"{buffer}_ptr"), *terms)

    def guard(self, buffer: str, indices: tuple[Node, ...], axes: tuple[str, ...]) -> Code | None:
        """Return the guard of an element, or None if the element is known to be in bounds.

        Positions of the inner axis are in bounds only inside the loop: outside, that axis may be
        empty.
        """
        in_loop = any(self.program.place(index).in_loop for index in indices)
        ranges = replace(
            self.ranges,
            definitions={b.name: b.node for b in self.program.bindings},
            empty=frozenset[str]() if in_loop else self.ranges.empty,
        )
        conditions = []
        for index, size in zip(indices, self.buffers[buffer].shape, strict=True):
            length, at = _length(size), self.over(index, axes)
            if not ranges.not_negative(index):
                conditions.append(row("ge", at, 0))
            if not ranges.below(index, length):
                conditions.append(row("lt", at, self.own(length)))
        return conjunction(conditions)

    def _load(self, node: Read, axes: tuple[str, ...]) -> Code:
        address = self.address(node.buffer, node.indices, axes)
        return self.loaded(node.buffer, address, self.guard(node.buffer, node.indices, axes))

    def loaded(self, buffer: str, address: Code, guard: Code | None) -> Code:
        """Load elements of a buffer, converted to the type in which expressions compute."""
        value = load(address, guard)
        dtype = self.buffers[buffer].dtype
        if dtype in ("bf16", "fp16", "any"):
            return as_type(value, "float32")
        if dtype == "uint8":
            return as_type(value, "int32")
        return row("ne", value, 0) if dtype == "bool" else value

    def search(self, first: Read, second: Read) -> Op:
        """Return one call that searches one row of a sorted buffer for two values."""
        self.helpers.add(SEARCH)
        buffer = first.buffer.removesuffix(FIRST_AT_LEAST)
        base = self.address(buffer, first.indices[:-1], ())
        stride = f"stride_{buffer}_{len(first.indices) - 1}"
        size = self.own(_length(self.buffers[buffer].shape[-1]))
        return first_at_least(
            base, stride, size, *(self.over(n.indices[-1], ()) for n in (first, second))
        )


def size_name(buffer: str, axis: int) -> str:
    """Return the name of the length of an axis of a buffer in kernels."""
    return f"size_{buffer}_{axis}"


def first_at_least(row: Code, stride: str, size: Code | int | str, a: Code, b: Code) -> Op:
    """Return the positions of the first elements >= a and >= b in a sorted row."""
    return op(
        "_first_at_least{end}({0}, {1}, {2}, {3}, {4})", row, stride, size, a, b, fn=FIRST_AT_LEAST
    )


def column(value: Code | str) -> Code:
    """Broadcast a vector that has one value for each row of a tile."""
    return op("{0}[:, None]", value, fn="column")


def along_row(value: Code | str) -> Code:
    """Broadcast a vector that has one value for each column of a tile."""
    return op("{0}[None, :]", value, fn="row")


def _length(size: int | str) -> Node:
    return Const(size, Type.INT) if isinstance(size, int) else Var(size, Type.INT)
