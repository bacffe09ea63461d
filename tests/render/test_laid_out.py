"""The layout of emitted files keeps the program, and breaks lines at commas, operators and
words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest

from kgen.render.layout import laid_out, laid_out_in_c
from kgen.render.program import program
from kgen.targets.folding import COLUMNS

GENERATED = Path(__file__).resolve().parents[2] / "generated"
A, B = "a" * 50, "b" * 50


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"f({A}, {B}, {A})", f"f(\n    {A}, {B},\n    {A},\n)"),
        (f"x = g() and {A} or {A} or {B}", f"x = (\n    g() and {A} or {A}\n    or {B}\n)"),
        (f"x: tl.constexpr = {A} + {B} + {A}", f"x: tl.constexpr = (\n    {A} + {B}\n    + {A}\n)"),
        (f"if {A} and {B} and {A}:\n    pass", f"if (\n    {A} and {B}\n    and {A}\n):\n    pass"),
        (f"{A}, {B}, {A} = x", f"(\n    {A}, {B},\n    {A},\n) = x"),
        (f"return {A}, {B}, {A}", f"return (\n    {A}, {B},\n    {A},\n)"),
        (f"x = [{A} for {B} in {A}]", f"x = [\n    {A}\n    for {B} in {A}\n]"),
        (f"f({A}, lambda {B}, *_: {A})", f"f(\n    {A},\n    lambda {B}, *_: {A},\n)"),
        (f"f(\n    {A}, {B}, {A},\n)", f"f(\n    {A}, {B},\n    {A},\n)"),
        (f"x = {A}(1)  # {B} {B}", f"# {B} {B}\nx = {A}(1)"),
    ],
)
def test_a_long_line_of_python_is_broken(text: str, expected: str) -> None:
    assert laid_out(text) == expected
    assert program(laid_out(text).encode(), ".py") == program(text.encode(), ".py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(\n    a, b,\n)", "f(a, b)"),
        ("x = (\n    a,\n)", "x = (a,)"),
        ("f(\n    a,\n    b,\n)", "f(\n    a,\n    b,\n)"),
        ("f(\n    a  # why\n)", "f(\n    a  # why\n)"),
        ("f(\n    g(\n        a\n    ),\n)", "f(g(a))"),
        ('f(\n    """a\n    b""",\n)', 'f(\n    """a\n    b""",\n)'),
    ],
)
def test_a_short_line_joins_its_brackets(text: str, expected: str) -> None:
    assert laid_out(text) == expected


@pytest.mark.parametrize(("layout", "end"), [(laid_out, ""), (laid_out_in_c, ";")])
def test_nested_brackets_are_indented_up_to_a_depth(layout: Callable[[str], str], end: str) -> None:
    """The text grows with the number of brackets, and its lines keep room for their operands."""
    sizes = []
    for depth in (20, 40, 60):
        text = reduce(lambda inner, _: f"f({A}, {inner})", range(depth), "x") + end
        lines = layout(text).split("\n")
        assert "".join(lines).replace(" ", "").replace(",)", ")") == text.replace(" ", "")
        assert max(map(len, lines)) <= COLUMNS
        assert {len(line) - len(line.lstrip()) for line in lines} == {*range(0, 36, 4)}
        sizes.append(sum(map(len, lines)))
    assert sizes[2] - sizes[1] <= sizes[1] - sizes[0] + COLUMNS


def test_a_message_is_broken_after_a_comma() -> None:
    text = (
        f'raise ValueError(f"{A}: x must be [{{a, b}}] on {{x.device}}, got {{list(x.shape)}} '
        f'on {{y.device}}")'
    )
    first, second = (
        f'f"{A}: x must be [{{a, b}}] on {{x.device}}, "',
        'f"got {list(x.shape)} on {y.device}"',
    )
    assert laid_out(text) == f"raise ValueError(\n    {first}\n    {second}\n)"


def test_a_long_docstring_gets_a_summary() -> None:
    assert laid_out(f'def f():\n    """{A}. {B} {B}."""') == (
        f'def f():\n    """{A}.\n\n    {B} {B}.\n    """'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"    f({A}, {B}, {A});", f"    f(\n        {A}, {B},\n        {A}\n    );"),
        (f"float {A}{{1}}, {B}{{2}}, c{A}{{3}};", f"float {A}{{1}}, {B}{{2}},\n    c{A}{{3}};"),
        (f"int x; /* {A} {B} {A} */", f"/* {A} {B}\n * {A} */\nint x;"),
        (f"// {A} {B} {A}", f"// {A} {B}\n// {A}"),
    ],
)
def test_a_long_line_of_c_is_broken(text: str, expected: str) -> None:
    assert laid_out_in_c(text) == expected


@pytest.mark.parametrize(
    "path", sorted(GENERATED.glob("*/triton.py")), ids=lambda path: path.parent.name
)
def test_layout_is_stable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert laid_out(text) == text


def test_narrow_layout_keeps_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgen.render.layout.COLUMNS", 72)
    for path in sorted(GENERATED.glob("*/*.py"))[::5]:
        text = path.read_text(encoding="utf-8")
        assert program(laid_out(text).encode(), ".py") == program(text.encode(), ".py"), path
    assert COLUMNS == 120
