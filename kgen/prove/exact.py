"""Run the text of Triton kernels exactly, on numbers of a prime field.

A wrong identity of rational functions may hold at a random point. The probability is at most its
degree divided by the prime (Schwartz 1980, Zippel 1979).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import add, sub
from typing import Any

from kgen.prove.arrays import (
    PRIME,
    Array,
    array,
    broadcast,
    common,
    each,
    permuted,
    power,
    product_of,
    root,
    running,
    strides,
    summed,
)
from kgen.prove.functions import Beyond
from kgen.prove.lanes import Stride, Tensor
from kgen.prove.walking import OPERATORS, Env, Method, Named, Walker

Stub = Callable[..., Any]


class Outside(Exception):
    """An access outside of its tensor. The message names the element."""


def _times(a: Any, b: Any) -> Any:
    """Return a product. Indices are so small that their products stay integers."""
    found = a * b
    return found if -PRIME < found < PRIME else found % PRIME


_VECTOR: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: _times,
    ast.Div: lambda x, y: x * pow(y, -1, PRIME) % PRIME,
}


@dataclass(frozen=True)
class Numbers:
    """The address of elements of a tensor: offsets after its start."""

    tensor: str
    offsets: Array


@dataclass
class ExactWalker(Walker):
    """Runs kernels on arrays."""

    memory: dict[str, list[Any]] = field(default_factory=dict)
    """The elements of the tensors, by name."""
    stubs: Mapping[str, Stub] = field(default_factory=dict)
    """Functions of the file that another function replaces, element by element."""
    programs: int = 0
    number: int = 0

    def launch(self, kernel: str, programs: int, arguments: Mapping[str, Any]) -> None:
        """Run all programs of a launch."""
        self.programs = programs
        values = {name: _argument(value) for name, value in arguments.items()}
        for number in range(programs):
            self.number = number
            self.function(kernel, values)

    # --- operations ------------------------

    def binary(self, op: type[ast.AST], a: Any, b: Any) -> Any:
        if isinstance(a, Numbers):
            if op not in (ast.Add, ast.Sub):
                raise Beyond(self.text)
            return Numbers(a.tensor, each(_VECTOR[op], a.offsets, b))
        if not isinstance(a, Array) and not isinstance(b, Array):
            return super().binary(op, a, b)
        return each(_VECTOR.get(op, OPERATORS[op]), a, b)

    def negative(self, value: Any) -> Any:
        return each(lambda x: -x, value) if isinstance(value, Array) else -value

    def attribute(self, value: Any, name: str) -> Any:
        if name in ("dtype", "element_ty"):
            return Named("dtype")
        return super().attribute(value, name)

    def element(self, value: Any, index: Any) -> Any:
        if isinstance(value, Numbers):
            return Numbers(value.tensor, self.element(value.offsets, index))
        if not isinstance(value, Array):
            return super().element(value, index)
        sizes = iter(value.shape)
        parts = index if isinstance(index, tuple) else (index,)
        return Array(tuple(1 if part is None else next(sizes) for part in parts), value.data)

    def call(self, called: Any, args: list[Any], named: Env) -> Any:
        if isinstance(called, Method) and called.name == "to":
            return called.value
        if not isinstance(called, Named):
            raise Beyond(self.text)
        if called.path in self.stubs:
            return each(self.stubs[called.path], *args) if args else self.stubs[called.path]()
        if called.path in ("range", "tl.range", "tl.static_range"):
            return range(*(_integer(a) for a in args))
        if called.path.startswith("tl.") and called.path != "tl.constexpr":
            return self.primitive(called.path.removeprefix("tl."), args, named)
        return super().call(called, args, named)

    def primitive(self, name: str, args: list[Any], named: Env) -> Any:
        """Return the result of a function of `triton.language`."""
        if name in _SIMPLE:
            return _SIMPLE[name](*args)
        match name, args:
            case "program_id", _:
                return self.number
            case "num_programs", _:
                return self.programs
            case "load", [Numbers() as address, *rest]:
                return self.load(address, [*rest, *named.values()])
            case "store", [Numbers() as address, value]:
                return self.store(address, value, named.get("mask", True))
            case "dot", [a, b, *rest]:
                found = product_of(a, b)
                return each(add, found, rest[0]) if rest else found
            case "split", [x]:
                return Array(x.shape[:-1], x.data[::2]), Array(x.shape[:-1], x.data[1::2])
            case "join", [a, b]:
                data = [x for pair in zip(a.data, b.data, strict=True) for x in pair]
                return Array((*a.shape, 2), data)
        raise Beyond(self.text)

    # --- memory ------------------------

    def load(self, address: Numbers, guard: Sequence[Any]) -> Any:
        """Return the elements at some addresses."""
        memory = self.memory[address.tensor]
        mask, other = array(guard[0] if guard else True), guard[1] if len(guard) > 1 else 0
        shape = common(address.offsets, mask)
        places = zip(broadcast(address.offsets, shape), broadcast(mask, shape), strict=True)
        data = [memory[self._at(address, at)] if live else int(other) for at, live in places]
        return Array(shape, data)

    def _at(self, address: Numbers, at: int) -> int:
        """Return an offset, which must be inside of the tensor."""
        if not 0 <= at < len(self.memory[address.tensor]):
            raise Outside(f"element {at} of {address.tensor} does not exist: {self.text}")
        return at

    def store(self, address: Numbers, value: Any, mask: Any) -> None:
        """Store elements at some addresses."""
        memory, live, made = self.memory[address.tensor], array(mask), array(value)
        shape = common(address.offsets, live, made)
        parts = (broadcast(one, shape) for one in (address.offsets, live, made))
        for at, inside, x in zip(*parts, strict=True):
            if inside:
                memory[self._at(address, at)] = x


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Numbers(value.name, Array((), [0]))
    if isinstance(value, Stride):
        return strides(value.tensor.shape)[value.dim]
    return value


def _integer(value: Any) -> int:
    return int(value.data[0] if isinstance(value, Array) else value)


def _cdiv(a: Any, b: Any) -> Any:
    return -(-_integer(a) // _integer(b))


def _zeros(shape: tuple[int, ...], *_: Any) -> Array:
    return Array(tuple(shape), [0] * prod(shape))


def _reciprocal_root(x: Any) -> int:
    """Return 1 / sqrt(x), or 1 if the field has no root of x, as in rows without tokens."""
    return pow(root(x) or 1, -1, PRIME)


_SIMPLE: Mapping[str, Callable[..., Any]] = {
    "arange": lambda low, high: Array((high - low,), list(range(low, high))),
    "zeros": _zeros,
    "full": lambda shape, value, *_: Array(tuple(shape), [value] * prod(shape)),
    "zeros_like": lambda x: _zeros(x.shape),
    "cdiv": _cdiv,
    "minimum": lambda a, b: each(min, a, b),
    "maximum": lambda a, b: each(max, a, b),
    "where": lambda test, a, b: each(lambda t, x, y: x if t else y, test, a, b),
    "exp2": lambda x: each(power, x),
    "rsqrt": lambda x: each(_reciprocal_root, x),
    "sum": summed,
    "cumsum": lambda x, axis: running(x),
    "trans": lambda x: permuted(x, [1, 0]),
    "permute": permuted,
    "reshape": lambda x, shape: Array(tuple(shape), x.data),
}
