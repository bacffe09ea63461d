"""The subset of Python that is the expression language, and hints for everything else."""

from __future__ import annotations

import ast
from collections.abc import Collection

from kgen.diagnostics import did_you_mean, shown
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Node, Type, walk
from kgen.expr.scope import Scope
from kgen.expr.text_checks import ExpressionError, Span, wrong

# --- the allowlist ------------------------

BINARY: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("add", "+"),
    ast.Sub: ("sub", "-"),
    ast.Mult: ("mul", "*"),
    ast.Div: ("div", "/"),
    ast.FloorDiv: ("floordiv", "//"),
    ast.Mod: ("mod", "%"),
    ast.BitAnd: ("and", "&"),
    ast.BitOr: ("or", "|"),
    ast.BitXor: ("ne", "^"),
    ast.LShift: ("lshift", "<<"),
    ast.RShift: ("rshift", ">>"),
}
OF_BITS = {"and": "bitand", "or": "bitor", "ne": "bitxor", "not": "invert"}
"""Rows for operators of bools, if their operands are integers."""
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("lt", "<"),
    ast.LtE: ("le", "<="),
    ast.Gt: ("gt", ">"),
    ast.GtE: ("ge", ">="),
    ast.Eq: ("eq", "=="),
    ast.NotEq: ("ne", "!="),
}

# --- hints for everything else ------------------------

NO_OPERATOR: dict[type[ast.AST], tuple[str, str]] = {
    ast.MatMult: ("@", "an expression computes one element: the kernel has the matrix products"),
    ast.Is: ("is", "compare with `==`"),
    ast.IsNot: ("is not", "compare with `!=`"),
    ast.In: ("in", "compare with `==`, and join the cases with `or`"),
    ast.NotIn: ("not in", "compare with `!=`, and join the cases with `and`"),
}
NO_EXPRESSION: dict[type[ast.expr], tuple[str, str]] = {
    ast.Lambda: (
        "a lambda",
        "write only its body: `score`, `b`, `h`, `q_idx`, `kv_idx` are defined",
    ),
    ast.NamedExpr: ("`:=`", "define the name on its own line: `x = ...`"),
    ast.JoinedStr: ("an f-string", "expressions have no strings"),
    ast.Starred: ("`*`", "write the operands one by one"),
    ast.Slice: ("a slice", "index one element: `buffer[i]`"),
    ast.Tuple: ("a tuple", "an expression has one value"),
    ast.List: ("a list", "put the numbers into a buffer and index it"),
    ast.Set: ("a set", "compare with `==`, and join the cases with `or`"),
    ast.Dict: ("a dictionary", "put the numbers into a buffer and index it"),
    ast.ListComp: ("a comprehension", "write the terms one by one"),
    ast.SetComp: ("a comprehension", "write the terms one by one"),
    ast.DictComp: ("a comprehension", "write the terms one by one"),
    ast.GeneratorExp: ("a comprehension", "write the terms one by one"),
}
NO_STATEMENT: dict[type[ast.stmt], tuple[str, str]] = {
    ast.Return: ("`return`", "leave it out: the last line is the value"),
    ast.If: ("`if` as a statement", "write `a if condition else b`"),
    ast.For: ("a loop", "an expression computes one element: the kernel has the loops"),
    ast.While: ("a loop", "an expression computes one element: the kernel has the loops"),
    ast.FunctionDef: ("a function definition", "write only its body, without `return`"),
    ast.AugAssign: ("an update", "give the second value another name"),
    ast.AnnAssign: ("a type annotation", "write `x = ...`: types are inferred"),
    ast.Import: ("an import", "call the functions of the language by name"),
    ast.ImportFrom: ("an import", "call the functions of the language by name"),
}
FUNCTION_HINTS = {
    "maximum": "write `max(a, b)`",
    "fmax": "write `max(a, b)`",
    "minimum": "write `min(a, b)`",
    "fmin": "write `min(a, b)`",
    "clip": "write `clamp(x, low, high)`",
    "absolute": "write `abs(x)`",
    "fabs": "write `abs(x)`",
    "relu": "write `max(x, 0)`",
    "square": "write `x ** 2`",
    "logical_and": "write `a and b`",
    "logical_or": "write `a or b`",
    "logical_not": "write `not a`",
    "remainder": "write `a % b`",
    "floor_divide": "write `a // b`",
    "numel": "write `len(t)` for a buffer with one axis",
    "to": "write `float(x)`: types are promoted as needed",
}
NAME_HINTS = {
    "true": "write `True`",
    "false": "write `False`",
    "batch": "write `b`",
    "head": "write `h`",
    "q": "write `q_idx` for the position of the query",
    "k": "write `kv_idx` for the position of the key",
    "m": "write `q_idx` for the position of the query",
    "n": "write `kv_idx` for the position of the key",
    "lambda": "write only its body",
}
WHOLE = frozenset({"floor", "ceil", "round"})
"""Functions whose results are valid as an index."""
CALLABLE = sorted(name for name, row in TABLE.items() if row.callable)


def no_statement(statement: ast.stmt, span: Span) -> ExpressionError:
    """Return the error for a line that is no statement of the language."""
    fallback = ("this statement", "write `x = ...` lines and a last line with the value")
    what, hint = NO_STATEMENT.get(type(statement), fallback)
    return wrong(span, "bad-statement", f"{what} is not part of the language", hint)


def no_function(name: str, span: Span, scope: Scope, local: Collection[str]) -> ExpressionError:
    """Return the error for a call of a name that is no function of the language."""
    buffer = scope.buffers.get(name)
    if buffer and buffer.rank:
        how = f"index it with square brackets: `{indexed(name, buffer.rank)}`"
        return wrong(span, "bad-call", f"`{name}` is a buffer, not a function", how)
    if buffer or name in scope.names or name in local or name == "inf":
        return wrong(
            span, "bad-call", f"`{name}` is a value, not a function", "write `*` to multiply"
        )
    hint = (
        FUNCTION_HINTS.get(name)
        or did_you_mean(name, CALLABLE)
        or f"choose from {', '.join(CALLABLE)}"
    )
    return wrong(span, "unknown-function", f"there is no function {shown(name)}", hint)


def attribute_hint(name: str) -> str:
    """Return a hint for `torch.name` or `x.name`."""
    if name == "inf":
        return "write `inf`"
    if name in CALLABLE:
        return f"write `{name}(...)`"
    known = FUNCTION_HINTS.get(name) or did_you_mean(name, CALLABLE)
    return known or "call the functions of the language by name"


def kind_of(type_: Type) -> str:
    """Return a type in words."""
    return {
        Type.INT: "an integer",
        Type.LONG: "an integer",
        Type.FLOAT: "a real number",
        Type.BOOL: "a bool",
    }[type_]


def indexed(name: str, rank: int) -> str:
    """Return a read of a buffer, as in `bias[i, j]`."""
    return f"{name}[{', '.join('ijklmn'[:rank])}]" if rank else name


def integral(index: Node) -> str:
    """Return a hint that turns an index into an integer."""
    if index.type is not Type.FLOAT:
        return "use `where(condition, 1, 0)`"
    rounded = next(
        (part.fn for part in walk(index) if isinstance(part, Call) and part.fn in WHOLE), None
    )
    return f"write `int({rounded}(...))`" if rounded else "use `//` to divide integers"
