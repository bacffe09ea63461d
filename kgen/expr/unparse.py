"""Print a tree in the syntax of specs, with minimal brackets: `parse_expression(show(tree))`
returns the tree.
"""

from __future__ import annotations

from kgen.expr.functions import TABLE
from kgen.expr.nodes import FIRST_AT_LEAST, Const, Node, Read, Var, measured
from kgen.expr.spelling import ATOM, UNARY


def show(node: Node, context: int = 0) -> str:
    """Return the text of a tree, in brackets if it binds less tightly than `context`."""
    text, binds = _form(node)
    return f"({text})" if binds < context else text


def _form(node: Node) -> tuple[str, int]:
    if isinstance(node, Const):
        text = repr(node.value)
        return text, UNARY if text.startswith("-") else ATOM
    if isinstance(node, Var):
        return _name(node.name), ATOM
    if isinstance(node, Read) and node.buffer.endswith(FIRST_AT_LEAST):
        buffer, *_ = node.buffer.split(FIRST_AT_LEAST)
        *leading, value = map(show, node.indices)
        row = f"{buffer}[{', '.join(leading)}]" if leading else buffer
        return f"first_at_least({row}, {value})", ATOM
    if isinstance(node, Read) and not node.indices:
        return node.buffer, ATOM
    if isinstance(node, Read):
        return f"{node.buffer}[{', '.join(map(_index, node.indices))}]", ATOM
    spelling = TABLE[node.fn].spelled["python"]
    # The right operand of an operator gets brackets at equal precedence: a - (b - c).
    is_infix = spelling.binds != ATOM
    operands = [
        show(a, spelling.operand + int(is_infix and i > 0)) for i, a in enumerate(node.args)
    ]
    return spelling.form.format(*operands), spelling.binds


def _name(name: str) -> str:
    length = measured(name)
    if length is None:
        return name
    buffer, axis = length
    return f"{buffer}.shape[{axis}]" if axis else f"len({buffer})"


def _index(node: Node) -> str:
    """Return an index.

    A negative literal would count from the end, so its sign is printed as an operation.
    """
    below_zero = isinstance(node, Const) and node.value < 0
    return f"+{show(node)}" if below_zero else show(node)
