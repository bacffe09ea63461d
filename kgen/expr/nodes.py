"""The expression tree: immutable, typed, compared and hashed by value.

There are four kinds of nodes. Operators are calls: `a + b` is `Call("add", (a, b))`. A row of
`functions.TABLE` defines how `add` is typed, differentiated, evaluated and spelled.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

FIRST_AT_LEAST = ".first_at_least"
"""Suffix that turns the name of a sorted buffer into a search:
`Read("doc.first_at_least", (value,))` is the first position whose element is at least `value`, or
the length if there is none.
"""
LENGTH_OF = ".size_"
"""Separator of buffer and axis in the name of a length: `Var("doc.size_0")` is `len(doc)`. Names of
specs have no dot.
"""


class Type(enum.Enum):
    """The type of a value: an integer, a real number (fp32), or a bool.

    Integers have 32 bits, or 64 if an int64 buffer is read.
    """

    INT = "int"
    LONG = "long"
    FLOAT = "float"
    BOOL = "bool"

    @property
    def integral(self) -> bool:
        """True for integers of either width."""
        return self in (Type.INT, Type.LONG)

    def __repr__(self) -> str:
        return self.value


class _HashedOnce:
    """A base of nodes that caches the hash: without it, every pass would be quadratic, because
    trees are keys.

    The hash differs between processes, so it is not pickled.
    """

    def __hash__(self) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(self.__dict__.values()))
            self.__dict__["_hash"] = known
        return int(known)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}


@dataclass(frozen=True)
class Const:
    """A literal."""

    value: int | float | bool
    type: Type


@dataclass(frozen=True)
class Var:
    """A named scalar: `score`, an index (`b`, `h`, `q_idx`, `kv_idx`), a size (`SQ`), or a
    parameter.
    """

    name: str
    type: Type


@dataclass(frozen=True)
class Read(_HashedOnce):
    """An element of a declared buffer, `buffer[i, j]`.

    It is zero out of range; indices do not wrap.
    """

    __hash__ = _HashedOnce.__hash__

    buffer: str
    indices: tuple[Node, ...]
    type: Type


@dataclass(frozen=True)
class Call(_HashedOnce):
    """A function or operator of the table, applied to its arguments."""

    __hash__ = _HashedOnce.__hash__

    fn: str
    args: tuple[Node, ...]
    type: Type


Node = Const | Var | Read | Call


def children(node: Node) -> tuple[Node, ...]:
    """Return the direct operands of a node, left to right."""
    if isinstance(node, Call):
        return node.args
    if isinstance(node, Read):
        return node.indices
    return ()


def walk(node: Node) -> Iterator[Node]:
    """Yield every node of the tree, operands first. Shared nodes are yielded once per use."""
    for child in children(node):
        yield from walk(child)
    yield node


def rebuild(node: Node, operands: tuple[Node, ...]) -> Node:
    """Return the node with other operands."""
    if isinstance(node, Call):
        return Call(node.fn, operands, node.type)
    if isinstance(node, Read):
        return Read(node.buffer, operands, node.type)
    return node


def transform(node: Node, rewrite: Callable[[Node], Node]) -> Node:
    """Rewrite bottom-up: operands first, then the node. Shared nodes are rewritten once."""
    done: dict[Node, Node] = {}

    def visit(part: Node) -> Node:
        if part not in done:
            done[part] = rewrite(rebuild(part, tuple(visit(child) for child in children(part))))
        return done[part]

    return visit(node)


def substitute(node: Node, replacements: Mapping[Node, Node]) -> Node:
    """Replace whole subtrees, outermost first."""
    done: dict[Node, Node] = dict(replacements)

    def visit(part: Node) -> Node:
        if part not in done:
            done[part] = rebuild(part, tuple(visit(child) for child in children(part)))
        return done[part]

    return visit(node)


def distinct(node: Node) -> Iterator[Node]:
    """Yield each distinct node of the tree once, operands first."""
    seen: set[Node] = set()

    def visit(part: Node) -> Iterator[Node]:
        if part not in seen:
            for child in children(part):
                yield from visit(child)
            seen.add(part)
            yield part

    return visit(node)


@lru_cache(2**14)
def variables(node: Node) -> frozenset[str]:
    """Return the names of the scalars that the value depends on, including those in indices of
    reads.
    """
    return frozenset(n.name for n in distinct(node) if isinstance(n, Var))


def reads(node: Node) -> tuple[Read, ...]:
    """Return the distinct buffer reads, in order of first appearance."""
    return tuple(n for n in distinct(node) if isinstance(n, Read))


def length_of(buffer: str, axis: int) -> Var:
    """Return the length of an axis that only the tensor of a call determines."""
    return Var(f"{buffer}{LENGTH_OF}{axis}", Type.INT)


def measured(name: str) -> tuple[str, int] | None:
    """Return the buffer and the axis of a length, from its name; None for any other name."""
    buffer, found, axis = name.partition(LENGTH_OF)
    return (buffer, int(axis)) if found else None


def buffers_of(node: Node) -> tuple[str, ...]:
    """Return the buffers that a value depends on, by an element or a length, in order of first
    appearance.
    """
    found: dict[str, None] = {}
    for part in distinct(node):
        if isinstance(part, Read):
            found[part.buffer.removesuffix(FIRST_AT_LEAST)] = None
        elif isinstance(part, Var) and (length := measured(part.name)):
            found[length[0]] = None
    return tuple(found)
