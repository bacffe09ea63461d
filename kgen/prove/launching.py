"""Run the launcher of an emitted Triton file, and record the launches of its kernels."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import z3

from kgen.prove.digits import monomial, quotient
from kgen.prove.functions import Beyond
from kgen.prove.lanes import Num, Stride, Summed, Tensor
from kgen.prove.running import ceiling
from kgen.prove.walking import Env, File, Method, Named, Returned, Walker

DENSE = (2**23 - 1, 2**24 - 1)
"""Candidates for bounds of strides of contiguous tensors."""
SKIPPED = ("num_warps", "num_stages", "num_ctas")
"""Launch arguments that are not parameters of a kernel."""


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, the number of its programs, and the values of its parameters."""

    kernel: str
    programs: Any
    arguments: Mapping[str, Any]
    tile: Mapping[str, int]


@dataclass
class LauncherWalker(Walker):
    """Runs operators of a file on tensors whose sizes are unknown."""

    arch: int = 90
    facts: list[Any] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    tile: Mapping[str, int] | None = None
    """A tile for all kernels, instead of those of the tables."""
    declined: Collection[str] = ()
    """Functions that return False: they choose kernels for one chip, which have no proofs."""
    widest: dict[str, int | None] = field(default_factory=dict)
    """Bounds of strides of contiguous tensors."""

    # --- statements ------------------------

    def choose(self, node: ast.If, env: Env) -> Returned | None:
        if isinstance(node.body[0], ast.Raise):  # Proofs are about calls that raise nothing.
            return None
        if ".stride(" not in ast.unparse(node.test):
            return super().choose(node, env)
        for one in node.body:  # The bound of the strides holds before and after it.
            if not ast.unparse(one).endswith(".contiguous()"):
                raise Beyond(ast.unparse(one))
        return None

    def assign(self, target: ast.expr, value: Any, env: Env) -> None:
        if isinstance(target, ast.Name):
            if isinstance(value, Tensor) and not value.name:
                value = replace(value, name=target.id)
            if isinstance(value, Num) and monomial(value.term) is None:
                total, value = value.term, Num(z3.Int(target.id))
                self.facts.append(value.term == total)
        super().assign(target, value, env)

    # --- values ------------------------

    def attribute(self, value: Any, name: str) -> Any:
        if not isinstance(value, Tensor):
            return super().attribute(value, name)
        if name == "shape":
            return tuple(size if isinstance(size, int) else Num(size) for size in value.shape)
        return Named(name) if name in ("dtype", "device") else Method(value, name)

    def binary(self, op: type[ast.AST], a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) and isinstance(b, Tensor) and op is ast.Add:
            if not same_shape(a.shape, b.shape):
                raise Beyond(f"a sum of tensors of different shapes: {self.text}")
            terms = [t for x in (a, b) for t in x.terms or (Summed(x, ()),)]
            return replace(a, name="", terms=tuple(terms))
        if not any(isinstance(x, Num) for x in (a, b)) or op in (ast.Is, ast.IsNot):
            return super().binary(op, a, b)
        x, y = (one.term if isinstance(one, Num) else z3.IntVal(one) for one in (a, b))
        match op:
            case ast.FloorDiv:
                found = quotient(x, y)
                return Num(x / y if found is None else found)
            case ast.Add | ast.Sub | ast.Mult:
                return Num(z3.simplify(super().binary(op, x, y)))
        raise Beyond(self.text)

    # --- calls ------------------------

    def call(self, called: Any, args: list[Any], named: Env) -> Any:
        if isinstance(called, Method):
            return self._method(called.value, called.name, args, named)
        match called, args:
            case Named("_arch"), _:
                return self.arch
            case Named("_layouts" | "bool"), _:
                return called
            case Named(path), _ if path in self.declined:
                return False
            case Named("_tile"), _ if self.tile is not None:
                return self.tile
            case Named("_tile"), [rows, arch]:
                return next(tile for chips, tile in rows if arch in chips or not chips)
            case Named("_cdiv"), [a, b]:
                if isinstance(a, int) and isinstance(b, int):
                    return -(-a // b)
                x, y = (one.term if isinstance(one, Num) else z3.IntVal(one) for one in (a, b))
                return Num(ceiling(x, y))
            case Named("_launch"), [kernel, programs, _, *rest]:
                return self._launch(kernel.path, programs, rest, named)
        return super().call(called, args, named)

    def _launch(self, kernel: str, programs: Any, args: list[Any], named: Env) -> None:
        number = programs.term if isinstance(programs, Num) else z3.IntVal(programs)
        tile = {n: x for n, x in named.items() if n in SKIPPED or n.isupper()}
        values = self.arguments(kernel, args, {n: x for n, x in named.items() if n not in SKIPPED})
        of = self.file.functions[kernel].args
        for parameter in (*of.args, *of.kwonlyargs):
            value = values.get(parameter.arg)
            if isinstance(value, Stride):
                annotation = parameter.annotation and ast.unparse(parameter.annotation)
                bits = 64 if annotation == "tl.int64" else 32
                values[parameter.arg] = replace(value, bits=bits)
        if missing := [p.arg for p in of.args if p.arg not in values]:
            raise Beyond(f"{kernel} without {', '.join(missing)}")
        numbers = {n: x for n, x in tile.items() if isinstance(x, int)}
        self.launches.append(Launch(kernel, z3.simplify(number), values, numbers))

    def _method(self, tensor: Any, name: str, args: list[Any], named: Env) -> Any:
        if not isinstance(tensor, Tensor):
            raise Beyond(self.text)
        match name:
            case "stride" if args:
                return Stride(tensor, args[0] % len(tensor.shape), 64)
            case "stride":
                return tuple(Stride(tensor, n, 64) for n in range(len(tensor.shape)))
            case "new_empty" | "new_zeros":
                shape = args[0] if isinstance(args[0], tuple) else (args[0],)
                sizes = tuple(one.term if isinstance(one, Num) else one for one in shape)
                dtype = named.get("dtype", Named(""))
                integer = dtype.path in ("torch.int32", "torch.int64")
                return Tensor("", sizes, integer, dict(self._strides(sizes)), name == "new_zeros")
            case "sum":
                axes = args[0] if isinstance(args[0], tuple) else (args[0],)
                kept = [s for n, s in enumerate(tensor.shape) if n not in axes]
                terms = (Summed(tensor, axes),)
                return replace(tensor, name="", shape=tuple(kept), terms=terms)
            case "to" | "float" | "bfloat16" | "contiguous":
                return tensor
        raise Beyond(self.text)

    def _strides(self, sizes: Sequence[Any]) -> Iterator[tuple[int, int]]:
        """Yield the dimensions of a contiguous tensor with bounds of their strides."""
        for dim in range(len(sizes)):
            stride = prod(sizes[dim + 1 :], start=z3.IntVal(1))
            if z3.is_int_value(z3.simplify(stride)):
                yield dim, z3.simplify(stride).as_long()
                continue
            key = z3.simplify(stride, som=True).sexpr()
            if key not in self.widest:
                holds = (most for most in DENSE if self._holds(stride <= most))
                self.widest[key] = next(holds, None)
            if (most := self.widest[key]) is not None:
                yield dim, most

    def _holds(self, claim: Any) -> bool:
        solver = z3.SimpleSolver()
        solver.set("timeout", 1000)
        solver.add(*self.facts, z3.Not(claim))
        return bool(solver.check() == z3.unsat)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """True if two shapes have equal sizes."""
    return len(a) == len(b) and all(z3.simplify(x - y).eq(z3.IntVal(0)) for x, y in terms(a, b))


def terms(a: Sequence[Any], b: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of sizes as terms."""
    for x, y in zip(a, b, strict=True):
        yield tuple(z3.IntVal(one) if isinstance(one, int) else one for one in (x, y))


# --- checks of arguments ------------------------


def shapes(file: File, functions: Sequence[str]) -> dict[str, ast.expr]:
    """Return the shapes that functions require of their arguments: `if x.shape != (...)`."""
    found: dict[str, ast.expr] = {}
    for node in _compares(file, functions):
        match node:
            case ast.Compare(
                left=ast.Attribute(value=ast.Name(id=name), attr="shape"),
                ops=[ast.NotEq()],
                comparators=[ast.Tuple() as shape],
            ):
                found[name] = shape
    return found


def stride_bounds(file: File, functions: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the bounds that functions check: the tensor, the dimension and the largest stride.

    A check is `max(...) >= bound` of `x.stride(n)` for tensors, or of `x.stride()[-2:]`.
    """
    found: list[tuple[str, int, int]] = []
    for node in _compares(file, functions):
        if not isinstance(node.ops[0], ast.GtE) or ".stride(" not in ast.unparse(node.left):
            continue
        bound = Walker(file).value(node.comparators[0], {}) - 1
        over = [g for g in ast.walk(node.left) if isinstance(g, ast.comprehension)]
        names = {
            g.target.id: [e.id for e in g.iter.elts if isinstance(e, ast.Name)]
            for g in over
            if isinstance(g.target, ast.Name) and isinstance(g.iter, ast.Tuple)
        }
        for name, dim in _strides(node.left):
            found += [(one, dim, bound) for one in names.get(name, [name])]
    return found


def _strides(node: ast.expr) -> Iterator[tuple[str, int]]:
    """Yield the name and the dimension of each stride in an expression."""
    for one in ast.walk(node):
        match one:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="stride"), args=[dim]):
                yield name, int(ast.literal_eval(dim))
            case ast.Subscript(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="stride")),
                slice=ast.Slice(lower=ast.expr() as lower),
            ):
                yield from ((name, dim) for dim in range(int(ast.literal_eval(lower)), 0))


def _compares(file: File, functions: Sequence[str]) -> Iterator[ast.Compare]:
    for name in functions:
        for node in ast.walk(file.functions[name]) if name in file.functions else ():
            if isinstance(node, ast.Compare):
                yield node
