"""Emitted files assign only values that they read: unused values are not printed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.running.linting import wrong_names

from kgen.family import family
from kgen.spec.load import loads_variants

ROOT = Path(__file__).resolve().parent.parent


def unread(source: str) -> list[str]:
    """Return names that a function assigns and never reads, as `function: name`."""
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
    found = {f"{path.parent.name}/{path.name}": unread(path.read_text()) for path in files}
    assert {name: names for name, names in found.items() if names} == {}


def _roots(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the names that a file binds outside functions, with True for an import."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((a.asname or a.name).partition(".")[0], True) for a in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, False
        elif isinstance(node, ast.Assign):
            yield from ((t.id, False) for t in node.targets if isinstance(t, ast.Name))


def _mentioned(tree: ast.Module) -> set[str]:
    """Return the names that a file reads: variables, attributes, and the entries of `__all__`."""
    nodes = [*ast.walk(tree)]
    exported = next(
        (
            n.value
            for n in tree.body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
        ),
        None,
    )
    return (
        {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        | (set(ast.literal_eval(exported)) if exported is not None else set())
    )


def unused(sources: Mapping[str, str]) -> list[str]:
    """Imports that their file does not read, and private names that no file of the package reads:
    `file: name`.

    `_launch.py` is the same in every folder, so not all folders use all of its names.
    """
    trees = {name: ast.parse(source) for name, source in sources.items()}
    read = {name: _mentioned(tree) for name, tree in trees.items()}
    taken = {
        alias.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return [
        f"{file}: {name}"
        for file, tree in trees.items()
        for name, imported in _roots(tree)
        if imported or (name.startswith("_") and Path(file).name != "_launch.py")
        if name not in ("annotations", "_", "__all__")
        if name not in read[file] and (imported or name not in taken.union(*read.values()))
    ]


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"a": "import os\nfrom b import c, d\nd()"}, ["a: os", "a: c"]),
        ({"a": "def _f(): pass\n_x = 1\ndef g(): return _x"}, ["a: _f"]),
        ({"a": "def _f(): pass", "b": "from .a import _f as f\nf()"}, []),
        ({"a": "def _f(): pass", "b": "from . import a\na._f()"}, []),
        ({"_launch.py": "import os\ndef _f(): pass"}, ["_launch.py: os"]),
        ({"a": "from .b import c\n__all__ = ['c']", "b": "def c(): pass"}, []),
    ],
)
def test_unused_names_are_found(sources: dict[str, str], found: list[str]) -> None:
    assert unused(sources) == found


def _unused_in(package: Path) -> list[str]:
    return unused(
        {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    )


def test_emitted_packages_have_no_unused_imports_or_private_names() -> None:
    packages = [path.parent for path in (ROOT / "generated").glob("*/manifest.json")]
    assert packages
    found = {package.name: _unused_in(package) for package in packages}
    assert {name: names for name, names in found.items() if names} == {}


ADAPTED = {
    "causal": ("transformers", "context_parallel", "hub", "torch", "flash_attn"),
    "gemma2": ("transformers",),
    "document_causal": ("context_parallel",),
    "varlen_alibi": ("context_parallel", "hub"),
    "gated_delta_net": ("context_parallel",),
    "linear_attention_elu": ("context_parallel",),
}


@pytest.mark.parametrize(
    ("name", "adapter"), [(n, a) for n, every in ADAPTED.items() for a in every]
)
def test_adapters_have_no_unused_imports_or_private_names(name: str, adapter: str) -> None:
    variants = loads_variants((ROOT / "specs" / f"{name}.yaml").read_text(), "own.yaml")
    made = family(variants[0].spec.kernel).adapters[adapter](variants)
    files = {
        f"{folder}/{file}": text
        for folder, inside in made.folders.items()
        for file, text in inside.items()
        if file.endswith(".py")
    }
    assert files
    assert unused(files) == []
