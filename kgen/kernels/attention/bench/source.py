"""Print the expressions of a spec as Python source that a FlexAttention user would write.

The spellings are the `torch` column of the function table.
"""

from __future__ import annotations

import keyword
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    variables,
)
from kgen.expr.spelling import ATOM
from kgen.kernels.attention.bench.workload import Workload
from kgen.verify.evaluate import evaluate

Mod = Callable[..., Tensor]

# The extent of each index. A read of a dimension of this extent needs no guard.
_BELOW = {"b": "B", "h": "HQ", "q_idx": "SQ", "kv_idx": "SK"}


def python_source(node: Node, workload: Workload) -> str:
    """Return a tree as a Python expression over `score b h q_idx kv_idx`, `torch` and the
    buffers.
    """
    return _printed(node, workload)[0]


def _printed(node: Node, workload: Workload) -> tuple[str, int]:
    """Return the text and its binding strength."""
    if isinstance(node, Read):
        return _read(node, workload), ATOM
    known = workload.sizes | dict(workload.params)
    if isinstance(node, Var) and (length := measured(node.name)):
        return str(workload.buffers[length[0]].shape[length[1]]), ATOM
    if isinstance(node, Var) and node.name not in known:
        return node.name, ATOM
    if isinstance(node, Const | Var) or not _depends(node):
        return _literal(evaluate(node, known | dict(workload.buffers), torch).item()), ATOM
    assert isinstance(node, Call)
    if node.fn in ("min", "max"):
        return _extremum(node, workload), ATOM
    spelling = TABLE[node.fn].spelled["torch"]
    operands = []
    for position, arg in enumerate(node.args):
        text, binds = _printed(arg, workload)
        # The right operand needs brackets at equal strength: a - (b - c).
        tight = binds > spelling.operand or (binds == spelling.operand and position == 0)
        operands.append(text if tight else f"({text})")
    return spelling.form.format(*operands), spelling.binds


def _depends(node: Node) -> bool:
    """Return True if the value is a tensor: it depends on the position or reads a buffer."""
    return bool(variables(node) & {"score", "b", "h", "q_idx", "kv_idx"} or reads(node))


def _literal(value: int | float | bool) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "torch.inf" if value > 0 else "(-torch.inf)"
    return f"({value!r})" if not isinstance(value, bool) and value < 0 else repr(value)


def _extremum(node: Call, workload: Workload) -> str:
    """Print nested minima or maxima. A number becomes a bound of `clamp`, since `torch.minimum`
    takes only tensors."""
    moving = sorted(node.args, key=lambda arg: not _depends(arg))
    text = _printed(moving[0], workload)[0]
    for arg in moving[1:]:
        other = _printed(arg, workload)[0]
        if _depends(arg):
            text = f"torch.{node.fn}imum({text}, {other})"
        else:
            text = f"torch.clamp({text}, {'max' if node.fn == 'min' else 'min'}={other})"
    return text


def _read(node: Read, workload: Workload) -> str:
    declared = next(b for b in workload.problem.buffers if b.name == node.buffer)
    indices, guards = [], []
    for index, size in zip(node.indices, workload.buffers[node.buffer].shape, strict=True):
        text, binds = _printed(index, workload)
        below = workload.sizes.get(_BELOW.get(index.name, "")) if isinstance(index, Var) else None
        if below is None or below > size:
            if not _depends(index):
                text = f"torch.full_like(b, {text})"
            elif binds < ATOM:
                text = f"({text})"
            guards += [f"({text} >= 0)", f"({text} < {size})"]
            text = f"torch.clamp({text}, 0, {size - 1})"
        indices.append(text)
    value = f"{node.buffer}[{', '.join(indices)}]" if indices else node.buffer
    if node.type is Type.FLOAT and declared.dtype != "fp32":
        value = f"{value}.to(torch.float32)"
    nothing = "False" if node.type is Type.BOOL else "0"
    return f"torch.where({' & '.join(guards)}, {value}, {nothing})" if guards else value


def modification_source(node: Node, workload: Workload, name: str, score: bool) -> str:
    """Return a tree as the source of a function for FlexAttention.

    It expects `torch` and the buffers as global names. Raise `ValueError` for buffers that Python
    cannot name.
    """
    names = [b.name for b in workload.problem.buffers]
    if bad := [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]:
        raise ValueError(f"buffers {bad} cannot be named in Python")
    arguments = ("score, " if score else "") + "b, h, q_idx, kv_idx"
    return f"def {name}({arguments}):\n    return {python_source(node, workload)}\n"


def modification(node: Node, workload: Workload, score: bool) -> Mod:
    """Return a tree as a function for FlexAttention, with the buffers in its closure."""
    source = textwrap.indent(modification_source(node, workload, "_modification", score), "    ")
    names = [b.name for b in workload.problem.buffers]
    scope: dict[str, Any] = {}
    # The source is printed above, not user input.
    exec(f"def make({', '.join(['torch', *names])}):\n{source}    return _modification\n", scope)
    made: Mod = scope["make"](torch, *(workload.buffers[name] for name in names))
    return made


def mods(workload: Workload) -> tuple[Mod | None, Mod | None]:
    problem = workload.problem
    # Peers count queries from zero, so their position is shifted.
    q_idx = Var("q_idx", Type.INT)
    moved: dict[Node, Node] = {}
    if workload.first:
        moved[q_idx] = Call("add", (q_idx, Const(workload.first, Type.INT)), Type.INT)
    score_mod, mask_mod = (
        None if tree is None else substitute(tree, moved)
        for tree in (problem.score_mod, problem.mask_mod)
    )
    return (
        None if score_mod is None else modification(score_mod, workload, score=True),
        None if mask_mod is None else modification(mask_mod, workload, score=False),
    )
