"""What emitted files leave out, because nothing reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from linting import wrong_names

from kgen.render.unused import without_unused

ROOT = Path(__file__).resolve().parent.parent


def function(*lines: str) -> str:
    return "\n".join(
        ["import tl", "", "", "def f(a, b):", '    """x = a."""', *(f"    {line}" for line in lines), ""]
    )


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        (["x = a", "return b"], ["return b"]),
        (["x, y = a // b, a % b", "return y"], ["y = a % b", "return y"]),
        (["x = tl.minimum(a, b)", "y = x + 1", "return b"], ["return b"]),
        # What is called for its effect, or adds, or is the module's.
        (["x = tl.atomic_add(a, b)", "return b"], None),
        (["x = 0", "x += a", "return b"], None),
        (["x, y = a", "return y"], None),
        (["global x", "x = a", "return b"], None),
        # A block has to have a line.
        (["if a:", "    x = b", "return b"], None),
        (["if a:", "    x = b", "    y = a", "    return y"], ["if a:", "    y = a", "    return y"]),
        (["if a:  # why", "    x = b", "    y = a", "return b"], ["if a:  # why", "    y = a", "return b"]),
        (["x = tl.minimum(", "    a, b)", "return b"], None),
        (["return [x for x in a]", "x = b"], None),
    ],
)
def test_without_unused(lines: list[str], left: list[str] | None) -> None:
    assert without_unused(function(*lines)) == function(*(lines if left is None else left))


def test_what_is_emitted_reads_all_that_it_assigns() -> None:
    files = sorted((ROOT / "generated").glob("*/*.py"))
    assert files
    assert not wrong_names(files)
