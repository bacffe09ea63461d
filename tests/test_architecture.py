"""One direction of flow: every module imports, and imports only from stages before its own."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kgen

STAGES = (
    *("diagnostics", "files", "expr", "spec", "plan", "targets", "render"),
    *("verify", "bench", "tune", "cli", "__main__"),
)
PACKAGE = Path(kgen.__file__).parent
RUNTIME = {"torch", "triton", "numpy", "matplotlib"}
RENDERING = {"diagnostics", "files", "expr", "spec", "plan", "targets", "render"}


def modules() -> list[str]:
    paths = sorted(path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths if "_data" not in path.parts]


def stage(module: str) -> str | None:
    """The stage that a module of kgen belongs to; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def imports(module: str) -> Iterator[str]:
    """Everything that a module imports, wherever in it, for type checking too."""
    base = PACKAGE.parent.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", modules())
def test_module_imports(module: str) -> None:
    importlib.import_module(module)


@pytest.mark.parametrize("module", [module for module in modules() if stage(module)])
def test_direction(module: str) -> None:
    own = stage(module)
    assert own in STAGES, f"{module} belongs to no stage"
    for name in imports(module):
        if name.startswith("kgen.") and (other := stage(name)) in STAGES:
            assert STAGES.index(other) <= STAGES.index(own), f"{module} imports {name}"


@pytest.mark.parametrize("module", [m for m in modules() if stage(m) in ("plan", "targets")])
def test_printed_text_is_not_looked_into(module: str) -> None:
    """What is planned and printed is decided on trees."""
    assert "re" not in {name.partition(".")[0] for name in imports(module)}


def test_rendering_needs_no_runtime() -> None:
    names = [module for module in modules() if stage(module) in RENDERING]
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert not RUNTIME & set(run.stdout.split())
