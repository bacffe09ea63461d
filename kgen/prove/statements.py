"""Run the printed statements of kernels on z3 terms. One lane of each vector stands for all lanes.

The machine records every load and every computed 32-bit integer, with the condition under which it
runs. Obligations are stated about these records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import z3

from kgen.expr.functions import TABLE
from kgen.expr.nodes import FIRST_AT_LEAST
from kgen.prove.functions import Beyond, apply, floor_div, real, toward_zero
from kgen.prove.trees import INFINITY
from kgen.prove.world import World, number
from kgen.targets.code import Assign, Code, If, Name, Op, Repeat, Run, Statement

_GROWS = frozenset({"add", "sub", "mul", "neg", "abs", "lshift"})
_RANGES = ("{tl}.arange(0, {0})", "arange")
_AS_IT_IS = ("{0}", "({0})", "column", "row", "({0})[:, None]", "{0}[:, None]", "({0})[None, :]")


@dataclass(frozen=True)
class Number:
    """A number, with the width of an integer in bits."""

    term: Any
    bits: int = 32


@dataclass(frozen=True)
class Stride:
    """The stride of a buffer along a dimension."""

    name: str


@dataclass(frozen=True)
class Offset:
    """An offset of `count` elements along a dimension."""

    stride: str
    count: Number


@dataclass(frozen=True)
class Pointer:
    """An address in a buffer."""

    buffer: str
    offsets: tuple[Offset, ...] = ()


@dataclass(frozen=True)
class Unknown:
    """The value of a name that has no encoding, with the reason."""

    why: str


Value = Number | Stride | Offset | Pointer | Unknown | tuple[Number, ...]


@dataclass(frozen=True)
class Load:
    """A load that must be `inside` its buffer if `when` holds.

    None if the address has no encoding.
    """

    text: str
    when: Any
    inside: Any | None
    why: str = ""


@dataclass(frozen=True)
class Computed:
    """A 32-bit integer, and the condition under which it is computed."""

    text: str
    when: Any
    term: Any


@dataclass
class Machine:
    """Runs statements over a world.

    `values` has the names; Python booleans are compile-time constants.
    """

    world: World
    values: dict[str, Value | bool]
    loads: list[Load] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    path: tuple[Any, ...] = ()
    lanes: Mapping[str, Any] = field(default_factory=dict)
    """An arbitrary element of a range of positions, by the name of its length."""
    vectors: tuple[Any, ...] = ()
    """The unknowns that stand for an arbitrary element of a vector, for minima and maxima."""
    wraps: bool = False
    """True if integers may wrap, because they only become real numbers."""

    def copy(self) -> Machine:
        """Return an independent copy of the state."""
        return replace(
            self, values=dict(self.values), loads=list(self.loads), computed=list(self.computed)
        )

    def given(self, **values: Any) -> Machine:
        """Add values of names, and return the machine."""
        self.values |= {n: v if isinstance(v, bool) else Number(v) for n, v in values.items()}
        return self

    def run(self, statements: Iterable[Statement]) -> Machine:
        """Run statements in order."""
        for statement in statements:
            self._step(statement)
        return self

    def value(self, code: Code) -> Any:
        """Return the term of a value. Raise `Beyond` if it has no encoding."""
        found = self._of(code)
        if not isinstance(found, Number):
            raise Beyond(str(code))
        return found.term

    # --- statements ------------------------

    def _step(self, statement: Statement) -> None:
        if isinstance(statement, Assign):
            self._assign(statement)
        elif isinstance(statement, If):
            self._choose(statement)
        elif isinstance(statement, Run):
            # A load without an encoding is recorded, so only the exception is dropped.
            with suppress(Beyond):
                self._of(statement.value)
        elif isinstance(statement, Repeat):
            self.values |= {name: Unknown("a loop assigns it") for name in statement.defines}

    def _assign(self, statement: Assign) -> None:
        try:
            values: list[Value] = []
            for code in statement.values:
                value = self._of(code)
                values += value if isinstance(value, tuple) else [value]
            if statement.sign != "=":
                raise Beyond(f"{statement.name} {statement.sign}")
            for name, value in zip(statement.names, values, strict=True):
                self.values[name] = value
        except Beyond as beyond:
            for name in statement.names:
                self.values[name] = Unknown(str(beyond))

    def _choose(self, statement: If) -> None:
        known = self.values.get(statement.test.name) if isinstance(statement.test, Name) else None
        if isinstance(known, bool):
            self.run(statement.then if known else statement.other)
            return
        try:
            test = self.value(statement.test)
        except Beyond as beyond:
            for name in statement.defines:
                self.values[name] = Unknown(str(beyond))
            return
        path, before = self.path, dict(self.values)
        after = []
        for condition, statements in ((test, statement.then), (z3.Not(test), statement.other)):
            self.values, self.path = dict(before), (*path, condition)
            self.run(statements)
            after.append(self.values)
        self.values, self.path = before, path
        for name in statement.defines:
            a, b = (values.get(name, Unknown(name)) for values in after)
            self.values[name] = (
                Number(apply(self.world, "where", (test, a.term, b.term)), max(a.bits, b.bits))
                if isinstance(a, Number) and isinstance(b, Number)
                else Unknown(name)
            )

    # --- values ------------------------

    def _of(self, code: Code) -> Value:
        if isinstance(code, Name):
            return self._named(code.name)
        assert isinstance(code, Op)
        if not code.args:
            return self._literal(code.fn)
        match code.fn, code.args:
            case (fn, (inner, *_)) if fn in _AS_IT_IS or fn.startswith("{tl}.broadcast_to("):
                return self._of(inner)
            case "to int64", (inner,):
                return Number(self.value(inner), 64)
            case "to int32", (inner,):
                return self._kept(code, self.value(inner), 32)
            case (fn, (inner, *_)) if fn in ("to float32", "float") or fn.startswith(
                "{tl}.full([], "
            ):
                return Number(real(self.value(inner)))
            case (fn, (Name(name=length),)) if fn in _RANGES and length in self.lanes:
                return Number(self.lanes[length])
            case (fn, (inner,)) if fn.startswith(("{tl}.min(", "{tl}.max(")):
                return self._extreme(code, self.value(inner))
            case (fn, (inner,)) if fn == "({0}).to({tl}.int32)":
                return Number(
                    apply(self.world, "where", (self.value(inner), z3.IntVal(1), z3.IntVal(0)))
                )
            case "(-{0})", (inner,):
                return self._kept(code, -self.value(inner), 32)
            case "{0}[0]", (inner,):
                pair = self._of(inner)
                if isinstance(pair, tuple):
                    return pair[0]
            case "load", (address, *guard):
                return self._load(code, address, guard)
            case fn, _ if fn == FIRST_AT_LEAST:
                return self._search(code)
        return self._operation(code)

    def _operation(self, code: Op) -> Value:
        args = [self._of(a) for a in code.args]
        match code.fn, args:
            case "add", [Pointer(buffer, offsets), Offset() as offset]:
                return Pointer(buffer, (*offsets, offset))
            case "add", [Pointer(buffer, offsets), Pointer(buffer="", offsets=others)]:
                return Pointer(buffer, offsets + others)
            case "add", [Offset() as a, Offset() as b]:
                return Pointer("", (a, b))
            case "mul", [Number() as count, Stride(name)]:
                return Offset(name, count)
            case "mul", [Stride(name), Number() as count]:
                return Offset(name, count)
        numbers = [a for a in args if isinstance(a, Number)]
        if len(numbers) < len(args):
            raise Beyond(next((a.why for a in args if isinstance(a, Unknown)), str(code)))
        terms, bits = tuple(n.term for n in numbers), max(n.bits for n in numbers)
        match code.fn, terms:
            case "minimum" | "maximum", (a, b):
                return Number(apply(self.world, code.fn[:3], (a, b)), bits)
            case "cdiv", (a, b):
                return Number(toward_zero(self._kept(code, a + b - 1, bits).term, b), bits)
            case "over" | "{0} // {1}", (a, b):
                known = self.world.quotient(a, b)
                return Number(toward_zero(a, b) if known is None else known, bits)
            case "{0} % {1}", (a, b):
                return Number(a - b * toward_zero(a, b), bits)
            case "shift", (a, b):
                return Number(floor_div(a, z3.IntVal(2 ** z3.simplify(b).as_long())), bits)
            case "bits", (a, b):
                return Number(a % (z3.simplify(b).as_long() + 1), bits)
            case "{tl}.where({0}, {1}, {2})", _:
                return Number(apply(self.world, "where", terms), bits)
            case "{0} and {1}", (a, b):
                return Number(z3.And(a, b))
        if code.fn not in TABLE:
            raise Beyond(str(code))
        found = apply(self.world, code.fn, terms)
        return self._kept(code, found, bits) if code.fn in _GROWS else Number(found, bits)

    def _extreme(self, code: Op, value: Any) -> Number:
        """Return the minimum or maximum of a vector: a bound of the lane's own value that some lane
        attains.
        """
        others = [(lane, z3.FreshInt(f"other_{lane}")) for lane in self.vectors]
        found = z3.substitute(value, *others)
        facts = [(fact, z3.substitute(fact, *others)) for fact in self.world.facts]
        self.world.facts += [other for fact, other in facts if not fact.eq(other)]
        self.world.facts.append(
            found <= value if code.fn.startswith("{tl}.min(") else found >= value
        )
        return Number(found)

    def _kept(self, code: Code, term: Any, bits: int) -> Number:
        if z3.is_int(term) and bits == 32 and not self.wraps:
            self.computed.append(Computed(str(code), self._when(), term))
        return Number(term, bits)

    def _when(self) -> Any:
        return z3.And(*self.path) if self.path else z3.BoolVal(True)

    def _named(self, name: str) -> Value:
        if name in self.values:
            found = self.values[name]
            if isinstance(found, Unknown):
                raise Beyond(found.why)
            return Number(z3.BoolVal(found)) if isinstance(found, bool) else found
        if name.startswith("stride_"):
            return Stride(name.removeprefix("stride_"))
        if name.endswith("_ptr") and name.removesuffix("_ptr") in self.world.buffers:
            return Pointer(name.removesuffix("_ptr"))
        return self._literal(name)

    def _literal(self, text: str) -> Number:
        if text == 'float("inf")':
            return Number(z3.Real(INFINITY))
        if text == 'float("-inf")':
            return Number(-z3.Real(INFINITY))
        if text in ("True", "False"):
            return Number(z3.BoolVal(text == "True"))
        for kind in (int, float):
            try:
                return Number(number(kind(text)))
            except ValueError:
                continue
        raise Beyond(text)

    # --- memory ------------------------

    def _indices(self, pointer: Pointer, dims: int) -> tuple[Any, ...]:
        """Return the indices of an address along the first `dims` dimensions of its buffer."""
        found: dict[str, Any] = {f"{pointer.buffer}_{d}": z3.IntVal(0) for d in range(dims)}
        for offset in pointer.offsets:
            if offset.stride not in found:
                raise Beyond(f"stride_{offset.stride} of {pointer.buffer}_ptr")
            found[offset.stride] = found[offset.stride] + offset.count.term
        return tuple(found.values())

    def _load(self, code: Op, address: Code, guard: list[Code]) -> Number:
        wraps, self.wraps = self.wraps, False  # addresses must not use wrapped integers
        try:
            pointer = self._of(address)
            condition = self.value(guard[0]) if guard else z3.BoolVal(True)
            if not isinstance(pointer, Pointer):
                raise Beyond(str(code))
            of = self.world.buffers[pointer.buffer]
            indices = self._indices(pointer, len(of.shape))
        except Beyond as beyond:
            self.loads.append(Load(str(code), self._when(), None, str(beyond)))
            raise
        finally:
            self.wraps = wraps
        when = z3.And(*self.path, condition)
        self.loads.append(Load(str(code), when, self.world.inside(pointer.buffer, indices)))
        element = self.world.element(pointer.buffer, indices)
        bits = 64 if of.dtype == "int64" else 32
        if not guard or self.world.holds(condition):
            return Number(element, bits)
        zero = z3.RealVal(0) if z3.is_real(element) else z3.IntVal(0)
        return Number(z3.If(condition, element, zero), bits)

    def _search(self, code: Op) -> tuple[Number, ...]:
        at, _, size, *values = code.args
        pointer = self._of(at)
        if not isinstance(pointer, Pointer) or pointer.buffer not in self.world.buffers:
            raise Beyond(str(code))
        shape = self.world.buffers[pointer.buffer].shape
        row = self._indices(pointer, len(shape) - 1)
        self.loads.append(self._searched(code, shape, row, self.value(size)))
        found = (self.world.first_at_least(pointer.buffer, row, self.value(v)) for v in values)
        return tuple(Number(f) for f in found)

    def _searched(
        self, code: Op, shape: tuple[int | str, ...], row: tuple[Any, ...], size: Any
    ) -> Load:
        """Return the load of a search, which reads its row up to the size that the kernel
        passes.
        """
        inside = [
            z3.And(i >= 0, i < self.world.length(s)) for i, s in zip(row, shape, strict=False)
        ]
        inside.append(size <= self.world.length(shape[-1]))
        return Load(str(code), self._when(), z3.And(*inside))


def values_of(names: Mapping[str, Any]) -> dict[str, Value | bool]:
    """Return terms as values of names."""
    return {name: v if isinstance(v, bool) else Number(v) for name, v in names.items()}
