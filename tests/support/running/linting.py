"""Findings of ruff in emitted files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

RULES = "F811,F821,F823,F841"
"""Names that are redefined, undefined, read before they are defined, or never read."""


def wrong_names(files: Iterable[Path]) -> str:
    """Return the findings about names; empty if there are none."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--ignore-noqa"]
    done = subprocess.run(
        [*command, "--select", RULES, *files], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout if done.returncode else ""


def findings(files: Iterable[Path]) -> str:
    """Return the findings of ruff in its default format and with all rules except PGH004 (blanket
    `noqa`).
    """
    ruff, files = [sys.executable, "-m", "ruff"], list(files)
    commands = (
        [*ruff, "format", "--isolated", "--no-cache", "--check", *files],
        [
            *ruff,
            "check",
            "--isolated",
            "--no-cache",
            "--select",
            "ALL",
            "--ignore",
            "PGH004",
            *files,
        ],
    )
    done = [
        subprocess.run(command, capture_output=True, text=True, check=False) for command in commands
    ]
    return "".join(run.stdout for run in done if run.returncode)


def gone_after_loops(code: str) -> list[str]:
    """Return the names of kernels that are first assigned in a loop and read after it, with their
    lines.

    Python keeps such a name, but Triton does not, because the loop may have no iterations. Loops
    over `static_range` are unrolled and keep their names.
    """
    kernels = (
        node
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(d) for d in node.decorator_list)
    )
    return [f"{kernel.name}: {name}" for kernel in kernels for name in _gone(kernel)]


def _gone(kernel: ast.FunctionDef) -> Iterator[str]:
    known = {arg.arg for arg in ast.walk(kernel.args) if isinstance(arg, ast.arg)}
    of_loops: set[str] = set()

    def visit(nodes: Iterable[ast.AST]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, (ast.For, ast.While)) and not _unrolled(node):
                before = set(known)
                yield from visit(ast.iter_child_nodes(node))
                of_loops.update(known - before)
                known.intersection_update(before)
            elif isinstance(node, ast.Assign):
                yield from visit([node.value])
                yield from visit(node.targets)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
            elif isinstance(node, ast.Name) and node.id in of_loops - known:
                yield f"line {node.lineno}: {node.id}"
            else:
                yield from visit(ast.iter_child_nodes(node))

    yield from visit(kernel.body)


def _unrolled(loop: ast.For | ast.While) -> bool:
    return isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter)
