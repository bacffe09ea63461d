"""Modifications as a PyTorch user would write them: Python source, printed from the trees that the user of kgen wrote.

It goes through the `torch` column of the function table.
"""

from __future__ import annotations

import keyword
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, measured, reads, substitute, variables
from kgen.expr.spelling import ATOM
from kgen.kernels.attention.bench.workload import Workload
from kgen.verify.evaluate import evaluate

Mod = Callable[..., Tensor]

# How far an index goes: reads of what is as long need no guard.
_BELOW = {"b": "B", "h": "HQ", "q_idx": "SQ", "kv_idx": "SK"}


def python_source(node: Node, workload: Workload) -> str:
    """A tree as a Python expression over tensors `score b h q_idx kv_idx`, `torch` and the buffers' names."""
    return _printed(node, workload)[0]


def _printed(node: Node, workload: Workload) -> tuple[str, int]:
    """The text and how tightly it binds."""
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
        # The right operand is bracketed at equal strength too: a - (b - c).
        tight = binds > spelling.operand or (binds == spelling.operand and position == 0)
        operands.append(text if tight else f"({text})")
    return spelling.form.format(*operands), spelling.binds


def _depends(node: Node) -> bool:
    """Whether the value is a tensor: it moves with the position, or reads a buffer."""
    return bool(variables(node) & {"score", "b", "h", "q_idx", "kv_idx"} or reads(node))


def _literal(value: int | float | bool) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "torch.inf" if value > 0 else "(-torch.inf)"
    return f"({value!r})" if not isinstance(value, bool) and value < 0 else repr(value)


def _extremum(node: Call, workload: Workload) -> str:
    """Nested minima or maxima; a number becomes a bound of `clamp`, for `torch.minimum` wants tensors."""
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
    """A tree as the definition of a function for FlexAttention, which finds `torch` and the buffers by their names."""
    names = [b.name for b in workload.problem.buffers]
    if bad := [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]:
        raise ValueError(f"buffers {bad} cannot be named in Python")
    arguments = ("score, " if score else "") + "b, h, q_idx, kv_idx"
    return f"def {name}({arguments}):\n    return {python_source(node, workload)}\n"


def modification(node: Node, workload: Workload, score: bool) -> Mod:
    """A tree as a function for FlexAttention, buffers in its closure."""
    source = textwrap.indent(modification_source(node, workload, "_modification", score), "    ")
    names = [b.name for b in workload.problem.buffers]
    scope: dict[str, Any] = {}
    # Our own printed text.
    exec(f"def make({', '.join(['torch', *names])}):\n{source}    return _modification\n", scope)
    made: Mod = scope["make"](torch, *(workload.buffers[name] for name in names))
    return made


def mods(workload: Workload) -> tuple[Mod | None, Mod | None]:
    problem = workload.problem
    # Peers count queries from zero.
    q_idx = Var("q_idx", Type.INT)
    moved: dict[Node, Node] = {}
    if workload.first:
        moved[q_idx] = Call("add", (q_idx, Const(workload.first, Type.INT)), Type.INT)
    score_mod, mask_mod = (
        None if tree is None else substitute(tree, moved) for tree in (problem.score_mod, problem.mask_mod)
    )
    return (
        None if score_mod is None else modification(score_mod, workload, score=True),
        None if mask_mod is None else modification(mask_mod, workload, score=False),
    )
