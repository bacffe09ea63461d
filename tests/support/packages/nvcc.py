"""Calls of nvcc. Skip a test if it is not installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def versions() -> str:
    """Return the versions of nvcc and of its host compiler."""
    return "".join(_said(compiler, "--version") for compiler in (_nvcc(), "g++"))


def symbols(path: Path, folder: Path, *options: str) -> str:
    """Compile a file with warnings as errors, as C++ repositories do.

    Return the symbols of the object.
    """
    options = options or ("-arch=sm_90", "-Xptxas", "-O0", "-c")
    command = [_nvcc(), "-std=c++17", "-Werror", "all-warnings", *options]
    done = subprocess.run(
        [*command, str(path), "-o", str(folder / "x.o")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return _said("nm", str(folder / "x.o"))


def _nvcc() -> str:
    if (path := shutil.which("nvcc")) is None:
        pytest.skip("nvcc is not installed")
    return path


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
