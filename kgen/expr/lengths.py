"""Lengths of buffers in expressions: `len(t)`, `t.shape[1]`, `t.size(-1)`, and `t[-1]`, which
counts from the end.

All spellings of one length give one tree.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from kgen.diagnostics import did_you_mean, shown
from kgen.expr.nodes import Call, Const, Node, Type, Var, length_of
from kgen.expr.scope import BufferType, Scope
from kgen.expr.text_checks import Span, wrong

_FORMS = "`len({0})`, `{0}.shape[0]` or `{0}.size(0)`"
_INT32 = range(2**31)
SpanOf = Callable[[ast.expr], Span]


def length(node: ast.expr, scope: Scope, span: SpanOf) -> Node | None:
    """Return the length that an expression names; None for any other expression."""
    match node:
        case ast.Call(func=ast.Name(id="len")) if any(
            b.shape is not None for b in scope.buffers.values()
        ):
            return _of_call(node, scope, span)
        case ast.Call(func=ast.Attribute(value=of, attr="size"), args=axes, keywords=more) if (
            _is_buffer(of, scope)
        ):
            named = [keyword.value for keyword in more if keyword.arg == "dim"]
            return _along(node, of, [*axes, *named] if len(named) == len(more) else [], scope, span)
        case ast.Subscript(value=ast.Attribute(value=of, attr="shape"), slice=axis) if _is_buffer(
            of, scope
        ):
            return _along(node, of, [axis], scope, span)
        case ast.Attribute(value=of, attr="shape" | "size" as attr) if _is_buffer(of, scope):
            name = ast.unparse(of)
            if not scope.buffers[name].rank:
                return _at(name, 0, scope, span(node))
            wanted = f"{name}.shape[0]" if attr == "shape" else f"{name}.size(0)"
            raise wrong(
                span(node),
                "bad-length",
                f"`{name}.{attr}` has no axis",
                f"name the axis: `{wanted}`",
            )
    return None


def from_end(node: ast.expr, name: str, axis: int, buffer: BufferType, at: Span) -> Node | None:
    """Return the index for a negative literal; None for any other index, or if the extents are
    unknown.
    """
    back = _below_zero(node)
    if back is None or buffer.shape is None or axis >= buffer.rank:
        return None
    extent = buffer.shape[axis]
    if isinstance(extent, int) and back > extent:
        message = (
            f"axis {axis} of `{name}` has {extent} elements, and the index -{back} is out of bounds"
        )
        raise wrong(at, "bad-index", message, f"use an index from -{extent} to {extent - 1}")
    size = _extent(name, axis, extent)
    if isinstance(size, Const):
        return Const(size.value - back, Type.INT)
    return Call("sub", (size, Const(back, Type.INT)), Type.INT)


def _of_call(node: ast.Call, scope: Scope, span: SpanOf) -> Node:
    args = [*node.args, *(keyword.value for keyword in node.keywords)]
    if len(args) != 1 or node.keywords:
        message = f"`len` takes 1 buffer, got {len(args)} arguments"
        raise wrong(
            span(node),
            "bad-length",
            message,
            "write `len(buffer)`, or `buffer.shape[1]` for another axis",
        )
    (of,) = args
    if not _is_buffer(of, scope):
        hint = "write the name of a buffer"
        if isinstance(of, ast.Name) and of.id not in scope.names:
            hint = did_you_mean(of.id, sorted(scope.buffers)) or hint
        raise wrong(
            span(of), "bad-length", f"`len` takes a buffer, not {shown(ast.unparse(of))}", hint
        )
    return _at(ast.unparse(of), 0, scope, span(node))


def _along(node: ast.expr, of: ast.expr, args: list[ast.expr], scope: Scope, span: SpanOf) -> Node:
    name = ast.unparse(of)
    axis = _literal(args[0]) if len(args) == 1 else None
    if axis is None:
        hint = f"write {_FORMS.format(name)}"
        raise wrong(span(node), "bad-length", "an axis must be one literal integer", hint)
    return _at(name, axis, scope, span(node))


def _at(name: str, axis: int, scope: Scope, at: Span) -> Node:
    buffer, hint = scope.buffers[name], f"use its value: `{name}`"
    if not buffer.rank:
        raise wrong(at, "bad-length", f"`{name}` has no axes: it is one number", hint)
    if not -buffer.rank <= axis < buffer.rank:
        message = (
            f"`{name}` has {buffer.rank} {'axis' if buffer.rank == 1 else 'axes'}, but no axis "
            f"{axis}"
        )
        raise wrong(at, "bad-length", message, f"use an axis from 0 to {buffer.rank - 1}")
    assert buffer.shape is not None
    axis %= buffer.rank
    return _extent(name, axis, buffer.shape[axis])


def _extent(name: str, axis: int, extent: int | str | None) -> Node:
    """Return a declared number or size, or else the length of the tensor of a call."""
    if extent is None:
        return length_of(name, axis)
    return Const(extent, Type.INT) if isinstance(extent, int) else Var(extent, Type.INT)


def _is_buffer(node: ast.expr, scope: Scope) -> bool:
    """True for a buffer whose extents expressions can use."""
    buffer = scope.buffers.get(node.id) if isinstance(node, ast.Name) else None
    return buffer is not None and buffer.shape is not None


def _literal(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    back = _below_zero(node)
    return None if back is None else -back


def _below_zero(node: ast.expr) -> int | None:
    """Return the absolute value of a negative literal integer, else None."""
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
    ):
        number = node.operand.value
        return number if type(number) is int and number in _INT32 and number else None
    return None
