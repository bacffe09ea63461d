"""The CuTe DSL text of an expression has the value of the expression."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.expr import type_rules
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Type, Var, variables
from kgen.expr.parse import parse_expression
from kgen.expr.scope import Scope
from kgen.targets.code import CUTE, Name, row, spell
from kgen.targets.cute.printer import value
from kgen.verify.evaluate import evaluate

REAL = torch.float64


def in_python(text: str, **values: object) -> float:
    """Evaluate the text with Python's numbers instead of the kernel's."""
    own = {
        name: getattr(math, name)
        for name in ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos")
    }
    own |= {name: getattr(math, name) for name in ("atan", "ceil", "erf", "expm1", "log1p", "pow")}
    functions = SimpleNamespace(**own, rsqrt=lambda x: x**-0.5, floor=math.floor, roundeven=round)
    names = {
        "cute": SimpleNamespace(math=functions),
        "cutlass": SimpleNamespace(
            select_=lambda c, a, b: a if c else b, min=min, max=max, Int32=int
        ),
        "Float32": float,
    }
    return float(eval(text, {"__builtins__": {"float": float}}, names | values))


def written(tree, **names) -> str:
    """Return the text of an expression. Variables keep their names, except those in `names`."""
    return spell(value(tree, {v: Name(v) for v in variables(tree)} | names), CUTE)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="math.exp2 came with Python 3.11")
@pytest.mark.parametrize("name", [name for name in TABLE if name not in ("and", "or", "not")])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_functions_are_spelled(name, data):
    of = TABLE[name]
    integers = of.typed in (type_rules.integral, type_rules.bits)
    count = of.arity[0]
    numbers = (
        st.integers(-9, 9)
        if integers
        else st.floats(0.1, 3.0, allow_nan=False).map(lambda x: round(x, 3))
    )
    values = [data.draw(numbers) for _ in range(count)]
    kind = Type.INT if integers else Type.FLOAT
    args = [Var("xyz"[at], kind) for at in range(count)]
    if integers and count > 1 and values[1] == 0:
        values[1] = 3
    if name in ("lshift", "rshift"):
        values[1] = abs(values[1])
    if name == "where":
        condition = Call("lt", (args[0], args[1]), Type.BOOL)
        args[0] = condition
    tree = Call(name, tuple(args), of.typed(tuple(arg.type for arg in args)))
    env = dict(zip("xyz", values, strict=False))
    got = in_python(written(tree), **env)
    tensors = {n: torch.tensor(v, dtype=torch.int64 if integers else REAL) for n, v in env.items()}
    want = float(evaluate(tree, tensors, torch, REAL))
    assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("a - (b - c)", "a - (b - c)"),
        ("(a + b) * -c", "(a + b) * -c"),
        ("a / (b * c)", "a / (b * c)"),
        ("where(i < 3 and not i == 1, a, b)", "cutlass.select_((i < 3) & ~(i == 1), a, b)"),
        ("(i + 2) % 3 + a", "(i + 2) - (i + 2) // 3 * 3 + a"),
        ("exp(i) + exp(2.0)", "cute.math.exp(Float32(i)) + cute.math.exp(Float32(2.0))"),
    ],
)
def test_brackets_are_where_they_must_be(text, spelled):
    scope = Scope({"a": Type.FLOAT, "b": Type.FLOAT, "c": Type.FLOAT, "i": Type.INT}, {}, {})
    tree = parse_expression(text, scope, Type.FLOAT)
    text = written(tree)
    for values in ({"a": 0.5, "b": 1.5, "c": 2.0, "i": 1}, {"a": 3.0, "b": 0.25, "c": 0.5, "i": 4}):
        if "~" not in text:  # `~` of a truth value is an integer in Python
            tensors = {
                n: torch.tensor(v, dtype=torch.int64 if n == "i" else REAL)
                for n, v in values.items()
            }
            want = float(evaluate(tree, tensors, torch, REAL))
            assert in_python(text, **values) == pytest.approx(want)
    assert text == spelled


def test_a_name_that_is_an_expression_is_bracketed():
    tree = Call("div", (Var("h", Type.INT), Var("HV", Type.INT)), Type.FLOAT)
    assert written(tree, h=Name("v_head"), HV=row("mul", "H", "GROUP")) == "v_head / (H * GROUP)"
    assert written(Const(-1.0, Type.FLOAT)) == "-1.0"
