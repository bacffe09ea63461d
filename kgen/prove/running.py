"""Run the text of a Triton kernel on lanes, and record accesses, 32-bit integers and powers."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import z3

from kgen.prove.digits import Indexed, Monomial, indexed, monomial, monomials, quotient
from kgen.prove.functions import Beyond
from kgen.prove.lanes import (
    Data,
    Lost,
    Num,
    Offset,
    Pointer,
    Range,
    Stride,
    Tensor,
    expanded,
    joined,
    lane,
    moved,
    names_of,
    of_lanes,
    shape_of,
)
from kgen.prove.records import Access, Claim, Digits, inside
from kgen.prove.trees import INFINITY
from kgen.prove.walking import OPERATORS, Env, Method, Named, Returned, Walker
from kgen.prove.world import number

_COMPARES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_ELEMENTWISE = ("exp", "exp2", "abs", "sigmoid", "log", "sqrt", "rsqrt")
_GROWS = (ast.Add, ast.Sub, ast.Mult, ast.LShift)
INT32 = 2**31
QUICK_MS = 1000
"""Time limit to choose between two ways to split an offset."""


@dataclass
class KernelWalker(Walker):
    """Runs one kernel. `facts` are about sizes, lanes and program ids."""

    programs: Any = None
    """The number of programs."""
    facts: list[Any] = field(default_factory=list)
    tracked: frozenset[str] = frozenset()
    """The tensors of real numbers whose elements are known by their indices."""
    not_above_zero: frozenset[str] = frozenset()
    """The functions of the file whose results are at most zero."""
    opaque: frozenset[str] = frozenset()
    """The functions of the file whose results may be any real numbers."""
    accesses: list[Access] = field(default_factory=list)
    computed: list[Claim] = field(default_factory=list)
    powers: list[Claim] = field(default_factory=list)
    path: tuple[Any, ...] = ()
    digits: dict[int, Digits] = field(default_factory=dict)
    lemmas: list[tuple[Any, Any]] = field(default_factory=list)
    """Products of a bounded number and a size, which z3 treats as nonlinear."""
    loops: list[Any] = field(default_factory=list)
    """The numbers of loops whose bounds are unknown."""
    _fresh: int = 0

    # --- programs and digits ------------------------

    def program(self) -> Num:
        """Return the number of the program."""
        return Num(self.bounded("pid", self.programs).term)

    def bounded(self, name: str, limit: Any) -> Digits:
        """Return an unknown from 0 to below a limit, which divisions split into digits."""
        term, bound = z3.Int(name), monomial(limit)
        if bound is None:
            raise Beyond(f"the limit {limit} of {name}")
        key = term.get_id()
        if key not in self.digits:
            self.digits[key] = Digits(term, bound, name)
            self.facts += [term >= 0, term < bound.term]
        return self.digits[key]

    def split(self, of: Digits, divisor: Monomial) -> tuple[Any, Any]:
        """Return quotient and remainder of a bounded number."""
        total = of.divisor * divisor
        limit = of.limit / divisor
        if limit is None:
            raise Beyond(f"{of.term} // {divisor.term}")
        name = f"{of.root} // {z3.simplify(total.term)}"
        top = self.bounded(name, limit.term)
        top.root, top.divisor = of.root, total
        rest = self.bounded(f"{z3.simplify(of.term)} % {z3.simplify(divisor.term)}", divisor.term)
        pair = top.term, rest.term
        if not any(pair[0].eq(a) and pair[1].eq(b) for a, b in of.splits):
            of.splits.append(pair)
            self.facts.append(of.term == divisor.term * top.term + rest.term)
            self._product(top.term, divisor.term)
        return pair

    def _product(self, a: Any, b: Any) -> None:
        """Add the bound of a product of a bounded number and a size."""
        of = self.digits.get(a.get_id())
        if of is None or z3.is_int_value(z3.simplify(b)):
            return
        self.facts += [(a + 1) * b <= of.limit.term * b, a * b >= 0]
        self.lemmas.append((a, b))

    # --- control flow ------------------------

    def choose(self, node: ast.If, env: Env) -> Returned | None:
        test = self.value(node.test, env)
        if isinstance(test, bool | int):
            return super().choose(node, env)
        path, before = self.path, dict(env)
        for condition, body in ((test.term, node.body), (z3.Not(test.term), node.orelse)):
            self.path = (*path, condition)
            branch = dict(before)
            if self.block(body, branch) is not None:
                raise Beyond(ast.unparse(node.test))
            env |= branch
        self.path = path
        self._lose([node], env)
        return None

    def loop(self, over: Any, node: ast.For, env: Env) -> Iterator[Any]:
        if not isinstance(over, Range):
            yield from over
            return
        assert isinstance(node.target, ast.Name)
        count = z3.Int(self._name(node.target.id))
        low, high = self.num(over.low), self.num(over.high)
        term = low.term + over.step * count
        self.loops.append(count)
        path = self.path
        self.path = (*path, count >= 0, term < high.term)
        self._lose(node.body, env)
        yield Num(term, max(low.bits, high.bits))
        self._lose(node.body, env)
        self.path = path

    def _name(self, name: str) -> str:
        self._fresh += 1
        return f"{name}#{self._fresh}"

    def _lose(self, body: Sequence[ast.stmt], env: Env) -> None:
        """Forget the values of the names that statements assign."""
        for part in body:
            for one in ast.walk(part):
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one.id in env:
                    known = isinstance(env[one.id], Data)
                    env[one.id] = Data() if known else Lost(one.id)

    # --- operations ------------------------

    def num(self, value: Any) -> Num:
        """Return an integer as a `Num`."""
        if isinstance(value, bool):
            return Num(z3.BoolVal(value))
        if isinstance(value, int):
            return Num(z3.IntVal(value))
        if isinstance(value, Num):
            return value
        raise Beyond(str(value) if isinstance(value, Lost) else self.text)

    def real(self, value: Any) -> Any:
        """Return the term of a number as a real, or None."""
        if isinstance(value, Data):
            return value.term
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            infinity = z3.Real(INFINITY)
            self.facts.append(infinity > 0)
            return infinity if value > 0 else -infinity
        known = isinstance(value, int | float) and math.isfinite(value)
        return number(value) if known else None

    def aligned(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Return two operands with the same number of axes."""
        dims = max(len(shape_of(a)), len(shape_of(b)))

        def one(x: Any) -> Any:
            shape = shape_of(x)
            if not shape or len(shape) == dims or (isinstance(x, Data) and x.term is None):
                return x
            return moved(x, range(dims - len(shape), dims), dims)

        return one(a), one(b)

    def binary(self, op: type[ast.AST], a: Any, b: Any) -> Any:
        a, b = self.aligned(a, b)
        if any(isinstance(x, Lost) for x in (a, b)):
            raise Beyond(f"a value before a loop, in {self.text}")
        if op in (ast.Is, ast.IsNot) or not any(hasattr(x, "shape") for x in (a, b)):
            return (
                self._with_stride(op, a, b) if isinstance(b, Stride) else super().binary(op, a, b)
            )
        if isinstance(a, Pointer) and op in (ast.Add, ast.Sub):
            return self._added(a, b if op is ast.Add else self.negative(b))
        if isinstance(b, Stride) or isinstance(a, Stride):
            return self._with_stride(op, a, b)
        shape = joined(shape_of(a), shape_of(b))
        if any(isinstance(x, Data | float) for x in (a, b)):
            return self._of_reals(op, a, b, shape)
        if isinstance(a, Offset) and isinstance(b, Offset) and op is ast.Add:
            return self._sum_of_offsets(a, b, shape)
        return self._of_integers(op, self.num(a), self.num(b), shape)

    def _added(self, a: Pointer, b: Any) -> Pointer:
        shape = joined(a.shape, shape_of(b))
        if isinstance(b, Offset):
            if b.tensor is not a.tensor:
                raise Beyond(f"strides of {b.tensor.name} for {a.tensor.name}: {self.text}")
            counts = dict(a.counts)
            for dim, count in b.counts.items():
                counts[dim] = counts.get(dim, z3.IntVal(0)) + count
            return replace(a, counts=counts, shape=shape)
        return replace(a, plain=a.plain + self.num(b).term, shape=shape)

    def _with_stride(self, op: type[ast.AST], a: Any, b: Any) -> Offset:
        count, stride = (a, b) if isinstance(b, Stride) else (b, a)
        if op is not ast.Mult or isinstance(count, Stride):
            raise Beyond(self.text)
        found = self.num(count)
        bits = max(found.bits, stride.bits)
        offset = Offset(stride.tensor, {stride.dim: found.term}, bits, found.shape)
        self._fits(offset)
        return offset

    def _sum_of_offsets(self, a: Offset, b: Offset, shape: tuple[int, ...]) -> Offset:
        if a.tensor is not b.tensor or a.counts.keys() & b.counts.keys():
            raise Beyond(self.text)
        both = {**a.counts, **b.counts}
        found = Offset(a.tensor, both, max(a.bits, b.bits), shape)
        self._fits(found)
        return found

    def _fits(self, offset: Offset) -> None:
        """Claim that an offset of 32 bits fits, for all strides that the launcher allows."""
        if offset.bits == 32:
            most = offset.tensor.most
            if offset.counts.keys() - most.keys():
                raise Beyond(f"a bound of the strides of {offset.tensor.name}")
            total = sum((count * most[dim] for dim, count in offset.counts.items()), z3.IntVal(0))
            self._claim(z3.And(total < INT32, total >= -INT32))

    def _claim(self, claim: Any) -> None:
        self.computed.append(Claim(self.text, self.when(), claim))

    def when(self, mask: Any = None) -> Any:
        """Return the condition under which the current statement runs."""
        return z3.And(*self.path, *([] if mask is None else [mask]))

    def _of_reals(self, op: type[ast.AST], a: Any, b: Any, shape: tuple[int, ...]) -> Any:
        x, y, found = self.real(a), self.real(b), None
        if x is not None and y is not None and op in (ast.Add, ast.Sub, *_COMPARES):
            found = OPERATORS[op](x, y)
        if op in _COMPARES:
            return Num(z3.FreshBool("compared") if found is None else found, shape=shape)
        return Data(found, shape, names=names_of(a, b))

    def _of_integers(self, op: type[ast.AST], a: Num, b: Num, shape: tuple[int, ...]) -> Num:
        bits = max(a.bits, b.bits)
        x, y = a.term, b.term
        if op in (ast.BitAnd, ast.BitOr) and z3.is_bool(x):
            return Num(z3.And(x, y) if op is ast.BitAnd else z3.Or(x, y), bits, shape)
        known = z3.simplify(y)
        if op in (ast.FloorDiv, ast.Mod):
            return Num(self._divided(op, x, y), bits, shape)
        if op in (ast.LShift, ast.RShift, ast.BitOr):
            if not z3.is_int_value(known):
                raise Beyond(self.text)
            y = known.as_long()
            if op is ast.BitOr and y != 1:
                raise Beyond(self.text)
            found = x + 1 - x % 2
            if op is not ast.BitOr:
                found = x * 2**y if op is ast.LShift else x / z3.IntVal(2**y)
        else:
            found = OPERATORS[op](x, y)
        if op is ast.Mult:
            self._product(x, y)
            self._product(y, x)
        if op in _GROWS and bits == 32:
            self._claim(z3.And(found < INT32, found >= -INT32))
        return Num(found, bits, shape)

    def _divided(self, op: type[ast.AST], x: Any, y: Any) -> Any:
        """Return a quotient or a remainder. The dividend must not be negative, where `//` of Triton
        differs from Python's.
        """
        exact = quotient(x, y)
        if exact is not None:
            return exact if op is ast.FloorDiv else z3.IntVal(0)
        by = monomial(y)
        of = self.digits.get(x.get_id())
        if of is not None and by is not None and of.limit / by is not None:
            top, rest = self.split(of, by)
            return top if op is ast.FloorDiv else rest
        if not z3.is_int_value(z3.simplify(y)):
            raise Beyond(self.text)
        self._claim(x >= 0)
        return x / y if op is ast.FloorDiv else x % y

    def negative(self, value: Any) -> Any:
        if isinstance(value, Data):
            return Data(shape=value.shape, names=value.names)
        if isinstance(value, Num):
            return self._of_integers(ast.Sub, self.num(0), value, value.shape)
        if isinstance(value, Offset | Stride | Pointer | Lost):
            raise Beyond(self.text)
        return super().negative(value)

    # --- names, attributes, calls ------------------------

    def attribute(self, value: Any, name: str) -> Any:
        if name in ("dtype", "element_ty"):
            return Named("dtype")
        return super().attribute(value, name)

    def element(self, value: Any, index: Any) -> Any:
        if isinstance(value, Num | Data | Pointer | Offset):
            return expanded(value, index if isinstance(index, tuple) else (index,))
        return super().element(value, index)

    def call(self, called: Any, args: list[Any], named: Env) -> Any:
        if isinstance(called, Method) and called.name == "to":
            return self._cast(called.value, args[0])
        if not isinstance(called, Named):
            raise Beyond(self.text)
        if called.path in self.not_above_zero | self.opaque:
            value = z3.FreshReal(called.path)
            self.facts += [value <= 0] if called.path in self.not_above_zero else []
            shape = joined(*(shape_of(a) for a in args), ())
            return Data(value, shape, names=names_of(*args))
        if called.path in ("range", "tl.range", "tl.static_range"):
            return self._range(args)
        if called.path.startswith("tl.") and called.path != "tl.constexpr":
            return self.primitive(called.path.removeprefix("tl."), args, named)
        return super().call(called, args, named)

    def _cast(self, value: Any, dtype: Any) -> Any:
        path = dtype.path if isinstance(dtype, Named) else ""
        if isinstance(value, Num) and path == "tl.int64":
            return replace(value, bits=64)
        if isinstance(value, Num) and path == "tl.int32":
            if value.bits > 32:
                self._claim(z3.And(value.term < INT32, value.term >= -INT32))
            return replace(value, bits=32)
        if isinstance(value, Data):
            return value
        return Data(shape=shape_of(value), names=names_of(value))

    def _range(self, args: list[Any]) -> Any:
        low, high = (0, args[0]) if len(args) == 1 else args[:2]
        step = args[2] if len(args) > 2 else 1
        if all(isinstance(x, int) for x in (low, high, step)):
            return range(low, high, step)
        return Range(low, high, step)

    def primitive(self, name: str, args: list[Any], named: Env) -> Any:
        """Return the result of a function of `triton.language`."""
        match name, args:
            case "program_id", _:
                return self.program()
            case "num_programs", _:
                return Num(self.programs)
            case "arange", [int() as low, int() as high]:
                size = high - low
                return Num(low + lane(1, 0, size), shape=(size,))
            case "zeros", [(), Named(path="tl.int64")]:
                return Num(z3.IntVal(0), 64)
            case "load", [Pointer() as address, *_]:
                return self.load(address, named.get("mask"), named.get("other"))
            case "store", [Pointer() as address, value]:
                self.access(address, named.get("mask"), stores=True, value=value)
                return None
            case "cdiv", [a, b]:
                return self._cdiv(a, b)
            case "minimum" | "maximum", [a, b] if not any(isinstance(x, Data) for x in (a, b)):
                x, y = self.num(a), self.num(b)
                first = x.term <= y.term if name == "minimum" else x.term >= y.term
                return Num(z3.If(first, x.term, y.term), max(x.bits, y.bits))
            case "where", [test, a, b]:
                return self._where(self.num(test), a, b)
            case "exp2", [Data() as x]:
                self.powers.append(Claim(self.text, self.when(), x.term))
                return Data(shape=x.shape, names=x.names)
            case "cumsum", [Data() as x, 0]:
                return Data(shape=x.shape, steps=x.term, names=x.names)
            case "split", [x]:
                return (Data(names=names_of(x)),) * 2
            case "permute" | "trans", [Num() as x, *order]:
                axes = list(order[0]) if order else [1, 0]
                return moved(x, [axes.index(n) for n in range(len(axes))], len(axes))
        if any(isinstance(x, Pointer | Lost) for x in args):
            raise Beyond(self.text)
        names = names_of(*args, *named.values())
        same = bool(args) and name in _ELEMENTWISE
        return Data(shape=shape_of(args[0]) if same else (), names=names)

    def _cdiv(self, a: Any, b: Any) -> Any:
        x, y = self.num(a), self.num(b)
        self._claim(z3.And(x.term >= 0, x.term + y.term - 1 < (INT32 if x.bits == 32 else 2**63)))
        return Num(ceiling(x.term, y.term), max(x.bits, y.bits))

    def _where(self, test: Num, a: Any, b: Any) -> Any:
        shape = joined(test.shape, shape_of(a), shape_of(b))
        if any(isinstance(x, Data | float) for x in (a, b)):
            x, y = self.real(a), self.real(b)
            known = x is not None and y is not None
            names = names_of(test, a, b)
            return Data(z3.If(test.term, x, y) if known else None, shape, names=names)
        one, other = self.num(a), self.num(b)
        bits = max(one.bits, other.bits)
        return Num(z3.If(test.term, one.term, other.term), bits, shape)

    # --- memory ------------------------

    def load(self, address: Pointer, mask: Any, other: Any) -> Any:
        """Record a load, and return the element."""
        found = self.access(address, mask, stores=False)
        shape = joined(address.shape, shape_of(mask))
        tensor = address.tensor
        sorts = [z3.IntSort()] * len(found.indices)
        if tensor.integer:
            element = z3.Function(tensor.name, *sorts, z3.IntSort())(*found.indices)
            self.facts += [element < INT32, element >= -INT32]
            return Num(element, shape=shape)
        names = names_of(*(Num(index) for index in found.indices), Num(found.when))
        if tensor.name not in self.tracked:
            return Data(shape=shape, names=names)
        element = z3.Function(tensor.name, *sorts, z3.RealSort())(*found.indices)
        if mask is not None:
            element = z3.If(self.num(mask).term, element, self.real(other))
        return Data(element, shape, names=names)

    def access(self, address: Pointer, mask: Any, *, stores: bool, value: Any = None) -> Access:
        """Record a load or a store."""
        guard = None
        if mask is not None:
            aligned, _ = self.aligned(self.num(mask), Num(z3.IntVal(0), shape=address.shape))
            guard = aligned.term
        when, tensor = self.when(guard), address.tensor
        limits = {key: of.limit for key, of in self.digits.items()}
        if address.counts:
            if not z3.is_int_value(z3.simplify(address.plain)):
                raise Beyond(self.text)
            counts = address.counts
            indices = tuple(counts.get(n, z3.IntVal(0)) for n in range(len(tensor.shape)))
            sizes = tensor.shape
        else:
            split = self._split(address.plain, tensor, limits, when)
            sizes, indices = split.sizes, split.indices
        line = getattr(self.at, "lineno", 0)
        indices = tuple(z3.simplify(index) for index in indices)
        found = Access(self.text, line, tensor, stores, when, tuple(sizes), indices, value)
        self.accesses.append(found)
        return found

    def _split(
        self, offset: Any, tensor: Tensor, limits: Mapping[int, Monomial], when: Any
    ) -> Indexed:
        """Return the indices of an offset.

        A negative constant may be a part of several indices, so there are two ways to split it. If
        one of them is inside of the tensor, it is the only one.
        """
        found = indexed(offset, tensor.shape, limits)
        if not any(one.number < 0 and not one.factors for one in monomials(offset)):
            return found
        other = indexed(offset, tensor.shape, limits, floor=True)
        solver = z3.SimpleSolver()
        solver.set("timeout", QUICK_MS)
        claim = inside(other.indices, other.sizes)
        solver.add(*self.facts, *of_lanes([claim, when]), when, z3.Not(claim))
        return other if solver.check() == z3.unsat else found


def ceiling(a: Any, b: Any) -> Any:
    """Return `a` divided by a positive number, rounded up, as one unknown for all occurrences."""
    return z3.simplify((a + b - 1) / b)
