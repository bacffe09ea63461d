"""Comments, docstrings and layout are no part of a program; everything else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.render.program import program

ROOT = Path(__file__).resolve().parents[2]

PYTHON = '''"""Module."""
# A comment.
import torch


class K:
    """A class."""

    n = 1
    """An attribute."""


def f(x, *, y=None):
    """A function."""
    total = g(x, y, "a" "b")  # why
    return f"{total:>{x}} {y!r}"
'''
SAME_PYTHON = """import torch
class K:
    n = 1
def f(x, *, y=None):
    total = g(
        x,
        y,
        "ab",
    )
    return f"{total:>{x}} {y!r}"
"""

C = """// One line \\
that goes on
#define N 1'000 // why
/* block
   comment */ const char* s = "// text /* text */";
char c = '"';  int n = 0x1'0; auto r = R"x(// raw )" )x";
"""
SAME_C = """#define N 1'000
  const char* s = "// text /* text */";
char c = '"';  int n = 0x1'0; auto r = R"x(// raw )" )x";
"""


def of(text: str, suffix: str = ".py") -> bytes:
    return program(text.encode(), suffix)


def test_what_is_no_part_of_a_program() -> None:
    assert of(PYTHON) == of(SAME_PYTHON)
    assert of(C, ".cu") == of(SAME_C, ".cu")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("n = 1", "n = 1.0"),
        ("n = 1", "n = True"),
        ("n = 1", "n: int = 1"),
        ('"a" "b"', '"a", "b"'),
        ("y=None", "y=0"),
        ("*, y", "y"),
        ("y!r", "y!s"),
        (":>{x}", ":<{x}"),
        ("def f", "async def f"),
        ("def f", "@g\ndef f"),
        ("import torch", "import torch as torch2"),
        ("g(x, y,", "g(x, *y,"),
        ("    total =", "    x\n    total ="),
    ],
)
def test_what_is_a_part_of_a_program(old: str, new: str) -> None:
    assert PYTHON.count(old) == 1
    assert of(PYTHON) != of(PYTHON.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// text", "// words"),
        ("1'000", "1'001"),
        ("// raw", "// cooked"),
        ("'\"'", "'x'"),
        ("0x1'0", "0x2'0"),
    ],
)
def test_what_is_a_part_of_a_program_in_c(old: str, new: str) -> None:
    assert C.count(old) == 1
    assert of(C, ".cu") != of(C.replace(old, new), ".cu")


def test_names_made_of_the_code_do_not_count() -> None:
    name, other = "kgen_0123456789abcdef", "kgen_fedcba9876543210"
    assert of(f'Library("{name}")') == of(f'Library("{other}")') != of('Library("kgen_")')


def test_what_does_not_parse_is_its_text() -> None:
    assert of("def (") == b"def ("
    assert program(b"\xff", ".py") == b"\xff"
    assert program(b"# no comment", ".json") == b"# no comment"


def test_a_deep_expression_is_read() -> None:
    deep = "x = " + "(" * 80 + "1" + ")" * 80 + " + 1" * 2000
    assert of(deep) != of(deep + " + 1")


def test_every_emitted_file_has_a_program_of_its_own_text() -> None:
    """One token changed anywhere in a file changes its program."""
    for path in (ROOT / "generated/rms_norm/cuda.cu", ROOT / "generated/causal/hopper.py"):
        text = path.read_text()
        assert len(of(text, path.suffix)) > len(text) / 4
        assert of(text.replace("\n    return ", "\n    return 0, ", 1), path.suffix) != of(
            text, path.suffix
        )
