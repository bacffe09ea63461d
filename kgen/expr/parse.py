"""Parse the text of an expression to a typed tree.

The language is a small subset of Python. `ast.parse` reads the text, and every node is looked up in
an allowlist. Nothing is evaluated, so specs may be untrusted input. Anything else is an
`ExpressionError` with a position in the text.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

from kgen.diagnostics import closest, did_you_mean, shown
from kgen.expr import language, lengths
from kgen.expr.domain import misfit
from kgen.expr.functions import TABLE
from kgen.expr.infinity import Infinity, infinity, scores
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var
from kgen.expr.precedence import check_precedence
from kgen.expr.printed_size import Built, check_expansion, grown, limited, of_tree, times_printed
from kgen.expr.scope import BufferType, Scope
from kgen.expr.statements import check_result, definition, last_value
from kgen.expr.text_checks import (
    MAX_DEPTH,
    ExpressionError,
    Span,
    check_brackets,
    check_characters,
    literal_error,
    module,
    span_between,
    span_of,
    too_deep,
    without_comments,
    wrong,
)
from kgen.expr.type_rules import TypeRuleError

MAX_EXPONENT = 8
INT32 = range(-(2**31), 2**31)
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def parse_expression(text: str, scope: Scope, result: Type) -> Node:
    """Parse `text` and check that its value has the type `result`. Raises `ExpressionError`."""
    return parse_with_locals(text, scope, result)[0]


def parse_with_locals(text: str, scope: Scope, result: Type) -> tuple[Node, dict[str, Node]]:
    """Parse `text`; also return the values of local names, in the order of their lines.

    A `FLOAT` result accepts an integer value, and the tree then has type `INT`. Raises only
    `ExpressionError`, for any text.
    """
    text = without_comments(text)
    check_characters(text)
    check_brackets(text)
    builder = _Builder(text, scope, result)
    return builder.build(module(text)), {name: built.node for name, built in builder.locals.items()}


class _Builder:
    """Builder of one tree. `locals` grows line by line, and each use is inlined."""

    def __init__(self, text: str, scope: Scope, result: Type) -> None:
        self.lines = text.split("\n")
        self.scope = scope
        self.result = result
        self.locals: dict[str, Built] = {}
        self.used: set[str] = set()
        self.current: str | None = None
        self.needs: dict[str, frozenset[str]] = {}
        self.scores: frozenset[ast.expr] = frozenset()

    # Statements ------------------------

    def build(self, body: list[ast.stmt]) -> Node:
        *definitions, last = body
        targets = [definition(statement, self.lines) for statement in definitions]
        for target, value in targets:
            names = frozenset(n.id for n in ast.walk(value) if isinstance(n, ast.Name))
            self.needs.setdefault(target.id, names)
        for target, value in targets:
            self.check_definable(target)
            self.current = target.id
            self.locals[target.id] = self.expression(value, 0)
        self.current = None
        value = last_value(last, self.lines)
        self.scores = scores(value) if "score" in self.scope.names else frozenset()
        built = self.expression(value, 0)
        check_result(built.type, self.result, self.span(value))
        for target, _ in targets:
            if target.id not in self.used:
                message = f"`{target.id}` is never used"
                raise wrong(self.span(target), "unused-name", message, "use it, or remove the line")
        return built.node

    def check_definable(self, target: ast.Name) -> None:
        name = target.id
        span = self.span(target)
        self.check_dunder(name, span)
        if name in self.locals:
            message = f"`{name}` is defined twice"
            raise wrong(span, "redefined-name", message, "give the second value another name")
        if (
            name in self.scope.names
            or name in self.scope.buffers
            or name in self.scope.elsewhere
            or name == "inf"
        ):
            raise wrong(
                span, "shadowed-name", f"`{name}` already has a meaning", "choose another name"
            )
        if name in language.CALLABLE:
            raise wrong(span, "shadowed-name", f"`{name}` is a function", "choose another name")

    def check_dunder(self, name: str, span: Span) -> None:
        if "__" in name:
            message = f"the name {shown(name)} has a double underscore, which is not allowed"
            raise wrong(span, "dunder-name", message, "use a name of the language")

    # Expressions ------------------------

    def expression(self, node: ast.expr, depth: int) -> Built:
        if depth >= MAX_DEPTH:
            raise too_deep(self.span(node))
        if found := infinity(node):
            return self.infinite(node, found)
        if (size := lengths.length(node, self.scope, self.span)) is not None:
            return of_tree(size)
        inner = depth + 1
        match node:
            case ast.Constant():
                return self.literal(node, node.value)
            case ast.Name():
                return self.name(node)
            case ast.UnaryOp(
                op=ast.USub(), operand=ast.Constant(value=int() | float() as value)
            ) if not isinstance(value, bool):
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
                return self.apply(
                    "where", "if", arguments, self.between(node.body, node.test, "if")
                )
            case ast.Call():
                return self.call(node, inner)
            case ast.Subscript():
                return self.read(node, inner)
            case ast.Attribute():
                raise self.attribute_error(node)
        what, hint = language.NO_EXPRESSION.get(
            type(node), ("this", "see `docs/specs.md` for the language")
        )
        raise wrong(self.span(node), "not-in-language", f"{what} is not part of the language", hint)

    def infinite(self, node: ast.expr, found: Infinity) -> Built:
        if found.bound and not (found.negative and node in self.scores):
            message = "a bound of a dtype means minus infinity only as the whole score"
            hint = "write `where(condition, score, -inf)` in the last line, or write the number"
            raise wrong(self.span(node), "not-in-language", message, hint)
        built = Built(Var("inf", Type.FLOAT), 1, 1)
        return self.apply("neg", "-", (built,), self.span(node)) if found.negative else built

    def literal(self, node: ast.expr, value: object) -> Built:
        if isinstance(value, bool):
            return Built(Const(value, Type.BOOL), 1, 1)
        if isinstance(value, int):
            if value not in INT32:
                raise literal_error(self.span(node))
            return Built(Const(value, Type.INT), 1, 1)
        if isinstance(value, float):
            if not abs(value) <= FLOAT32_MAX:
                raise literal_error(self.span(node))
            return Built(Const(value, Type.FLOAT), 1, 1)
        what = {str: "a string", bytes: "a string", complex: "a complex number"}.get(
            type(value), "this literal"
        )
        hint = "write numbers, `True`, `False` or `inf`"
        raise wrong(self.span(node), "not-in-language", f"{what} is not part of the language", hint)

    def name(self, node: ast.Name) -> Built:
        name, span = node.id, self.span(node)
        self.check_dunder(name, span)
        if name in self.locals:
            self.used.add(name)
            return limited(self.locals[name], span)
        if name in self.scope.variables:
            return Built(Var(name, self.scope.variables[name]), 1, 1)
        if name in self.scope.meanings:
            return of_tree(self.scope.meanings[name])
        if buffer := self.scope.buffers.get(name):
            if not buffer.rank:
                return Built(Read(name, (), buffer.element), 1, 1)
            how = f"index it: `{language.indexed(name, buffer.rank)}`"
            raise wrong(span, "bad-index", f"`{name}` is a buffer, not a number", how)
        if name in language.CALLABLE:
            raise wrong(
                span, "bad-call", f"`{name}` is a function, not a value", f"call it: `{name}(...)`"
            )
        if name in self.needs:
            raise self.order_error(name, span)
        raise self.unknown_name(name, span)

    def order_error(self, name: str, span: Span) -> ExpressionError:
        """Return the error for a local name that is used on its own line or before it."""
        if name == self.current:
            message = f"the definition of `{name}` uses `{name}`"
            return wrong(
                span,
                "cyclic-name",
                message,
                "a name has one value: give the second value another name",
            )
        if self.current is not None and self.current in self.reachable(name):
            message = f"the definitions of `{self.current}` and `{name}` use each other"
            return wrong(span, "cyclic-name", message, "define one of them without the other")
        hint = f"move the line `{name} = ...` up"
        return wrong(span, "used-before-definition", f"`{name}` is used before it is defined", hint)

    def reachable(self, name: str) -> set[str]:
        found: set[str] = set()
        waiting = [name]
        while waiting:
            for needed in self.needs.get(waiting.pop(), frozenset()) - found:
                found.add(needed)
                waiting.append(needed)
        return found

    def unknown_name(self, name: str, span: Span) -> ExpressionError:
        if name in self.scope.elsewhere:
            return wrong(
                span, "unknown-name", f"`{name}` cannot be used here", self.scope.elsewhere[name]
            )
        known = sorted({*self.scope.names, *self.scope.buffers, *self.locals})
        hint = None if closest(name, known) else language.NAME_HINTS.get(name)
        hint = hint or did_you_mean(name, known) or "declare it under `buffers` or `params`"
        return wrong(span, "unknown-name", f"{shown(name)} is not defined", hint)

    def unary(self, node: ast.UnaryOp, inner: int) -> Built:
        operand, start = self.expression(node.operand, inner), self.span(node)
        match node.op:
            case ast.USub():
                return self.apply("neg", "-", (operand,), start._replace(length=1))
            case ast.Not():
                return self.apply("not", "not", (operand,), start._replace(length=3))
            case ast.Invert():
                row = "invert" if operand.type.integral else "not"
                return self.apply(row, "~", (operand,), start._replace(length=1))
        if operand.type is Type.BOOL:
            hint = "use `where(condition, 1, 0)` to count a bool"
            raise wrong(
                start._replace(length=1), "wrong-type", "`+` expects numbers, got a bool", hint
            )
        return operand

    def binary(self, node: ast.BinOp, inner: int) -> Built:
        if isinstance(node.op, ast.Pow):
            return self.power(node, inner)
        operator = language.BINARY.get(type(node.op))
        if operator is None:
            raise self.no_operator(node.op, node.left, node.right)
        row, symbol = operator
        operands = (self.expression(node.left, inner), self.expression(node.right, inner))
        if operands[1].type is not Type.BOOL:
            self.check_domain(row, operands[1].node, node.right)
        span = self.between(node.left, node.right, symbol)
        if same := self.same_truth(row, symbol, operands, span):
            return same
        if symbol == "^" or all(operand.type.integral for operand in operands):
            row = language.OF_BITS.get(row, row)
        return self.apply(row, symbol, operands, span)

    def same_truth(
        self, row: str, symbol: str, operands: Sequence[Built], span: Span
    ) -> Built | None:
        """Return `==` or `!=` of two bools as a choice between one of them and its negation."""
        if row not in ("eq", "ne") or any(operand.type is not Type.BOOL for operand in operands):
            return None
        a, b = operands
        other = self.apply("not", symbol, (b,), span)
        return self.apply("where", symbol, (a, b, other) if row == "eq" else (a, other, b), span)

    def check_domain(self, row: str, operand: Node, at: ast.expr) -> None:
        if found := misfit(row, operand, self.scope.constants):
            raise wrong(self.span(at), *found)

    def no_operator(self, operator: ast.AST, left: ast.expr, right: ast.expr) -> ExpressionError:
        symbol, hint = language.NO_OPERATOR[type(operator)]
        span = self.between(left, right, symbol)
        return wrong(span, "not-in-language", f"`{symbol}` is not part of the language", hint)

    def power(self, node: ast.BinOp, inner: int) -> Built:
        """Return `x ** n` as multiplications by repeated squaring: `x**4` is `(x*x) * (x*x)`."""
        base = self.expression(node.left, inner)
        exponent = node.right.value if isinstance(node.right, ast.Constant) else None
        if type(exponent) is not int or not 1 <= exponent <= MAX_EXPONENT:
            span = self.span(node.right)
            written = self.lines[span.line - 1][span.column - 1 :][: span.length]
            hints = {"0.5": "use `sqrt(x)`", "-0.5": "use `rsqrt(x)`", "-1": "write `1 / x`"}
            hint = hints.get(written, "use `exp2(y * log2(x))` for other powers of a positive x")
            message = f"an exponent must be an integer literal from 1 to {MAX_EXPONENT}"
            raise wrong(span, "bad-exponent", message, hint)
        span = self.between(node.left, node.right, "**")

        def multiplied(n: int) -> Built:
            if n == 1:
                return base
            half = multiplied(n // 2)
            square = self.apply("mul", "**", (half, half), span)
            return self.apply("mul", "**", (square, base), span) if n % 2 else square

        # Terms of a power with the same factors are counted once.
        terms = math.comb(base.terms + exponent - 1, exponent)
        check_expansion(terms, exponent * base.factors, span)
        return multiplied(exponent)._replace(terms=terms)

    def comparison(self, node: ast.Compare, inner: int) -> Built:
        operands = [node.left, *node.comparators]
        for i, operand in enumerate(operands):
            check_precedence(operand, node.ops[min(i, len(node.ops) - 1)], self.lines)
        values = [self.expression(operand, inner) for operand in operands]
        chain: Built | None = None
        for i, operator in enumerate(node.ops):
            if type(operator) not in language.COMPARISONS:
                raise self.no_operator(operator, operands[i], operands[i + 1])
            row, symbol = language.COMPARISONS[type(operator)]
            span = self.between(operands[i], operands[i + 1], symbol)
            pair = (values[i], values[i + 1])
            link = self.same_truth(row, symbol, pair, span) or self.apply(row, symbol, pair, span)
            chain = link if chain is None else self.apply("and", symbol, (chain, link), span)
        assert chain is not None
        return chain

    def call(self, node: ast.Call, inner: int) -> Built:
        if isinstance(node.func, ast.Attribute):
            raise self.attribute_error(node.func)
        if not isinstance(node.func, ast.Name):
            message = "only functions of the language can be called"
            raise wrong(
                self.span(node.func),
                "bad-call",
                message,
                f"choose from {', '.join(language.CALLABLE)}",
            )
        name = node.func.id
        span = self.span(node.func)
        self.check_dunder(name, span)
        if name not in language.CALLABLE:
            raise language.no_function(name, span, self.scope, self.locals)
        if node.keywords:
            keyword = self.span(node.keywords[0])
            raise wrong(
                keyword,
                "bad-call",
                f"`{name}` takes no keyword arguments",
                "pass the arguments by position",
            )
        arguments = [self.expression(argument, inner) for argument in node.args]
        low, high = TABLE[name].arity
        if len(arguments) < low or (high is not None and len(arguments) > high):
            need = f"{low} or more" if high is None else str(low)
            noun = "argument" if need == "1" else "arguments"
            form = TABLE[name].spelled["python"].form.format("x", "y", "z")
            message = f"`{name}` takes {need} {noun}, got {len(arguments)}"
            raise wrong(self.span(node), "bad-call", message, f"write `{form}`")
        if high is not None:
            return self.apply(name, name, tuple(arguments), span)
        built = arguments[0]
        for argument in arguments[1:]:
            built = self.apply(name, name, (built, argument), span)
        return built

    def attribute_error(self, node: ast.Attribute) -> ExpressionError:
        span = self.span(node)
        self.check_dunder(node.attr, span)
        written = self.lines[span.line - 1][span.column - 1 :][: span.length]
        message = f"{shown(written)}: attribute access is not part of the language"
        return wrong(span, "attribute-access", message, language.attribute_hint(node.attr))

    def read(self, node: ast.Subscript, inner: int) -> Built:
        if isinstance(node.value, ast.Subscript):
            message = "a buffer must be indexed once, with all its indices"
            raise wrong(
                self.span(node),
                "bad-index",
                message,
                "write `buffer[i, j]` instead of `buffer[i][j]`",
            )
        if isinstance(node.value, ast.Attribute):
            raise self.attribute_error(node.value)
        at = self.span(node.value)
        if not isinstance(node.value, ast.Name):
            raise wrong(
                at, "bad-index", "only declared buffers can be indexed", "write `buffer[i]`"
            )
        name = node.value.id
        self.check_dunder(name, at)
        buffer = self.scope.buffers.get(name)
        if buffer is None:
            if (
                name in self.scope.names
                or name in self.locals
                or name == "inf"
                or name in language.CALLABLE
            ):
                raise wrong(
                    at,
                    "bad-index",
                    f"`{name}` is not a buffer",
                    "index a buffer that `buffers` declares",
                )
            hint = did_you_mean(name, sorted(self.scope.buffers)) or "declare it under `buffers`"
            raise wrong(at, "unknown-name", f"{shown(name)} is not defined", hint)
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        built = [self.index(index, inner, buffer, name, axis) for axis, index in enumerate(indices)]
        for index, value in zip(indices, built, strict=True):
            if not value.type.integral:
                message = f"an index must be an integer, not {language.kind_of(value.type)}"
                hint = language.integral(value.node)
                raise wrong(self.span(index), "wrong-type", message, hint)
        if len(built) != buffer.rank:
            noun = "index" if buffer.rank == 1 else "indices"
            message = f"`{name}` takes {buffer.rank} {noun}, got {len(built)}"
            hint = f"write `{language.indexed(name, buffer.rank)}`"
            raise wrong(self.span(node), "bad-index", message, hint)
        tree = Read(name, tuple(value.node for value in built), buffer.element)
        return limited(grown(tree, built, (1,) * len(built)), self.span(node))

    def index(self, node: ast.expr, inner: int, buffer: BufferType, name: str, axis: int) -> Built:
        """Build an index: a rounded real number becomes an integer, and a negative literal counts
        from the end.
        """
        if (last := lengths.from_end(node, name, axis, buffer, self.span(node))) is not None:
            return of_tree(last)
        built = self.expression(node, inner)
        if isinstance(built.node, Call) and built.node.fn in language.WHOLE:
            return self.apply("int", "int", (built,), self.span(node))
        return built

    def apply(self, row: str, symbol: str, arguments: Sequence[Built], span: Span) -> Built:
        try:
            type_ = TABLE[row].typed(tuple(argument.type for argument in arguments))
        except TypeRuleError as error:
            raise wrong(span, "wrong-type", f"`{symbol}` {error}", error.hint) from None
        built = grown(
            Call(row, tuple(a.node for a in arguments), type_), arguments, times_printed(row)
        )
        if row in ("add", "sub"):
            terms, factors = sum(a.terms for a in arguments), max(a.factors for a in arguments)
        elif row in ("mul", "div", "neg"):
            terms, factors = (
                math.prod(a.terms for a in arguments),
                sum(a.factors for a in arguments),
            )
        else:
            terms = factors = 1
        if symbol != "**":
            check_expansion(terms, factors, span)
        return limited(built._replace(terms=terms, factors=factors), span)

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> Span:
        return span_of(node, self.lines)

    def between(self, left: ast.expr, right: ast.expr, symbol: str) -> Span:
        return span_between(left, right, symbol, self.lines)
