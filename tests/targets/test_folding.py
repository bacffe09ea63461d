"""Lines that are too long are broken between operands, and say the same."""

from __future__ import annotations

import ast
import textwrap

import pytest

from kgen.expr.spelling import Spelling
from kgen.render.environment import environment, template_root
from kgen.targets.code import (
    CUDA,
    TRITON,
    Assign,
    Code,
    If,
    Name,
    Op,
    Run,
    Statement,
    as_type,
    assign,
    conjunction,
    load,
    minimum,
    op,
    row,
    total,
)
from kgen.targets.folding import Bracketed, folded

QUERIES, KEYS = op("{0}[:, None]", "queries"), op("{0}[None, :]", "keys")
ADDRESS = total(
    Name("table_ptr"), *(row("mul", f"index_{n}", f"stride_table_{n}") for n in range(3))
)
MASK = conjunction(
    [
        op("{0}[None, :]", "live"),
        row("ge", QUERIES, KEYS),
        row("lt", row("sub", QUERIES, KEYS), "WINDOW"),
    ]
)
assert MASK is not None
READ = load(ADDRESS, MASK)
VALUES: list[Code] = [
    MASK,
    READ,
    as_type(READ, "float32"),
    row("ne", READ, 0),
    row("mul", row("add", READ, "shift"), row("sub", "scale", row("mul", READ, 2))),
    minimum(minimum(READ, row("add", "last", READ)), row("neg", "SK")),
    row("and", "first", row("and", MASK, row("and", row("or", "second", MASK), "third"))),
    row(
        "sub",
        READ,
        row("sub", ADDRESS, row("add", READ, row("mul", READ, row("mul", ADDRESS, READ)))),
    ),
    row("where", MASK, row("mul", READ, "slope"), row("neg", READ)),
]
STATEMENTS: list[Statement] = [
    *(assign("value", value) for value in VALUES),
    *(Assign(("total",), (value,), sign="+=", note="a sum") for value in VALUES),
    Assign(("first", "second"), (op("search({0}, {1})", ADDRESS, MASK),)),
    Run(op("{tl}.store({0}, {1}, mask={2})", ADDRESS, READ, MASK)),
    If(MASK, (assign("value", READ),), (assign("value", ADDRESS),)),
    If(Name("TMA"), (assign("value", READ),), (If(MASK, (Run(ADDRESS),), (Run(READ),)),)),
]


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda one: str(one.lines()[0])[:40])
def test_a_broken_statement_says_the_same(statement: Statement) -> None:
    (whole,) = ast.parse("\n".join(statement.lines())).body
    for width in range(24, 140, 4):
        lines = folded([statement], TRITON, width)
        assert ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.Module([whole], []))


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda one: str(one.lines()[0])[:40])
def test_a_broken_statement_fits(statement: Statement) -> None:
    for width in range(72, 140, 4):
        assert max(map(len, folded([statement], TRITON, width))) <= width


def test_what_fits_is_one_line() -> None:
    assert folded([assign("value", READ)], TRITON, 400) == assign("value", READ).lines()


def test_how_lines_are_broken() -> None:
    mask = """
        value = tl.load(
            table_ptr + index_0 * stride_table_0 + index_1 * stride_table_1 + index_2 * stride_table_2,
            mask=live[None, :] & (queries[:, None] >= keys[None, :]) & (queries[:, None] - keys[None, :] < WINDOW),
            other=0,
        ) != 0
    """  # noqa: E501
    assert folded([assign("value", row("ne", READ, 0))], TRITON, 110) == textwrap.dedent(
        mask
    ).strip().split("\n")
    chain = """
        value = (
            live[None, :] & (queries[:, None] >= keys[None, :])
            & (queries[:, None] - keys[None, :] < WINDOW)
        )
    """
    assert MASK is not None
    assert folded([assign("value", MASK)], TRITON, 60) == textwrap.dedent(chain).strip().split("\n")


def test_brackets_within_brackets_grow_as_their_number_does() -> None:
    def text(times: int) -> str:
        value = READ
        for n in range(times):
            value = minimum(value, row("mul", f"operand_{n:03}", "scale"))
        (whole,) = assign("value", value).lines()
        lines = folded([assign("value", value)], TRITON, 120)
        assert ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.parse(whole))
        return "\n".join(lines)

    once, twice, thrice = (len(text(times)) for times in (20, 40, 60))
    assert thrice - twice == twice - once


def test_lines_of_cuda_stay() -> None:
    assert len(folded([assign("value", ADDRESS)], CUDA, 20)) == 1


def test_operands_in_brackets() -> None:
    call = Bracketed("_forward(", ("q", "k", "v", "scale=scale"), ")")
    assert call.lines(31) == ["_forward(q, k, v, scale=scale)"]
    assert call.lines(20) == ["_forward(", "    q, k, v,", "    scale=scale,", ")"]
    assert Bracketed("def _forward(", (), "):").lines(4) == ["def _forward():"]


def test_templates_break_what_has_a_line_to_itself() -> None:
    operands = [f"operand_{n}" for n in range(20)]
    text = "def f():\n    {{ operands | bracketed('return g(') }}\n    {{ statement }}\n"
    template = environment(template_root()).from_string(text)
    lines = template.render(operands=operands, statement=assign("value", READ)).split("\n")
    assert lines[1] == "    return g("
    assert lines[2] == f"        {', '.join(operands[:10])},"
    assert max(map(len, lines)) <= 120
    assert (
        ast.unparse(ast.parse("\n".join(lines)).body[0].body[0])
        == f"return g({', '.join(operands)})"
    )  # type: ignore[attr-defined]


class Counted(str):
    """A form that counts how often it is filled in."""

    times = 0

    def format(self, *operands: object) -> str:
        Counted.times += 1
        return super().format(*operands)


@pytest.mark.parametrize("form", ["{0} + {1}", "call({0}, {1})"])
def test_each_value_is_spelled_a_few_times_however_deep(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counted, "times", 0)
    value: Code = Name("first")
    for number in range(60):
        value = Op("add", (value, Name(f"operand_{number}")), {TRITON: Spelling(Counted(form))})
    assert len(folded([assign("result", value)], TRITON, 60)) > 10
    assert Counted.times < 10 * 60
