"""Values and statements of kernels: their text in each language, and properties of their trees."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from kgen.expr.functions import TABLE
from kgen.expr.nodes import Const, Type
from kgen.expr.spelling import MODULES
from kgen.targets.code import (
    CUDA,
    CUTE,
    GLUON,
    LANGUAGES,
    NOTHING,
    TORCH,
    TRITON,
    Assign,
    Code,
    If,
    Name,
    Op,
    Repeat,
    Run,
    as_type,
    assign,
    at_first_use,
    atom,
    calls,
    cdiv,
    codes,
    conjunction,
    lines_of,
    load,
    maximum,
    needed,
    number,
    op,
    over,
    printed,
    renamed,
    row,
    spell,
    text,
    times,
    uses_of,
    with_names,
)
from kgen.targets.cuda.statements import stored_at_once, without_copies

A, B, C = Name("a"), Name("b"), Name("c")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (row("sub", A, row("sub", B, C)), "a - (b - c)"),
        (row("sub", row("sub", A, B), C), "a - b - c"),
        (row("mul", row("add", A, B), C), "(a + b) * c"),
        (row("and", row("lt", A, B), row("ge", B, C)), "(a < b) & (b >= c)"),
        (over(over(A, B), C), "a // b // c"),
        (times(row("add", A, B), text("-1", 10)), "(a + b) * (-1)"),
        (atom(row("add", A, B), " * {0}"), " * (a + b)"),
        (atom(cdiv(A, B), " * {0}"), " * tl.cdiv(a, b)"),
        (as_type(row("mul", A, B), "int64"), "(a * b).to(tl.int64)"),
        (load(row("add", A, B), row("lt", B, C)), "tl.load(a + b, mask=b < c, other=0)"),
        (op("{0}[:, None]", A), "a[:, None]"),
        (NOTHING, ""),
    ],
)
def test_brackets(value: Code, written: str) -> None:
    assert str(value) == f"{value}" == written


def test_languages() -> None:
    value = row("tanh", maximum(load(A), row("exp2", B)))
    assert spell(value) == "_tanh(tl.maximum(tl.load(a), tl.exp2(b)))"
    assert spell(value, GLUON) == "_tanh_gluon(gl.maximum(gl.load(a), gl.exp2(b)))"
    assert spell(row("sigmoid", A)) == "tl.sigmoid(a)"
    assert spell(row("sigmoid", A), GLUON) == "_sigmoid_gluon(a)"


def test_a_value_is_spelled_in_each_language() -> None:
    value = row(
        "where",
        row("not", row("lt", A, B)),
        row("sub", A, row("sub", B, C)),
        number(Const(-2, Type.INT)),
    )
    assert {language: spell(value, language) for language in LANGUAGES} == {
        TRITON: "tl.where(~(a < b), a - (b - c), -2)",
        GLUON: "gl.where(~(a < b), a - (b - c), -2)",
        CUDA: "!(a < b) ? a - (b - c) : -2",
        CUTE: "cutlass.select_(~(a < b), a - (b - c), -2)",
        TORCH: "torch.where(~(a < b), a - (b - c), -2)",
    }
    with pytest.raises(KeyError, match="tl"):
        spell(load(A), TORCH)


@pytest.mark.parametrize("fn", TABLE)
def test_every_function_has_both_languages(fn: str) -> None:
    """A spelling never uses the module of the other language."""
    for language in MODULES:
        other = next(m for name, (m, _) in MODULES.items() if name != language)
        form = TABLE[fn].spelled[language].form
        assert "{tl}" not in form
        assert f"{other}." not in form


def test_printed_is_python() -> None:
    """The text has enough brackets: Python computes the value of the tree."""
    value = row("sub", A, row("mul", row("add", B, C), row("neg", row("sub", B, A))))
    found = eval(compile(ast.parse(str(value), mode="eval"), "", "eval"), {"a": 2, "b": 3, "c": 5})
    assert found == 2 - (3 + 5) * -(3 - 2)


def test_names() -> None:
    value = op("_f({0}, {1}, key={2})", A, row("mul", B, 2), "c")
    assert value.names == {"a", "b", "2", "c"}
    assert uses_of([assign("x", value), value, Assign(("y",), (A,), "+=")]) == {
        "a",
        "b",
        "2",
        "c",
        "y",
    }
    assert calls(row("add", A, row("tanh", B)), "tanh")
    assert not calls(row("add", A, Name("tanh")), "tanh")


def test_renamed() -> None:
    assert str(renamed(row("mul", A, B), {"a": row("add", B, C)})) == "(b + c) * b"
    branch = If(Name("MASKED"), (assign("x", row("mul", "ds", A)),), (Assign(("ds",), (A,), "+="),))
    moved = with_names(branch, {"ds": "p", "x": "factor"})
    assert moved.lines() == ["if MASKED:", "    factor = p * a", "else:", "    p += a"]
    assert (moved.defines, moved.uses) == ({"factor", "p"}, {"MASKED", "p", "a"})


def test_a_condition_that_is_all_of_an_else_is_an_elif() -> None:
    def one(name: str) -> Assign:
        return assign(name, A)

    inner = If(Name("MASKED"), (one("y"),), (one("z"),), note="why")
    lines = ["if TMA:", "    x = a", "elif MASKED:  # why", "    y = a", "else:", "    z = a"]
    assert If(Name("TMA"), (one("x"),), (inner,)).lines() == lines
    two = If(Name("TMA"), (one("x"),), (one("v"), replace(inner, other=())))
    assert two.lines() == [
        *lines[:2],
        "else:",
        "    v = a",
        "    if MASKED:  # why",
        "        y = a",
    ]


def test_needed() -> None:
    """Required statements are found directly or through others, and once if they define several
    names.
    """
    statements = [
        assign("a", text("1")),
        assign("b", row("add", A, 1)),
        Assign(("c", "d"), (B, A)),
        assign("e", C),
        assign("f", Name("b")),
    ]
    assert [s.names_in_order for s in needed(statements, ["e"])] == [
        ("a",),
        ("b",),
        ("c", "d"),
        ("e",),
    ]
    assert needed(statements, ["x"]) == []


def test_at_first_use() -> None:
    """The name of a keyword argument is not a use."""
    statements = [assign("x", load(A, B)), assign("y", Name("live"))]
    defined = [assign("live", text("1")), assign("mask", row("and", "live", B))]
    assert [s.lines()[0] for s in at_first_use(statements, defined)] == [
        "x = tl.load(a, mask=b, other=0)",
        "live = 1",
        "y = live",
        "mask = live & b",
    ]


def test_lines() -> None:
    statements = [
        Assign(("a", "b"), (text("1"), C)),
        assign("x", A, note="why"),
        Run(op("{tl}.atomic_add({0}, {1})", A, B)),
        If(row("gt", A, 0), (assign("y", A),), note="what"),
    ]
    assert lines_of(statements, GLUON) == [
        "a, b = 1, c",
        "x = a  # why",
        "gl.atomic_add(a, b)",
        "if a > 0:  # what",
        "    y = a",
    ]
    assert [str(code) for code in codes(statements)] == [
        "1",
        "c",
        "a",
        "tl.atomic_add(a, b)",
        "a > 0",
        "a",
    ]


def test_templates_get_text() -> None:
    fields = {
        "one": A,
        "lines": [assign("x", load(A)), "y = 1"],
        "deep": [{"v": row("exp2", A)}],
        "n": 3,
    }
    assert printed(fields, GLUON) == {
        "one": "a",
        "lines": ["x = gl.load(a)", "y = 1"],
        "deep": [{"v": "gl.exp2(a)"}],
        "n": 3,
    }
    assert printed(assign("x", A), TRITON) == "x = a"


def test_conjunction() -> None:
    assert conjunction([]) is None
    assert conjunction([A]) is A
    assert isinstance(conjunction([A, B]), Op)


def test_operations_are_told_apart() -> None:
    """Operations are compared by their row and operands, not by their text."""
    assert row("mul", A, B) == times(A, B)
    assert row("mul", A, B) != row("add", A, B)
    assert load(A) != load(A, B)
    assert len({row("mul", A, B), times(A, B), row("mul", B, A)}) == 2


def test_cuda_has_types_and_braces():
    total, part = Assign(("sum[i]",), (row("mul", A, B),), "+="), assign("c", A)
    statements = [
        Assign(("x",), (row("and", row("lt", A, B), row("not", C)),), type="bool"),
        If(Name("N > 0"), (total,)),
        If(Name("N > 0"), (total, part), (part,)),
        If(Name("N > 0"), (Run(op("store({0})", A)), assign("c", B, note="how")), note="why"),
    ]
    assert lines_of(statements, CUDA) == [
        "const bool x = a < b && !c;",
        "if constexpr (N > 0) sum[i] += a * b;",
        *(
            "if constexpr (N > 0) {",
            "    sum[i] += a * b;",
            "    c = a;",
            "} else {",
            "    c = a;",
            "}",
        ),
        *("if constexpr (N > 0) {  // why", "    store(a);", "    c = b;  // how", "}"),
    ]


def test_statements_of_cuda_read_as_written_by_hand():
    def new(name, value):
        return Assign((name,), (value,), type="float")

    def out(name, value):
        return Assign((name,), (value,))

    product = row("mul", A, B)
    copied = [new("h", A), new("y", row("mul", Name("h"), B)), out("out[i]", Name("y"))]
    assert lines_of(without_copies(copied), CUDA) == ["const float y = a * b;", "out[i] = y;"]
    assert lines_of(stored_at_once(without_copies(copied)), CUDA) == ["out[i] = a * b;"]
    # A name stays if it is used twice, or is only a part of the stored value.
    twice = [
        new("y", product),
        out("out[i]", Name("y")),
        If(Name("N > 0"), (out("sum[i]", Name("y")),)),
    ]
    part = [new("y", product), out("out[i]", row("neg", Name("y")))]
    for statements in (twice, part):
        assert stored_at_once(statements) == statements


def test_a_loop_that_repeats() -> None:
    step = Assign(("n",), (op("skip({0}, {1})", "n", "ring"),))
    loop = Repeat(Name("count"), (Run(op("wait({0})", "ring"), "for data"), step), "in order")
    assert lines_of([loop]) == [
        "for _ in range(count):  # in order",
        "    wait(ring)  # for data",
        "    n = skip(n, ring)",
    ]
    assert (loop.defines, loop.uses) == ({"n"}, {"count", "n", "ring"})
    other = with_names(loop, {"n": "m", "count": "more"})
    assert (other.defines, other.uses) == ({"m"}, {"more", "m", "ring"})
    assert needed([assign("count", A), loop, assign("x", B)], ["n"]) == [assign("count", A), loop]


def test_a_call_with_a_note() -> None:
    assert Run(op("wait()"), "for data").lines(CUDA) == ["wait();  // for data"]
    assert Run(op("wait()"), "for data") == Run(op("wait()"))
