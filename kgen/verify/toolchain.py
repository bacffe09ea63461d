"""Available packages and devices, and errors for missing ones."""

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
"""Called with the amount done and the total (cases, files or seconds), and the name of the last
item.
"""


def require(*packages: str, extra: str = "verify") -> None:
    """Raise `MissingError` unless all packages can be imported.

    `extra` is the extra of kgen that installs them.
    """
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
    """Return `cuda` or `cpu`; `auto` is `cuda` if there is a GPU.

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
    """Return the versions of Python, torch, triton and the installed `tools` of a target."""
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", *tools):
        # A compiler may come from a toolkit instead of a package.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def toolchain(tools: Iterable[str]) -> str:
    """Return the versions that distinguish records of the ledger: "torch 2.11.0, triton 3.6.0"."""
    found = versions(tools := ("torch", *tools))
    return ", ".join(f"{package} {found[package]}" for package in tools if package in found)


def describe(device: str) -> dict[str, str]:
    """Return a device and its compute capability. The CPU is named `interpreter`."""
    if device == "cpu":
        return {"device": "interpreter", "capability": ""}
    torch: Any = importlib.import_module("torch")
    major, minor = torch.cuda.get_device_capability()
    return {"device": str(torch.cuda.get_device_name()), "capability": f"{major}.{minor}"}


def import_file(path: Path, name: str) -> ModuleType:
    """Import an emitted file again by its path, as a module of a package `name`, so that relative
    imports work.

    `__init__.py` is the package itself. For another file it does not run.
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
