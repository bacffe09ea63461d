"""Emitted files assign nothing that they do not read: what a kernel does not want is not printed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running.linting import wrong_names

ROOT = Path(__file__).resolve().parent.parent


def unread(source: str) -> list[str]:
    """Names that a function assigns and never reads, as `function: name`."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [f"{f.name}: {name}" for f in functions for name in _unread(f)]


def _unread(function: ast.FunctionDef) -> Iterator[str]:
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    kept = {
        name
        for node in ast.walk(function)
        if isinstance(node, ast.Global | ast.Nonlocal)
        for name in node.names
    }
    assigned = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for top in node.targets
        for target in (
            top.elts if isinstance(top, ast.Tuple) and isinstance(node.value, ast.Tuple) else [top]
        )
        if isinstance(target, ast.Name)
    }
    yield from sorted(assigned - read - kept)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["x = a", "return b"], ["f: x"]),
        (["x, y = a // b, a % b", "return y"], ["f: x"]),
        (["x, y = a", "return y"], []),
        (["x = 0", "x += a", "return b"], ["f: x"]),
        (["global x", "x = a", "return b"], []),
        (["x = a", "def g():", "    return x", "return g"], []),
    ],
)
def test_what_is_unread_is_found(lines: list[str], found: list[str]) -> None:
    assert unread("\n".join(["def f(a, b):", *(f"    {line}" for line in lines), ""])) == found


def test_what_is_emitted_reads_all_that_it_assigns() -> None:
    files = sorted((ROOT / "generated").glob("*/*.py"))
    assert files
    assert not wrong_names(files)
    assert {path.parent.name: unread(path.read_text()) for path in files if unread(path.read_text())} == {}
