"""Printer of a spec as FlexAttention code."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.algebra import call
from kgen.expr.functions import TABLE
from kgen.expr.nodes import (
    Call,
    Const,
    Node,
    Read,
    Type,
    Var,
    measured,
    reads,
    substitute,
    transform,
    variables,
    walk,
)
from kgen.expr.softmax_form import KV_IDX, Q_IDX, SCORE
from kgen.expr.spelling import ADD, AND, ATOM, BITAND, BITOR, COMPARE, MUL, NOT, OR, UNARY, Spelling
from kgen.expr.unparse import show
from kgen.spec.load import Loaded

PAIR = ("b", "h", "q_idx", "kv_idx")
SIZES = {"B": "B", "HQ": "HQ", "HKV": "HKV", "SQ": "SQ", "SK": "SK"}
SPELLED: dict[str, Spelling] = {
    "and": Spelling("{0} & {1}", BITAND, BITAND),
    "or": Spelling("{0} | {1}", BITOR, BITOR),
    "mod": Spelling("{0} % {1}", MUL, MUL),
    "floordiv": Spelling("{0} // {1}", MUL, MUL),
    "sub": Spelling("{0} - {1}", ADD, ADD),
    "clamp": Spelling("torch.clamp({0}, {1}, {2})"),
    "int": Spelling("({0}).to(torch.int32)"),
}
"""Spellings that differ from the spelling in a kernel's reference."""
HOST: dict[str, Spelling] = {
    "and": Spelling("{0} and {1}", AND, AND),
    "or": Spelling("{0} or {1}", OR, OR),
    "not": Spelling("not {0}", NOT, NOT),
    "min": Spelling("min({0}, {1})"),
    "max": Spelling("max({0}, {1})"),
    "clamp": Spelling("min(max({0}, {1}), {2})"),
    "abs": Spelling("abs({0})"),
    "float": Spelling("float({0})"),
    "int": Spelling("int({0})"),
    "invert": Spelling("-1 - {0}", ADD, MUL),  # torch.compile does not support `~` of a size
}
"""Spellings for Python numbers, such as sizes."""


def flex_code(loaded: Loaded) -> str:
    """Return the source of functions for `flex_attention`.

    Raise `KgenError` if the kernel is not attention.
    """
    if not hasattr(loaded.spec, "score_mod"):
        message = "only attention specs have FlexAttention code"
        raise KgenError(
            Diagnostic("usage", message, loaded.path.as_posix(), 1, 1, hint="leave out `--flex`")
        )
    loaded = _from_zero(loaded)
    trees, spec = loaded.trees, loaded.spec
    constants, given = _constants(loaded), _given(loaded)
    lines = [
        "import torch",
        "from torch.nn.attention.flex_attention import create_block_mask, flex_attention",
        "",
    ]
    lines += [*constants, ""] * bool(constants)
    apart = [""] * (not given and bool(trees))
    body = list(_mods(trees.items()))
    if given:
        lines += [
            "",
            f"def {spec.name}_mods({', '.join(given)}):",
            *_described(loaded),
            *map(_indented, body),
        ]
        made = ", ".join(trees)
        lines += [f"    return {made}", ""] if trees else []
    else:
        lines += [
            line
            for part in body
            for line in ([*apart, part] if part.startswith("def ") else [part])
        ] + apart
    lines += [*_call(loaded, given)]
    return "\n".join(lines).rstrip() + "\n"


def mod_functions(loaded: Loaded) -> tuple[list[str], list[str]]:
    """Return the lines of `mods(...)`, which returns score_mod and mask_mod (or None), and its
    arguments.
    """
    loaded = _from_zero(loaded)
    given, trees = _given(loaded), loaded.trees
    lines = [
        *_constants(loaded),
        *["", ""] * bool(_constants(loaded)),
        f"def mods({', '.join(given)}):",
    ]
    lines += map(_indented, ["", *_mods(trees.items())] if len(trees) > 1 else _mods(trees.items()))
    found = [field if field in trees else "None" for field in ("score_mod", "mask_mod")]
    return [*lines, f"    return {', '.join(found)}"], given


