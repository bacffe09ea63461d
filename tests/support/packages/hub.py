"""Builds of repositories for the kernel hub, in the layout of kernel-builder.

kernel-builder needs Nix. Its parser of `build.toml` is in the package `kernels`, and a build of
`[torch-noarch]` copies files. `built` does this with the parser of `kernels`. `layout_errors` and
`registration_errors` are the two checks of the sources that kernel-builder 0.17 makes
(`kernel-layout-check` and `torch-ops-check`).
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernels._rust import Build

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REGISTERS = {
    "custom_op",
    "triton_op",
    "register_kernel",
    "register_fake",
    "register_vmap",
    "register_torch_dispatch",
}
OPS = """
import torch

_OPS_NAME = "{id}"
ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{{_OPS_NAME}}::{{op_name}}"
"""


def config(root: Path) -> dict[str, Any]:
    """Return `build.toml`. Raise `ValueError` if kernel-builder refuses it."""
    Build.open(root)
    return tomllib.loads((root / "build.toml").read_text())


def built(root: Path, revision: str = "abc1234") -> str:
    """Build a repository for a torch without CUDA, and return the id of the build.

    kernel-builder makes the variant `torch-cuda` from the same files.
    """
    build = config(root)
    name = build["general"]["name"].replace("-", "_")
    own_id = f"_{name}_cpu_{revision}"
    variant = root / "build" / "torch-cpu"
    extensions = build["torch-noarch"].get("pyext", ["py", "pyi"])
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "torch-ext" / name, variant, ignore=ignored)
    for path in [*variant.rglob("*")]:
        if path.is_file() and path.suffix.removeprefix(".") not in extensions:
            path.unlink()
    (variant / "_ops.py").write_text(OPS.format(id=own_id))
    general = {n: build["general"][n] for n in ("name", "version", "license")}
    metadata = {"id": own_id, **general, "python-depends": [], "backend": {"type": "cpu"}}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return own_id


def layout_errors(root: Path) -> Iterator[str]:
    """Yield the files that the package lacks or must not have."""
    name = config(root)["general"]["name"].replace("-", "_")
    package = root / "torch-ext" / name
    if not (package / "__init__.py").is_file():
        yield f"{package} has no __init__.py"
    if (package / name).exists():
        yield f"{package} contains {name}"


def registration_errors(root: Path) -> Iterator[str]:
    """Yield the decorators that register operators without `add_op_namespace_prefix`."""
    for path in sorted((root / "torch-ext").rglob("*.py")):
        for node in ast.iter_child_nodes(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and _called(decorator) in REGISTERS:
                    first = decorator.args[0] if decorator.args else None
                    named = isinstance(first, ast.Call) and _called(first)
                    if decorator.args and named != "add_op_namespace_prefix":
                        yield f"{path}:{node.lineno}"


def _called(node: ast.Call) -> str | None:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return None


def tested(root: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the tests of a repository that is built, in Triton's interpreter."""
    repo_id = config(root)["general"]["hub"]["repo-id"]
    own = {"TRITON_INTERPRET": "1", "LOCAL_KERNELS": f"{repo_id}={root / 'build'}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "markers=kernels_ci", str(root / "tests")]
    return subprocess.run(
        command, cwd=root, env=environment | own, capture_output=True, text=True, timeout=200
    )
