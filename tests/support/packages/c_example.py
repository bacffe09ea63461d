"""Example of a package on a simulated device: `python tests/support/packages/c_example.py PACKAGE`.

Triton's interpreter runs the launches of the example. The example compares the results with its own
and sets the exit status.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch

from kgen.build.runtime import triton as runtime
from kgen.verify import interpreter
from support.packages.c_on_paper import STRICT, Paper, compiled

ARCH, MULTIPROCESSORS = 80, 4


def example(package: Path) -> int:
    """Compile and run the example in this process, with the simulated driver loaded."""
    (source,), target = package.glob("c/*.c"), package / "example.so"
    includes = [package / "c" / "example.cpp", source]
    options = [*STRICT[:-1], "-O1", "-shared", "-fPIC", "-Dmain=example_main", "-o", target]
    compiled(["g++", "-std=c++17", "-x", "c++", *options, *includes, "-ldl", "-pthread"])
    interpreter.mend()
    kernels = runtime.Package("example_on_paper", package).source("triton")

    def view(address: int, kind: str) -> torch.Tensor:
        dtype = {v: k for k, v in runtime.DTYPES.items()}[kind[1:]]
        if not address:  # a tensor that the launch does not access
            return torch.empty(0, dtype=dtype)
        size = (paper.driver.paper_end(address) - address) // dtype.itemsize
        assert size > 0, f"nothing is at {address}"
        raw = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
        return torch.frombuffer(raw, dtype=dtype)

    def run(row: Any, programs: int, raw: dict[str, int]) -> None:
        given = {}
        for name, kind, value in row["arguments"]:
            found = value if kind == "constexpr" else raw[name]
            given[name] = view(found, kind) if kind.startswith("*") else found
        getattr(kernels, row["kernel"])[(programs,)](**given)

    paper = Paper(package, run)
    paper.driver.paper_end.argtypes = [ctypes.c_ulonglong]
    paper.driver.paper_end.restype = ctypes.c_ulonglong
    paper.begin({})
    paper.device(ARCH, MULTIPROCESSORS)
    return int(ctypes.CDLL(str(target))._Z12example_mainv())


if __name__ == "__main__":
    sys.exit(example(Path(sys.argv[1])))
