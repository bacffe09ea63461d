"""The protocol page names exactly the operations by which ranks send and wait."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs/context-parallel-protocol.md").read_text(encoding="utf-8")
FOLDERS = ("kgen/targets/ranks", "kgen/kernels/attention/parallel")
TEXTS = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in (ROOT / folder).glob("*.py")
}
SENDING = {
    *(
        "all_gather",
        "all_gather_object",
        "all_reduce",
        "reduce",
        "broadcast",
        "barrier",
        "batch_isend_irecv",
    ),
    *("new_group", "rendezvous"),
}
WAITING = {"wait_stream", "wait_event", "_sleep"}
NAMED = set(re.findall(r"`([\w.]+)`", PAGE))


def functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions and methods with their names. A class name means its `__init__`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions(child, f"{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield (inside + child.name).removesuffix(".__init__"), child


def operations(function: ast.FunctionDef) -> set[str]:
    """Return the operations of `torch.distributed`, peer memory and streams that a function
    calls.
    """
    called = [one.func for one in ast.walk(function) if isinstance(one, ast.Call)]
    return {one.attr for one in called if isinstance(one, ast.Attribute)} & (SENDING | WAITING)


FOUND = {
    name: operations(one) for text in TEXTS.values() for name, one in functions(ast.parse(text))
}


def test_operations_are_found() -> None:
    assert FOUND["KeyGradients.reduce"] == {"reduce"}
    assert FOUND["Beside.lead"] == {"_sleep", "wait_stream"}
    assert set().union(*FOUND.values()) == SENDING | WAITING


@pytest.mark.parametrize("name", [name for name, found in FOUND.items() if found])
def test_what_sends_or_waits_is_on_the_page(name: str) -> None:
    assert name in NAMED
    assert FOUND[name] & SENDING <= NAMED


@pytest.mark.parametrize("name", sorted(NAMED - SENDING - {"reduce_gradients"}))
def test_what_the_page_names_is_there(name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    trees = [ast.parse(text) for text in TEXTS.values()]
    places = [
        one for tree in trees for one in ast.walk(tree) if getattr(one, "name", None) == owner
    ]
    names = {
        part.name if isinstance(part, ast.FunctionDef | ast.ClassDef) else part.id
        for place in (places if owner else trees)
        for part in ast.walk(place)
        if isinstance(part, ast.FunctionDef | ast.ClassDef)
        or (isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
    }
    assert attribute in names or name in ("ValueError", "RuntimeError")
