"""Packages with operators in C++, for tensors on the CPU and a simulated driver."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kgen.build.operators import compiled_name
from support.packages.c_on_paper import Paper, python

CPU = "c++ -DKGEN_DEVICE=c10::DeviceType::CPU"
"""A compiler of operators that launch for tensors on the CPU, for the simulated driver."""
BUILD = """
import sys
from functools import partial
from pathlib import Path
from unittest import mock
from kgen.build.package import BuildOptions
from support.packages.build_on_paper import build
with mock.patch("kgen.build.package.BuildOptions", partial(BuildOptions, torch=True)):
    build(Path(sys.argv[1]), sys.argv[2:])
"""


def sources_of(specs: Mapping[str, str], out: Path) -> Path:
    """Build packages with fake machine code, and operators that are not compiled."""
    for name, text in specs.items():
        (out / f"{name}.yaml").write_text(text)
    files = [str(out / f"{name}.yaml") for name in specs]
    done = python(["-c", BUILD, str(out), *files], {"TRITON_INTERPRET": None, "CXX": "false"})
    assert done.returncode == 0, done.stderr
    return out


def compiled(folder: Path, name: str, cache: pytest.Cache) -> Path:
    """Compile the operators of a package for the simulated driver. Return the folder.

    The compiler takes half a minute, so the cache of pytest keeps the library.
    """
    package = folder / name
    digest = hashlib.sha256(CPU.encode())
    for path in sorted([*(package / "operators").glob("*.[hc]*"), *(package / "c").iterdir()]):
        digest.update(path.read_bytes())
    kept = cache.mkdir("operators") / f"{digest.hexdigest()}-{compiled_name()}"
    if not kept.exists():
        done = python([str(package / "_runtime" / "operators.py")], {"CXX": CPU})
        assert done.returncode == 0, done.stderr
        shutil.copyfile(package / "operators" / compiled_name(), kept)
    shutil.copyfile(kept, package / "operators" / compiled_name())
    return folder


@dataclass(frozen=True)
class Loaded:
    """A package whose launches Triton's interpreter runs, and the launches."""

    function: Callable[..., Any]
    module: ModuleType
    paper: Paper

    def kernels(self) -> list[str]:
        """Return the names of the launched kernels, and forget them."""
        found = [launch["kernel"] for launch in self.paper.launched]
        self.paper.begin({})
        return found


def loaded_operators(
    folder: Path, name: str, *, arch: int = 80, fast: bool = False, runs: bool = True
) -> Loaded:
    """Import a package in this process.

    With `fast`, its functions treat the CPU as a GPU. Without `runs`, launches are only recorded.
    """
    from kgen.build.runtime import triton as runtime
    from kgen.verify import interpreter

    if runs:
        interpreter.mend()
    kinds = {kind: dtype for dtype, kind in runtime.DTYPES.items()}

    def view(address: int, kind: str) -> torch.Tensor:
        dtype = kinds[kind[1:]]
        if not address:  # a tensor that the launch does not access
            return torch.empty(0, dtype=dtype)
        raw = (ctypes.c_char * (_end_of(address) - address)).from_address(address)
        return torch.frombuffer(raw, dtype=dtype, count=len(raw) // dtype.itemsize)

    def run(row: Any, programs: int, raw: dict[str, int]) -> None:
        given = {}
        for argument, kind, value in row["arguments"]:
            found = value if kind == "constexpr" else raw[argument]
            given[argument] = view(found, kind) if kind.startswith("*") else found
        getattr(source, row["kernel"])[(programs,)](**given)

    paper = Paper(folder / name, run if runs else None)
    paper.device(arch, 4)
    if fast:
        path = folder / name / "_call.py"
        path.write_text(path.read_text().replace("q.is_cuda", "True"))
    sys.path.insert(0, str(folder))
    function = getattr(importlib.import_module(name), name)
    module = sys.modules[f"{name}.triton"]
    source = runtime.Package(f"{name}_source", folder / name).source("triton") if runs else None
    # The operators in C++ have the names without a number, and the library in Python has number 2.
    place = "_out_op" if hasattr(module, "_out_op") else "_forward_op"
    operator = getattr(module, place)
    assert operator._schema.name == f"{module._LIBRARY.ns.removesuffix('_2')}::{name}"
    return Loaded(function, module, paper)


def _end_of(address: int) -> int:
    """Return the end of the mapped memory that contains an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return int(end, 16)
    raise AssertionError(f"nothing is at {address}")
