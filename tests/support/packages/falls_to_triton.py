"""Kernels that Triton compiles for a call without machine code in the package:
`falls_to_triton.py PACKAGE GROUP`.

The package has grouped-query attention, and the simulated chip is a Hopper. Print the kernels and
their class.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kgen.verify.compile_triton import OfflineDriver
from support.packages.c_on_paper import Paper, loaded_package

run = JITFunction.run


def compiled(function: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> None:
    kernel = run(function, *args, warmup=True, **kwargs)
    print(kernel.metadata.name, type(function).__name__, len(kernel.asm["cubin"]) > 1000)


def main(folder: str, group: str) -> None:
    package = Path(folder)
    paper, launcher = Paper(package), loaded_package(package, package.name)
    paper.device(90, 132)
    driver.set_active(OfflineDriver(90))
    q, k = (torch.zeros(1, heads, 200, 128, dtype=torch.float16) for heads in (2 * int(group), 2))
    with (
        paper.under_python(launcher, 90, 132),
        mock.patch.object(launcher, "_portable_because", return_value=""),
        mock.patch.object(JITFunction, "run", compiled),
    ):
        out, lse = launcher._forward(q, k, k, 0.1, True)
        launcher._backward_op(out, None, out, lse, q, k, k, 0.1)
    print([row["kernel"] for row in paper.launched])


if __name__ == "__main__":
    main(*sys.argv[1:])
