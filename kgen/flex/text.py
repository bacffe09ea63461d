"""Trees as text of a spec. Shared and long parts get the user's names on lines of their own."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Collection, Mapping

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Var, children, distinct, substitute
from kgen.expr.printed_size import MAX_NODES, times_printed
from kgen.expr.unparse import show

WIDTH = 100
INDICES = ("b", "h", "q_idx", "kv_idx", "score", "inf")


def size(node: Node) -> int:
    """Return the number of terms of a tree, with shared parts counted as often as kernels print
    them.

    Counting stops at the limit of a spec.
    """
    return _sizes(node)[node]


def _sizes(node: Node) -> dict[Node, int]:
    sizes: dict[Node, int] = {}
    for part in distinct(node):
        times = times_printed(part.fn) if isinstance(part, Call) else (1,) * len(children(part))
        inner = zip(children(part), (*times, *(1,) * len(children(part))), strict=False)
        sizes[part] = min(1 + sum(n * sizes[child] for child, n in inner), MAX_NODES + 1)
    return sizes


def written(node: Node, labels: Mapping[Node, str], taken: Collection[str]) -> str:
    """Return the text of a tree: lines that define names, then the value."""
    uses = Counter(child for part in distinct(node) for child in children(part))
    sizes = _sizes(node)
    shared = [
        p
        for p in distinct(node)
        if _named(p) and p != node and uses[p] > 1 and (p in labels or sizes[p] > 4)
    ]
    lines, last = _lines(node, shared, labels, taken)
    if len(last) > WIDTH:
        shared = [
            p for p in distinct(node) if p != node and (p in shared or (p in labels and _named(p)))
        ]
        lines, last = _lines(node, shared, labels, taken)
    return "\n".join([*lines, last])


def _named(node: Node) -> bool:
    """True if a name for the node helps the reader."""
    return bool(children(node)) and not (
        isinstance(node, Call) and all(isinstance(a, Const) for a in node.args)
    )


def _lines(
    node: Node, shared: list[Node], labels: Mapping[Node, str], taken: Collection[str]
) -> tuple[list[str], str]:
    names: dict[Node, Node] = {}
    used = {*taken, *INDICES}
    lines = []
    for part in shared:
        name = _free(labels.get(part, "x"), used)
        used.add(name)
        lines.append(f"{name} = {show(substitute(part, names))}")
        names[part] = Var(name, part.type)
    return lines, show(substitute(node, names))


def _free(label: str, used: Collection[str]) -> str:
    """Return a name that a line may define."""
    name = label.strip("_") or "x"
    while "__" in name:
        name = name.replace("__", "_")
    if not name.isascii() or keyword.iskeyword(name) or not name[:1].isalpha():
        name = "x"
    if name not in used and name not in TABLE:
        return name
    number = 2
    while f"{name}_{number}" in used:
        number += 1
    return f"{name}_{number}"
