"""Each template states the names of `_launch.py` that its text uses, and each file imports them."""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kgen.render import environment
from kgen.render.rendering import render_variants
from kgen.spec.load import Loaded, load_variants, loads
from kgen.spec.names import named_apart
from kgen.targets import Source, asked_targets, sources
from kgen.targets.launching import FILENAME, LAUNCH_FILE
from kgen.targets.template import Template, names, parts

ROOT = Path(__file__).resolve().parents[2]
CORNERS = (
    "chunk_wide",
    "clusters",
    "decode_ends",
    "decode_small_pages",
    "hashed",
    "norm_bare",
    "norm_modified",
    "packed_learned",
    "promised_window",
    "sunk",
)
LISTED = """kernel: attention
name: listed
dtype: bf16
head_dim: 64
params:
  most: {type: float, runtime: true}
mask_mod: (q_idx * 7 + kv_idx * 3) % 11 < most
block_mask: always
"""


def stock_and_corners() -> list[Path]:
    return [
        *sorted(ROOT.glob("specs/*.yaml")),
        *(ROOT / f"tests/specs/{name}.yaml" for name in CORNERS),
    ]


@cache
def launch_names() -> frozenset[str]:
    """Return the names that `_launch.py` defines."""
    table = symtable.symtable(environment.rendered(LAUNCH_FILE), FILENAME, "exec")
    return frozenset(
        s.get_name() for s in table.get_symbols() if s.is_assigned() and not s.is_imported()
    )


def imported_and_used(text: str) -> tuple[set[str], set[str]]:
    """Return the names that a file imports from `_launch.py`, and those that it uses but does not
    define.
    """
    tree = ast.parse(text)
    imports = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "_launch"
    )
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & launch_names()
    return {alias.name for node in imports for alias in node.names}, used - defined(tree)


def defined(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def own_text(part: Template, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the text of a template without the templates in its fields."""
    env = environment.environment(environment.template_root(), part.language)
    with monkeypatch.context() as patch:
        patch.setattr(environment, "rendered", lambda template: "pass")
        return env.get_template(part.template).render({**names(part), "launch_names": ""})


def misstated(source: Source, text: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a line for each template of a file whose own text uses other names than the template
    states.
    """
    own = defined(ast.parse(text))
    # A name in quotes or backticks is in a comment or a message.
    pattern = re.compile(rf'(?<![\w."`])(?:{"|".join(launch_names() - own)})\b(?!\.py)')
    for part in parts(source.text):
        used, stated = {*pattern.findall(own_text(part, monkeypatch))}, {*part.launch_functions()}
        if used != stated:
            yield f"{part.template}: uses {sorted(used)}, states {sorted(stated)}"


def python_files(loaded: Loaded) -> list[Source]:
    settled = named_apart(loaded)
    found = (source for target in asked_targets(settled) for source in sources(settled, target))
    return [source for source in found if source.filename.endswith(".py")]


def check(variants: list[Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    files = render_variants(variants)
    for one in variants:
        for source in python_files(one):
            text = files[one.folder][source.filename]
            imported, used = imported_and_used(text)
            assert imported == used, (one.folder, source.filename)
            assert not [*misstated(source, text, monkeypatch)], (one.folder, source.filename)


@pytest.mark.parametrize("path", stock_and_corners(), ids=lambda path: path.stem)
def test_files_import_the_names_that_they_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(load_variants(path), monkeypatch)


def test_a_block_mask_by_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loads(LISTED, "listed.yaml")
    check([loaded], monkeypatch)
    (source,) = (s for s in python_files(loaded) if s.filename == "triton.py")
    stated = {part.template: {*part.launch_functions()} for part in parts(source.text)}
    assert "_real" in stated["attention/triton/_block_mask_launcher.j2"]


def test_an_import_is_found() -> None:
    text = "from ._launch import _cdiv, _tile\ndef _launch(): return _cdiv(_launch, _empty)\n"
    assert imported_and_used(text) == ({"_cdiv", "_tile"}, {"_cdiv", "_empty"})
