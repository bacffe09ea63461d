"""Search for the tools and packages that verbs need, for `kgen doctor`."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

HINT = "missing: pip install 'kgen-kernels[verify]'"
CUDA_HINT = "missing: pip install 'kgen-kernels[cuda]'"
NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
"""Packages that contain NVRTC, for CUDA 13 and for CUDA 12."""


def examine() -> list[dict[str, object]]:
    """Return a row (name, found, version) for each tool or package that a verb needs."""
    torch, triton = _package("torch"), _package("triton")
    return [
        _row("python", platform.python_version(), ""),
        _row("torch", torch, HINT),
        _row("triton", triton, HINT),
        _row(
            "CUDA device",
            _device() if torch else None,
            "missing: required by `kgen bench` and `kgen tune`",
        ),
        _row("ptxas", _ptxas(), HINT),
        _row("NVRTC", _first(NVRTC), CUDA_HINT),
        _row("cuda-core", _package("cuda-core"), CUDA_HINT),
        _row("z3-solver", _package("z3-solver"), "missing: pip install 'kgen-kernels[prove]'"),
        _row("ray", _package("ray"), "missing: pip install 'kgen-kernels[ray]'"),
        _row(
            "nvidia-cutlass-dsl",
            _package("nvidia-cutlass-dsl"),
            "missing: pip install 'kgen-kernels[cute]'",
        ),
        _row("transformers", _package("transformers"), "missing: pip install transformers"),
    ]


def _row(name: str, version: str | None, otherwise: str) -> dict[str, object]:
    return {"name": name, "found": version is not None, "version": version or otherwise}


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _first(names: Sequence[str]) -> str | None:
    return next((found for name in names if (found := _package(name)) is not None), None)


def _device() -> str | None:
    try:
        import torch

        if not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    # torch is installed, but cannot load its libraries.
    except (ImportError, RuntimeError, OSError):
        return None


def _ptxas() -> str | None:
    """Return the version of the ptxas that Triton ships, else of the one on the path."""
    triton = find_spec("triton")
    bundled = (
        Path(triton.origin).parent / "backends/nvidia/bin/ptxas"
        if triton and triton.origin
        else None
    )
    path = str(bundled) if bundled and bundled.is_file() else shutil.which("ptxas")
    if path is None:
        return None
    try:
        run = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"release (\S+),", run.stdout)
    return version[1] if version else "unknown version"