def _from_zero(loaded: Loaded) -> Loaded:
    """Move query positions and key counts into the functions.

    FlexAttention has no arguments for them: its queries count from zero, and all sequences have the
    same keys.
    """
    spec, trees = loaded.spec, dict(loaded.trees)
    end: Node = (
        Read("kv_lens", (Var("b", Type.INT),), Type.INT) if spec.per_batch else Var("SK", Type.INT)
    )
    if spec.aligned_to_end:
        at = call("add", Q_IDX, call("sub", end, Var("SQ", Type.INT)))
        trees = {field: substitute(tree, {Q_IDX: at}) for field, tree in trees.items()}
    if spec.per_batch:
        there = call("lt", KV_IDX, end)
        trees["mask_mod"] = call("and", there, trees["mask_mod"]) if "mask_mod" in trees else there
    return replace(
        loaded,
        trees={field: transform(tree, _without_idle_detach) for field, tree in trees.items()},
    )


def _without_idle_detach(node: Node) -> Node:
    """Remove `detach(x)` if x cannot have a gradient: sizes and numbers are no tensors in
    PyTorch.
    """
    if not isinstance(node, Call) or node.fn != "detach":
        return node
    has_gradient = SCORE in walk(node) or any(True for _ in reads(node))
    return node if has_gradient else node.args[0]


def _constants(loaded: Loaded) -> list[str]:
    return [f"{n} = {p.value!r}" for n, p in loaded.spec.params.items() if p.value is not None]


def _given(loaded: Loaded) -> list[str]:
    """Return the names that the functions capture: buffers, run-time parameters and sizes."""
    spec, trees = loaded.spec, loaded.trees
    used = {name for tree in trees.values() for name in variables(tree)}
    own = dict.fromkeys(
        r.buffer for tree in trees.values() for r in reads(tree) if r.buffer not in spec.buffers
    )
    runtime = (n for n, p in spec.params.items() if p.value is None)
    return [*spec.buffers, *own, *runtime, *(name for name in SIZES if name in used)]


def _described(loaded: Loaded) -> Iterator[str]:
    buffers = loaded.spec.buffers
    if not buffers:
        return
    texts = [f"{n} [{', '.join(map(str, b.shape))}] of {b.dtype}" for n, b in buffers.items()]
    yield f'    """{"; ".join(texts)}. A spec reads zero outside of them."""'
    yield ""


def _indented(line: str) -> str:
    return f"    {line}" if line else ""


def _mods(trees: Iterable[tuple[str, Node]]) -> Iterator[str]:
    for field, tree in trees:
        names = ("score", *PAIR) if field == "score_mod" else PAIR
        yield f"def {field}({', '.join(names)}):"
        yield f"    return {_of_pair(field, tree)}"
        yield ""


def _of_pair(field: str, tree: Node) -> str:
    """Print the result of a mod as a tensor, even if it is the same for every pair."""
    if not _is_host(tree):
        return _printed(tree)
    like = "score" if field == "score_mod" else "q_idx"
    return (
        f"torch.full_like({like}, {_printed(tree)}{', dtype=torch.bool' * (field == 'mask_mod')})"
    )


def _call(loaded: Loaded, given: list[str]) -> Iterator[str]:
    spec, trees = loaded.spec, loaded.trees
    if given and trees:
        yield ""
        yield f"{', '.join(trees)} = {spec.name}_mods({', '.join(given)})"
    arguments = ["q", "k", "v"] + ["score_mod=score_mod"] * ("score_mod" in trees)
    if "mask_mod" in trees:
        sizes = (
            "B, HQ, SQ, SK" if variables(trees["mask_mod"]) & {"b", "h"} else "None, None, SQ, SK"
        )
        yield f"block_mask = create_block_mask(mask_mod, {sizes}, device=q.device)"
        arguments.append("block_mask=block_mask")
    arguments += ["enable_gqa=True"] * (spec.gqa != 1)
    yield f"out = flex_attention({', '.join(arguments)})"
    without = {
        "sinks": spec.sinks,
        "packed sequences": spec.varlen,
        "pages": spec.paged_kv is not None,
    }
    for said in (words for words, there in without.items() if there):
        yield f"# Without {said}: FlexAttention has no such argument."


