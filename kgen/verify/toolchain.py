"""Which packages and devices there are, and clear errors where one is missing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from kgen.diagnostics import Diagnostic, MissingError

Progress = Callable[[float, float, str], None]
"""Called with how much of how much is done (cases or files, or seconds of work), and what was done last."""


def require(*packages: str, extra: str = "verify") -> None:
    """Raise `MissingError` unless all packages can be imported, which an extra of this package brings."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingError(
                Diagnostic(
                    "missing-package",
                    f"`{package}` is not installed",
                    hint=f"pip install 'kgen-kernels[{extra}]'",
                )
            )


def pick_device(device: str) -> str:
    """`cuda` or `cpu`; `auto` is `cuda` where there is one.

    Raises `MissingError` without torch and triton, and for `cuda` without a device.
    """
    require("torch", "triton")
    if device == "cpu":
        return "cpu"
    torch: Any = importlib.import_module("torch")
    if torch.cuda.is_available():
        return "cuda"
    if device == "auto":
        return "cpu"
    raise MissingError(
        Diagnostic(
            "missing-device",
            "there is no CUDA device",
            hint="kgen verify --device cpu runs the kernels in Triton's interpreter",
        )
    )


def versions(tools: Iterable[str] = ()) -> dict[str, str]:
    """Versions of what a result depends on: Python, torch, triton and the `tools` of a target that are installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", *tools):
        # A compiler may come from a toolkit that is no package.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def toolchain(tools: Iterable[str]) -> str:
    """What a result stands and falls with, as the ledger names it: "torch 2.11.0, triton 3.6.0"."""
    found = versions(tools := ("torch", *tools))
    return ", ".join(f"{package} {found[package]}" for package in tools if package in found)


def describe(device: str) -> dict[str, str]:
    """A device and its capability. The CPU is called `interpreter`, for Triton's interpreter runs there."""
    if device == "cpu":
        return {"device": "interpreter", "capability": ""}
    torch: Any = importlib.import_module("torch")
    major, minor = torch.cuda.get_device_capability()
    return {"device": str(torch.cuda.get_device_name()), "capability": f"{major}.{minor}"}


def import_file(path: Path, name: str) -> ModuleType:
    """Import an emitted file by its path, anew, as a module of a package of that name: it finds what lies beside it.

    `__init__.py` is the package itself; for another file it is not run.
    """
    for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
        del sys.modules[known]
    folder = [str(path.parent.absolute())]
    if whole := path.name == "__init__.py":
        spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folder)
    else:
        spec = importlib.util.spec_from_file_location(f"{name}.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    if not whole:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = folder
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
