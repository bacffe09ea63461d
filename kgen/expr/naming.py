"""Names of values that kernels compute: the user's name for a value, or a name that describes it.

A short integer or bool is spelled out: `SK - SQ` is `sk_minus_sq`, `kv_idx < prefix` is
`kv_lt_prefix`. Other names state the result to which the value belongs, its axis, and the
operation: `core_tanh`, `bias_kv`, `mask_q_sum`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Set
from itertools import islice

from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, measured, variables

_LEAVES = 3
_LONGEST = 28
FEW = 9
"""Largest number of values that share a name and differ in a number."""
_MOST_WORDS = 16
"""More words than a name of `_LONGEST` characters can have."""
_INFIX = {"add": "plus", "sub": "minus", "mul": "times", "floordiv": "div"}
_INFIX |= {fn: fn for fn in ("mod", "lt", "le", "gt", "ge", "eq", "ne", "and", "or")}
_PREFIX = {"neg": "minus", "not": "not", "abs": "abs"}
_RESULTS = {
    "add": "sum",
    "sub": "sum",
    "mul": "product",
    "div": "quotient",
    "floordiv": "block",
    "mod": "rest",
}
_CHOICES = {"where": "choice", "min": "least", "max": "most", "float": "real", "int": "integer"}


def candidates(
    node: Node, role: str, axes: tuple[str, ...], bound: Mapping[Node, str], *, whole: bool
) -> Iterator[str]:
    """Yield names for a value, best first: the `whole` result `role` or a part of it, over `axes`
    of a tile.
    """
    if isinstance(node, Read):
        yield _of_read(node)
        return
    if node.type is not Type.FLOAT and (aloud := _aloud(node, bound)):
        yield aloud
    heads = [name for name in ("b", "h") if name in variables(node)]
    stem = "_".join([role, *(axes if len(axes) == 1 else () if axes else heads)])
    if whole or stem != role or not isinstance(node, Call):
        yield stem
    if isinstance(node, Call) and node.fn in ("mul", "div") and not axes:
        yield f"{stem}_scale"
    elif isinstance(node, Call):
        yield f"{stem}_{_RESULTS.get(node.fn) or _CHOICES.get(node.fn) or node.fn}"


def numbered(name: str, count: int) -> str:
    """Return one of several values of a name. Beyond nine, initials replace the words, because the
    number identifies the value.
    """
    return f"{name if count <= FEW else ''.join(word[:1] for word in name.split('_'))}_{count}"


def is_taken(name: str, taken: Set[str]) -> bool:
    """True for a name in `taken`, where `#` stands for a number."""
    stem, _, number = name.rpartition("_")
    return name in taken or (number.isdecimal() and int(number) > FEW and f"{stem}_#" in taken)


def alike(node: Node) -> Hashable:
    """Return a key that is equal for values which differ only in the order of operands."""
    if isinstance(node, Read):
        return node.buffer, tuple(map(alike, node.indices))
    if not isinstance(node, Call):
        return node
    if node.fn in ("add", "sub", "neg"):
        return "sum", frozenset(Counter(_signed(node, 1)).items())
    if node.fn in ("mul", "and", "or"):
        return node.fn, frozenset(Counter(map(alike, _chain(node, node.fn))).items())
    return node.fn, tuple(map(alike, node.args))


def _signed(node: Node, sign: int) -> Iterator[tuple[int, Hashable]]:
    """Yield the terms of a sum with their signs."""
    match node:
        case Call("add" | "sub", (a, b)):
            yield from _signed(a, sign)
            yield from _signed(b, sign if node.fn == "add" else -sign)
        case Call("neg", (a,)):
            yield from _signed(a, -sign)
        case _:
            yield sign, alike(node)


def _chain(node: Node, fn: str) -> Iterator[Node]:
    if isinstance(node, Call) and node.fn == fn:
        for part in node.args:
            yield from _chain(part, fn)
    else:
        yield node


def _of_read(node: Read) -> str:
    indices = [i.name.removesuffix("_idx") for i in node.indices if isinstance(i, Var)]
    if len(indices) < len(node.indices):
        return f"{node.buffer}_at"
    # Without indices, the buffer's name is that of a pointer in kernels.
    return "_".join([node.buffer, *(indices or ["value"])])


def _aloud(node: Node, bound: Mapping[Node, str]) -> str:
    """Return a short expression in words; empty if it is too long."""
    # Stop early for long expressions, because this is called for each node of a deep tree.
    words = list(islice(_words(node, bound), _MOST_WORDS))
    name = "_".join(words)
    leaves = len(words) - sum(word in _SPOKEN for word in words)
    fits = leaves <= _LEAVES and len(name) <= _LONGEST and not name[:1].isdigit()
    return name if fits and "" not in words else ""


_SPOKEN = frozenset({*_INFIX.values(), *_PREFIX.values()})


def _words(node: Node, bound: Mapping[Node, str]) -> Iterator[str]:
    """Yield the words of an expression; an empty word for a node that has none."""
    if node in bound:
        yield bound[node]
    elif isinstance(node, Var):
        length = measured(node.name)
        yield f"len_{length[0]}".lower() if length else node.name.removesuffix("_idx").lower()
    elif isinstance(node, Const):
        yield str(node.value) if node.type is Type.INT and node.value >= 0 else ""
    elif isinstance(node, Call) and node.fn in _INFIX:
        yield from _words(node.args[0], bound)
        yield _INFIX[node.fn]
        yield from _words(node.args[1], bound)
    elif isinstance(node, Call) and node.fn in _PREFIX:
        yield _PREFIX[node.fn]
        yield from _words(node.args[0], bound)
    else:
        yield ""