# --- the printer ------------------------


def printed_over(tree: Node, tensors: Collection[str]) -> str:
    """Return PyTorch code of a tree. The variables with the names `tensors` are tensors."""
    named = (node for node in walk(tree) if isinstance(node, Var) and node.name in tensors)
    return _printed(substitute(tree, {node: Read(node.name, (), node.type) for node in named}))


def _printed(node: Node, context: int = 0) -> str:
    text, binds = _form(node)
    return f"({text})" if binds < context else text


def _is_host(node: Node) -> bool:
    """True if a node is a Python number: numbers, sizes and parameters, joined by Python
    operators.
    """
    if reads(node) or variables(node) & {"score", *PAIR}:
        return False
    return not any(
        isinstance(n, Call) and n.fn not in HOST and TABLE[n.fn].callable for n in walk(node)
    )


def _form(node: Node) -> tuple[str, int]:
    match node:
        case Var(name="inf"):
            return 'float("inf")', ATOM
        case Var(name=name) if length := measured(name):
            return f"{length[0]}.shape[{length[1]}]", ATOM
        case Const() | Var():
            return show(node), ATOM if not show(node).startswith("-") else UNARY
        case Read(indices=()):
            return node.buffer, ATOM
        case Read():
            return f"{node.buffer}[{', '.join(_printed(i) for i in node.indices)}]", ATOM
    assert isinstance(node, Call)
    if _is_host(node) and node.fn in HOST:
        return _spelled(node, HOST[node.fn])
    match node.fn, node.args:
        case ("where", (condition, a, b)):
            return f"torch.where({_tensor(condition)}, {_printed(a)}, {_printed(b)})", ATOM
        case (("min" | "max") as fn, (a, b)):
            return _bounded(fn, a, b)
        case ("clamp", (x, low, high)) if not (isinstance(low, Const) and isinstance(high, Const)):
            return _form(Call("min", (Call("max", (x, low), node.type), high), node.type))
        case (fn, args) if TABLE[fn].result is Type.FLOAT and TABLE[fn].callable and fn != "float":
            module = "torch.nn.functional" if fn in ("silu", "gelu") else "torch"
            return f"{module}.{fn}({', '.join(map(_tensor, args))})", ATOM
    return _spelled(node, SPELLED.get(node.fn, TABLE[node.fn].spelled["torch"]))


def _spelled(node: Call, spelling: Spelling) -> tuple[str, int]:
    is_infix = spelling.binds != ATOM
    brackets = max(spelling.operand, BITOR) if spelling.binds == COMPARE else spelling.operand
    operands = [_printed(a, brackets + int(is_infix and i > 0)) for i, a in enumerate(node.args)]
    return spelling.form.format(*operands), spelling.binds


def _tensor(node: Node) -> str:
    """Print a node as a tensor argument: a real number or a truth value."""
    if not _is_host(node):
        return _printed(node)
    number = _printed(node) if node.type is not Type.INT else f"float({_printed(node)})"
    return f"torch.tensor({number})"


def _bounded(fn: str, a: Node, b: Node) -> tuple[str, int]:
    """Print `min` or `max` of two nodes. `torch.minimum` accepts no numbers, `clamp` does."""
    if _is_host(a) and _is_host(b):
        return f"{fn}({_printed(a)}, {_printed(b)})", ATOM
    for value, bound in ((a, b), (b, a)):
        if _is_host(bound):
            return (
                (
                    f"torch.clamp({_printed(value)}, "
                    f"{'max' if fn == 'min' else 'min'}={_printed(bound)})"
                ),
                ATOM,
            )
    return f"torch.{'minimum' if fn == 'min' else 'maximum'}({_printed(a)}, {_printed(b)})", ATOM
