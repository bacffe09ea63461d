"""Text of the expression language to a typed tree.

The language is a small subset of Python. `ast.parse` reads the text and every node is looked up in a white
list: nothing is evaluated, so a spec can be untrusted input. Whatever is not on the list is an
`ExpressionError` with a position in the text.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kgen.diagnostics import closest, did_you_mean, shown
from kgen.expr.functions import TABLE, TypeRuleError
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var

MAX_LENGTH = 10_000
MAX_NODES = 2_000
MAX_DEPTH = 64
MAX_EXPONENT = 8
INT32 = range(-(2**31), 2**31)
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


class ExpressionError(Exception):
    """The text is not an expression of the language. `line` and `column` are 1-based inside the text."""

    def __init__(
        self, code: str, message: str, hint: str | None, line: int, column: int, length: int
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.line = line
        self.column = column
        self.length = length


@dataclass(frozen=True)
class BufferType:
    """A buffer that an expression may index with exactly `rank` integers."""

    element: Type
    rank: int


@dataclass(frozen=True)
class Scope:
    """The names that an expression may use. `elsewhere` says why a well-known name is not among them."""

    variables: Mapping[str, Type]
    buffers: Mapping[str, BufferType]
    elsewhere: Mapping[str, str] = field(default_factory=dict)


def parse_expression(text: str, scope: Scope, result: Type) -> Node:
    """Parse and type `text`, whose value must be of type `result`.

    A `FLOAT` result accepts an integer value, and the tree then has type `INT`. Raises `ExpressionError` and
    nothing else, whatever the text.
    """
    text = _without_comments(text)
    _check_characters(text)
    _check_brackets(text)
    return _Builder(text, scope, result).build(_module(text))


class _Span(NamedTuple):
    """Where something is in the text, 1-based."""

    line: int
    column: int
    length: int


class _Built(NamedTuple):
    """A tree with its size, as kernels write it, and depth: locals are inlined, so a tree may be far larger than its
    objects."""

    node: Node
    size: int
    depth: int

    @property
    def type(self) -> Type:
        return self.node.type


def _error(span: _Span, code: str, message: str, hint: str | None = None) -> ExpressionError:
    return ExpressionError(code, message, hint, *span)


# --- before the parser: what must not reach it, and what it would explain badly ------------------------


def _without_comments(text: str) -> str:
    # The language has no strings, so `#` always begins a comment. Only the ends of lines go: positions stay.
    return re.sub(r"#[^\n]*", "", text)


def _at(text: str, index: int, length: int = 1) -> _Span:
    line = text.count("\n", 0, index) + 1
    return _Span(line, index - (text.rfind("\n", 0, index) + 1) + 1, length)


def _check_characters(text: str) -> None:
    if not text.strip():
        raise _error(
            _Span(1, 1, 1), "empty-expression", "the expression is empty", "write its value on the last line"
        )
    if len(text) > MAX_LENGTH:
        raise _error(
            _Span(1, 1, 1),
            "too-large",
            f"the expression has {len(text)} characters, {MAX_LENGTH} is the limit",
            "move tables of numbers into a buffer",
        )
    # ASCII only: Python would fold look-alike letters into one another, and count columns in bytes.
    if found := re.search(r"[^\n\t\x20-\x7e]", text):
        raise _error(
            _at(text, found.start()),
            "bad-character",
            f"the character U+{ord(found[0]):04X} cannot be used in an expression",
            "use plain ASCII letters, digits and operators",
        )
    if found := re.search(r"&&|\|\||!(?!=)|\?", text):
        hint = {
            "&&": "write `and`",
            "||": "write `or`",
            "!": "write `not`",
            "?": "write `a if condition else b`",
        }
        span = _at(text, found.start(), len(found[0]))
        raise _error(span, "syntax-error", f"`{found[0]}` is not an operator", hint[found[0]])
    if found := re.search(r"\d{400,}", text):
        raise _literal_error(_at(text, found.start(), len(found[0])))


def _check_brackets(text: str) -> None:
    pairs = {")": "(", "]": "[", "}": "{"}
    opened: list[int] = []
    for i, character in enumerate(text):
        if character in "([{":
            opened.append(i)
            if len(opened) > MAX_DEPTH:
                raise _too_deep(_at(text, i))
        elif character in pairs:
            if not opened or text[opened[-1]] != pairs[character]:
                message = f"`{character}` closes nothing"
                raise _error(_at(text, i), "unbalanced-bracket", message, "remove it, or open it before")
            opened.pop()
    if opened:
        span = _at(text, opened[-1])
        raise _error(span, "unbalanced-bracket", f"`{text[opened[-1]]}` is never closed", "close the bracket")


def _module(text: str) -> list[ast.stmt]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text).body
    except IndentationError as error:
        span = _clipped(text, error.lineno, 1)
        raise _error(
            span, "syntax-error", "the line begins with spaces", "begin every line in the same column"
        ) from None
    except SyntaxError as error:
        # Python's own words differ between its versions, ours must not.
        span = _clipped(text, error.lineno, error.offset)
        raise _error(
            span,
            "syntax-error",
            "this is not a valid expression",
            "an operand or an operator is missing here",
        ) from None
    except (RecursionError, MemoryError):
        raise _too_deep(_Span(1, 1, 1)) from None


def _clipped(text: str, line: int | None, column: int | None) -> _Span:
    lines = text.split("\n")
    row = min(max(line or 1, 1), len(lines))
    return _Span(row, min(max(column or 1, 1), len(lines[row - 1]) + 1), 1)


def _too_deep(span: _Span) -> ExpressionError:
    message = f"the expression nests more than {MAX_DEPTH} deep"
    return _error(
        span, "too-deep", message, "split it into balanced parts with brackets, or move numbers into a buffer"
    )


def _literal_error(span: _Span) -> ExpressionError:
    return _error(
        span,
        "literal-range",
        "the number does not fit in 32 bits",
        "integers are int32 and reals are float32",
    )


# --- the white list ------------------------

_BINARY: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("add", "+"),
    ast.Sub: ("sub", "-"),
    ast.Mult: ("mul", "*"),
    ast.Div: ("div", "/"),
    ast.FloorDiv: ("floordiv", "//"),
    ast.Mod: ("mod", "%"),
    ast.BitAnd: ("and", "&"),
    ast.BitOr: ("or", "|"),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("lt", "<"),
    ast.LtE: ("le", "<="),
    ast.Gt: ("gt", ">"),
    ast.GtE: ("ge", ">="),
    ast.Eq: ("eq", "=="),
    ast.NotEq: ("ne", "!="),
}

# --- what is not on it, and what to write in its place ------------------------

_NO_OPERATOR: dict[type[ast.AST], tuple[str, str]] = {
    ast.BitXor: ("^", "write `x ** 2` for a power, `(a or b) and not (a and b)` for exclusive or"),
    ast.LShift: ("<<", "multiply by a power of two"),
    ast.RShift: (">>", "use `//` with a power of two"),
    ast.MatMult: ("@", "expressions are scalar: the matrix products are the kernel's"),
    ast.Is: ("is", "compare with `==`"),
    ast.IsNot: ("is not", "compare with `!=`"),
    ast.In: ("in", "compare with `==`, and join the cases with `or`"),
    ast.NotIn: ("not in", "compare with `!=`, and join the cases with `and`"),
}
_NO_EXPRESSION: dict[type[ast.expr], tuple[str, str]] = {
    ast.Lambda: ("a lambda", "write only its body: `score`, `b`, `h`, `q_idx`, `kv_idx` are there by name"),
    ast.NamedExpr: ("`:=`", "define the name on a line of its own: `x = ...`"),
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
_NO_STATEMENT: dict[type[ast.stmt], tuple[str, str]] = {
    ast.Return: ("`return`", "leave it out: the last line is the value"),
    ast.If: ("`if` as a statement", "write `a if condition else b`"),
    ast.For: ("a loop", "an expression is the value of one element: the loops are the kernel's"),
    ast.While: ("a loop", "an expression is the value of one element: the loops are the kernel's"),
    ast.FunctionDef: ("a function definition", "write only its body, without `return`"),
    ast.AugAssign: ("an update", "a name is defined once: give the new value another name"),
    ast.AnnAssign: ("a type annotation", "write `x = ...`: types are inferred"),
    ast.Import: ("an import", "the functions of the language are there by name"),
    ast.ImportFrom: ("an import", "the functions of the language are there by name"),
}
_FUNCTION_HINTS = {
    "maximum": "write `max(a, b)`",
    "fmax": "write `max(a, b)`",
    "minimum": "write `min(a, b)`",
    "fmin": "write `min(a, b)`",
    "clip": "write `clamp(x, low, high)`",
    "absolute": "write `abs(x)`",
    "fabs": "write `abs(x)`",
    "relu": "write `max(x, 0)`",
    "pow": "write `x ** 2`",
    "square": "write `x ** 2`",
    "int": "integers stay integers with `//`; there is no way from a real back to an index",
    "logical_and": "write `a and b`",
    "logical_or": "write `a or b`",
    "logical_not": "write `not a`",
    "remainder": "write `a % b`",
    "floor_divide": "write `a // b`",
    "to": "write `float(x)`: types are promoted as needed",
}
_NAME_HINTS = {
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
_CALLABLE = sorted(name for name, row in TABLE.items() if row.callable)


class _Builder:
    """Builds one tree. `locals` grows line by line and is inlined where it is used."""

    def __init__(self, text: str, scope: Scope, result: Type) -> None:
        self.lines = text.split("\n")
        self.scope = scope
        self.result = result
        self.locals: dict[str, _Built] = {}
        self.used: set[str] = set()
        self.current: str | None = None
        self.needs: dict[str, frozenset[str]] = {}

    # Statements ------------------------

    def build(self, body: list[ast.stmt]) -> Node:
        *definitions, last = body
        targets = [self.target(statement) for statement in definitions]
        for target, value in targets:
            names = frozenset(n.id for n in ast.walk(value) if isinstance(n, ast.Name))
            self.needs.setdefault(target.id, names)
        for target, value in targets:
            self.check_definable(target)
            self.current = target.id
            self.locals[target.id] = self.expression(value, 0)
        self.current = None
        value = self.value(last)
        built = self.expression(value, 0)
        self.check_result(built, value)
        for target, _ in targets:
            if target.id not in self.used:
                message = f"`{target.id}` is defined and never used"
                raise _error(self.span(target), "unused-name", message, "use it, or remove the line")
        return built.node

    def target(self, statement: ast.stmt) -> tuple[ast.Name, ast.expr]:
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]
            if len(statement.targets) == 1 and isinstance(target, ast.Name):
                return target, statement.value
            message = "a line before the last defines exactly one name"
            raise _error(self.span(statement.targets[-1]), "bad-statement", message, "write `x = ...`")
        if isinstance(statement, ast.Expr):
            raise _error(
                self.span(statement),
                "bad-statement",
                "only the last line is the value, and this one is not the last",
                "name it with `x = ...`, or put brackets around an expression that spans several lines",
            )
        raise self.no_statement(statement)

    def value(self, statement: ast.stmt) -> ast.expr:
        if isinstance(statement, ast.Expr):
            return statement.value
        if isinstance(statement, ast.Assign):
            raise _error(
                self.span(statement),
                "bad-statement",
                "the last line is a definition, not a value",
                "compare with `==`, or add a last line that is the value",
            )
        raise self.no_statement(statement)

    def no_statement(self, statement: ast.stmt) -> ExpressionError:
        fallback = ("this statement", "write `x = ...` lines and a last line that is the value")
        what, hint = _NO_STATEMENT.get(type(statement), fallback)
        return _error(self.span(statement), "bad-statement", f"{what} is not part of the language", hint)

    def check_definable(self, target: ast.Name) -> None:
        name = target.id
        span = self.span(target)
        self.check_dunder(name, span)
        if name in self.locals:
            message = f"`{name}` is defined twice"
            raise _error(
                span, "redefined-name", message, "a name is defined once: give the new value another name"
            )
        if (
            name in self.scope.variables
            or name in self.scope.buffers
            or name in self.scope.elsewhere
            or name == "inf"
        ):
            raise _error(span, "shadowed-name", f"`{name}` already has a meaning", "choose another name")
        if name in _CALLABLE:
            raise _error(span, "shadowed-name", f"`{name}` is a function", "choose another name")

    def check_dunder(self, name: str, span: _Span) -> None:
        if "__" in name:
            message = f"{shown(name)}: names with a double underscore are not allowed"
            raise _error(span, "dunder-name", message, "use a name of the language")

    def check_result(self, built: _Built, at: ast.expr) -> None:
        if self.result is Type.FLOAT and built.type is Type.BOOL:
            raise _error(
                self.span(at),
                "wrong-type",
                "the value is a truth value, a number is needed",
                "use `where(condition, score, -inf)`, or move the condition into `mask_mod`",
            )
        if self.result is Type.BOOL and built.type is not Type.BOOL:
            raise _error(
                self.span(at),
                "wrong-type",
                f"the value is {_a(built.type)}, a truth value is needed",
                "compare it with something: true means that the pair is kept",
            )
        if self.result is Type.INT and built.type is not Type.INT:
            raise _error(
                self.span(at),
                "wrong-type",
                f"the value is {_a(built.type)}, an integer is needed",
                "use `//`",
            )

    # Expressions ------------------------

    def expression(self, node: ast.expr, depth: int) -> _Built:
        if depth >= MAX_DEPTH:
            raise _too_deep(self.span(node))
        inner = depth + 1
        match node:
            case ast.Constant():
                return self.literal(node, node.value)
            case ast.Name():
                return self.name(node)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if (
                not isinstance(value, bool)
            ):
                return self.literal(node, -value)
            case ast.UnaryOp():
                return self.unary(node, inner)
            case ast.BinOp():
                return self.binary(node, inner)
            case ast.BoolOp():
                row = "and" if isinstance(node.op, ast.And) else "or"
                built = self.expression(node.values[0], inner)
                for left, right in zip(node.values, node.values[1:], strict=False):
                    span = self.between(left, right, row)
                    built = self.apply(row, row, (built, self.expression(right, inner)), span)
                return built
            case ast.Compare():
                return self.comparison(node, inner)
            case ast.IfExp():
                arguments = tuple(
                    self.expression(part, inner) for part in (node.test, node.body, node.orelse)
                )
                return self.apply("where", "if", arguments, self.between(node.body, node.test, "if"))
            case ast.Call():
                return self.call(node, inner)
            case ast.Subscript():
                return self.read(node, inner)
            case ast.Attribute():
                raise self.attribute_error(node)
        what, hint = _NO_EXPRESSION.get(
            type(node), ("this", "see the expression language in the documentation")
        )
        raise _error(self.span(node), "not-in-language", f"{what} is not part of the language", hint)

    def literal(self, node: ast.expr, value: object) -> _Built:
        if isinstance(value, bool):
            return _Built(Const(value, Type.BOOL), 1, 1)
        if isinstance(value, int):
            if value not in INT32:
                raise _literal_error(self.span(node))
            return _Built(Const(value, Type.INT), 1, 1)
        if isinstance(value, float):
            if not abs(value) <= FLOAT32_MAX:
                raise _literal_error(self.span(node))
            return _Built(Const(value, Type.FLOAT), 1, 1)
        what = {str: "a string", bytes: "a string", complex: "a complex number"}.get(
            type(value), "this literal"
        )
        hint = "write numbers, `True`, `False` or `inf`"
        raise _error(self.span(node), "not-in-language", f"{what} is not part of the language", hint)

    def name(self, node: ast.Name) -> _Built:
        name = node.id
        span = self.span(node)
        self.check_dunder(name, span)
        if name in self.locals:
            self.used.add(name)
            return self.limited(self.locals[name], span)
        if name in self.scope.variables:
            return _Built(Var(name, self.scope.variables[name]), 1, 1)
        if name == "inf":
            return _Built(Var("inf", Type.FLOAT), 1, 1)
        if name in self.scope.buffers:
            hint = f"index it: `{_indexed(name, self.scope.buffers[name].rank)}`"
            raise _error(span, "bad-index", f"`{name}` is a buffer, not a number", hint)
        if name in _CALLABLE:
            raise _error(span, "bad-call", f"`{name}` is a function, not a value", f"call it: `{name}(...)`")
        if name in self.needs:
            raise self.order_error(name, span)
        raise self.unknown_name(name, span)

    def order_error(self, name: str, span: _Span) -> ExpressionError:
        """A local name is used on its own line or on a line before it."""
        if name == self.current:
            message = f"`{name}` is defined by itself"
            return _error(span, "cyclic-name", message, "a name stands for one value: there are no updates")
        if self.current is not None and self.current in self.reachable(name):
            message = f"`{self.current}` and `{name}` are defined by each other"
            return _error(span, "cyclic-name", message, "one of them must not need the other")
        message = f"`{name}` is used before it is defined"
        return _error(span, "used-before-definition", message, f"move the line `{name} = ...` up")

    def reachable(self, name: str) -> set[str]:
        found: set[str] = set()
        waiting = [name]
        while waiting:
            for needed in self.needs.get(waiting.pop(), frozenset()) - found:
                found.add(needed)
                waiting.append(needed)
        return found

    def unknown_name(self, name: str, span: _Span) -> ExpressionError:
        if name in self.scope.elsewhere:
            return _error(span, "unknown-name", f"`{name}` cannot be used here", self.scope.elsewhere[name])
        known = sorted({*self.scope.variables, *self.scope.buffers, *self.locals})
        near = closest(name, known)
        hint = None if near else _NAME_HINTS.get(name)
        hint = hint or did_you_mean(name, known) or "declare it under `buffers` or `params`"
        return _error(span, "unknown-name", f"{shown(name)} is not defined", hint)

    def unary(self, node: ast.UnaryOp, inner: int) -> _Built:
        operand = self.expression(node.operand, inner)
        start = self.span(node)
        match node.op:
            case ast.USub():
                return self.apply("neg", "-", (operand,), start._replace(length=1))
            case ast.Not():
                return self.apply("not", "not", (operand,), start._replace(length=3))
            case ast.Invert():
                return self.apply("not", "~", (operand,), start._replace(length=1))
        if operand.type is Type.BOOL:
            hint = "use `where(condition, 1, 0)` to count a truth value"
            raise _error(
                start._replace(length=1), "wrong-type", "`+` expects numbers, got a truth value", hint
            )
        return operand

    def binary(self, node: ast.BinOp, inner: int) -> _Built:
        if isinstance(node.op, ast.Pow):
            return self.power(node, inner)
        operator = _BINARY.get(type(node.op))
        if operator is None:
            raise self.no_operator(node.op, node.left, node.right)
        row, symbol = operator
        operands = (self.expression(node.left, inner), self.expression(node.right, inner))
        return self.apply(row, symbol, operands, self.between(node.left, node.right, symbol))

    def no_operator(self, operator: ast.AST, left: ast.expr, right: ast.expr) -> ExpressionError:
        symbol, hint = _NO_OPERATOR[type(operator)]
        span = self.between(left, right, symbol)
        return _error(span, "not-in-language", f"`{symbol}` is not part of the language", hint)

    def power(self, node: ast.BinOp, inner: int) -> _Built:
        """`x ** n` is written out as multiplications, halves first: `x**4` is `(x*x) * (x*x)`."""
        base = self.expression(node.left, inner)
        exponent = node.right.value if isinstance(node.right, ast.Constant) else None
        if type(exponent) is not int or not 1 <= exponent <= MAX_EXPONENT:
            span = self.span(node.right)
            written = self.lines[span.line - 1][span.column - 1 :][: span.length]
            hints = {"0.5": "use `sqrt(x)`", "-0.5": "use `rsqrt(x)`", "-1": "write `1 / x`"}
            hint = hints.get(written, "use `exp2(y * log2(x))` for other powers of a positive x")
            message = f"an exponent is an integer literal from 1 to {MAX_EXPONENT}"
            raise _error(span, "bad-exponent", message, hint)
        span = self.between(node.left, node.right, "**")

        def multiplied(n: int) -> _Built:
            if n == 1:
                return base
            half = multiplied(n // 2)
            square = self.apply("mul", "**", (half, half), span)
            return self.apply("mul", "**", (square, base), span) if n % 2 else square

        return multiplied(exponent)

    def comparison(self, node: ast.Compare, inner: int) -> _Built:
        operands = [node.left, *node.comparators]
        for i, operand in enumerate(operands):
            self.check_precedence(operand, node.ops[min(i, len(node.ops) - 1)])
        values = [self.expression(operand, inner) for operand in operands]
        chain: _Built | None = None
        for i, operator in enumerate(node.ops):
            if type(operator) not in _COMPARISONS:
                raise self.no_operator(operator, operands[i], operands[i + 1])
            row, symbol = _COMPARISONS[type(operator)]
            span = self.between(operands[i], operands[i + 1], symbol)
            link = self.apply(row, symbol, (values[i], values[i + 1]), span)
            chain = link if chain is None else self.apply("and", symbol, (chain, link), span)
        assert chain is not None
        return chain

    def check_precedence(self, operand: ast.expr, operator: ast.cmpop) -> None:
        """In Python `a >= b & c >= d` means `a >= (b & c) >= d`, which nobody wants here."""
        symbol = _COMPARISONS.get(type(operator), ("", ">="))[1]
        match operand:
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as bitwise, right=right):
                mark, word = ("&", "and") if isinstance(bitwise, ast.BitAnd) else ("|", "or")
                span = self.between(left, right, mark)
                hint = f"write `{word}`, or put brackets around each comparison"
            case ast.UnaryOp(op=ast.Invert()):
                mark, span = "~", self.span(operand)._replace(length=1)
                hint = "write `not`, or put brackets around the comparison"
            case _:
                return
        raise _error(span, "precedence", f"`{mark}` binds tighter than `{symbol}`", hint)

    def call(self, node: ast.Call, inner: int) -> _Built:
        if isinstance(node.func, ast.Attribute):
            raise self.attribute_error(node.func)
        if not isinstance(node.func, ast.Name):
            message = "only functions of the language can be called"
            raise _error(self.span(node.func), "bad-call", message, f"they are {', '.join(_CALLABLE)}")
        name = node.func.id
        span = self.span(node.func)
        self.check_dunder(name, span)
        if name not in _CALLABLE:
            raise self.unknown_function(name, span)
        if node.keywords:
            keyword = self.span(node.keywords[0])
            raise _error(
                keyword, "bad-call", f"`{name}` takes no keyword arguments", "write the arguments in order"
            )
        match node.args:
            case [ast.Constant(value=str(text)) as literal] if name == "float":
                negative = text.strip().startswith("-")
                hint = (
                    f"write `{'-' if negative else ''}inf`"
                    if "inf" in text.lower()
                    else "write the number itself"
                )
                raise _error(
                    self.span(literal), "not-in-language", "a string is not part of the language", hint
                )
        arguments = [self.expression(argument, inner) for argument in node.args]
        low, high = TABLE[name].arity
        if len(arguments) < low or (high is not None and len(arguments) > high):
            need = f"{low} or more" if high is None else str(low)
            noun = "argument" if need == "1" else "arguments"
            form = TABLE[name].spelled["python"].form.format("x", "y", "z")
            message = f"`{name}` takes {need} {noun}, got {len(arguments)}"
            raise _error(self.span(node), "bad-call", message, f"write `{form}`")
        if high is not None:
            return self.apply(name, name, tuple(arguments), span)
        built = arguments[0]
        for argument in arguments[1:]:
            built = self.apply(name, name, (built, argument), span)
        return built

    def unknown_function(self, name: str, span: _Span) -> ExpressionError:
        if name in self.scope.buffers:
            hint = f"index it with square brackets: `{_indexed(name, self.scope.buffers[name].rank)}`"
            return _error(span, "bad-call", f"`{name}` is a buffer, not a function", hint)
        if name in self.scope.variables or name in self.locals or name == "inf":
            return _error(span, "bad-call", f"`{name}` is a value, not a function", "write `*` to multiply")
        hint = (
            _FUNCTION_HINTS.get(name) or did_you_mean(name, _CALLABLE) or f"there are {', '.join(_CALLABLE)}"
        )
        return _error(span, "unknown-function", f"there is no function {shown(name)}", hint)

    def attribute_error(self, node: ast.Attribute) -> ExpressionError:
        span = self.span(node)
        self.check_dunder(node.attr, span)
        name = node.attr
        if name == "inf":
            hint: str | None = "write `inf`"
        elif name in _CALLABLE:
            hint = f"write `{name}(...)`"
        else:
            hint = _FUNCTION_HINTS.get(name) or did_you_mean(name, _CALLABLE)
        written = self.lines[span.line - 1][span.column - 1 :][: span.length]
        message = f"{shown(written)}: attribute access is not part of the language"
        return _error(span, "attribute-access", message, hint or "use the functions of the language by name")

    def read(self, node: ast.Subscript, inner: int) -> _Built:
        if isinstance(node.value, ast.Subscript):
            message = "a buffer is indexed once, with all its indices"
            raise _error(
                self.span(node), "bad-index", message, "write `buffer[i, j]` in place of `buffer[i][j]`"
            )
        if isinstance(node.value, ast.Attribute):
            raise self.attribute_error(node.value)
        at = self.span(node.value)
        if not isinstance(node.value, ast.Name):
            raise _error(at, "bad-index", "only declared buffers can be indexed", "write `buffer[i]`")
        name = node.value.id
        self.check_dunder(name, at)
        buffer = self.scope.buffers.get(name)
        if buffer is None:
            if name in self.scope.variables or name in self.locals or name == "inf" or name in _CALLABLE:
                raise _error(
                    at, "bad-index", f"`{name}` is not a buffer", "only declared buffers can be indexed"
                )
            hint = did_you_mean(name, sorted(self.scope.buffers)) or "declare it under `buffers`"
            raise _error(at, "unknown-name", f"{shown(name)} is not defined", hint)
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        built = [self.expression(index, inner) for index in indices]
        for index, value in zip(indices, built, strict=True):
            if value.type is not Type.INT:
                message = f"an index is an integer, this is {_a(value.type)}"
                hint = (
                    "use `//` to divide integers"
                    if value.type is Type.FLOAT
                    else "use `where(condition, 1, 0)`"
                )
                raise _error(self.span(index), "wrong-type", message, hint)
        if len(built) != buffer.rank:
            noun = "index" if buffer.rank == 1 else "indices"
            message = f"`{name}` takes {buffer.rank} {noun}, got {len(built)}"
            hint = f"write `{_indexed(name, buffer.rank)}`"
            raise _error(self.span(node), "bad-index", message, hint)
        tree = Read(name, tuple(value.node for value in built), buffer.element)
        return self.limited(_grown(tree, built), self.span(node))

    # Making nodes ------------------------

    def apply(self, row: str, symbol: str, arguments: Sequence[_Built], span: _Span) -> _Built:
        try:
            type_ = TABLE[row].typed(tuple(argument.type for argument in arguments))
        except TypeRuleError as error:
            raise _error(span, "wrong-type", f"`{symbol}` {error}", error.hint) from None
        tree = Call(row, tuple(argument.node for argument in arguments), type_)
        grown = _grown(tree, tuple(arguments) * TABLE[row].copies)
        if TABLE[row].copies == 1:
            return self.limited(grown, span)
        return self.limited(grown, span, f"kernels write the operand of `{symbol}` twice: nest it less")

    def limited(
        self, built: _Built, span: _Span, hint: str = "use fewer local names that build on each other"
    ) -> _Built:
        if built.size > MAX_NODES:
            message = f"the expression has more than {MAX_NODES} terms once its local names are written out"
            raise _error(span, "too-large", message, hint)
        if built.depth > MAX_DEPTH:
            raise _too_deep(span)
        return built

    # Positions ------------------------

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> _Span:
        """Of a node; only its first line when it has several."""
        column, end = node.col_offset, node.end_col_offset
        if end is None or node.end_lineno != node.lineno:
            end = len(self.lines[node.lineno - 1].rstrip())
        return _Span(node.lineno, column + 1, max(end - column, 1))

    def between(self, left: ast.expr, right: ast.expr, symbol: str) -> _Span:
        """Of the operator between two operands, where only brackets and blanks are besides it."""
        line, column = left.end_lineno or left.lineno, left.end_col_offset or left.col_offset
        pattern = re.compile(r"\s+".join(map(re.escape, symbol.split())))
        while line <= right.lineno:
            if found := pattern.search(self.lines[line - 1], column):
                return _Span(line, found.start() + 1, found.end() - found.start())
            line, column = line + 1, 0
        return self.span(left)


def _grown(tree: Node, parts: Sequence[_Built]) -> _Built:
    return _Built(tree, 1 + sum(p.size for p in parts), 1 + max((p.depth for p in parts), default=0))


def _a(type_: Type) -> str:
    return {Type.INT: "an integer", Type.FLOAT: "a real number", Type.BOOL: "a truth value"}[type_]


def _indexed(name: str, rank: int) -> str:
    return f"{name}[{', '.join('ijklmn'[:rank])}]"
