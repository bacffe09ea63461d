"""The folder `operators/` of a package: operators of PyTorch in C++, which call the launcher in C.

A family provides their source (`kgen.targets.native`). This module adds the header that all
packages share, and compiles both against the installed PyTorch.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kgen.render.environment import rendered, template_root
from kgen.render.layout import laid_out_in_c
from kgen.targets.native import Native, Operators

FOLDER = "operators"
RUNTIME = "_runtime"
"""The folder of a package that holds copies of modules of `kgen.build.runtime`."""
RUNTIME_MODULE = Path(__file__).parent / "runtime" / "operators.py"
"""The module of `_runtime` that compiles and loads the operators."""
HEADER, SOURCE = "kgen_torch.h", "operators.cpp"
CALL = "_call"
"""The module of a package that has the function which calls the operators."""
STEM = "triton"
"""The emitted file whose operators are in C++, without its suffix."""
_LIBRARY = re.compile(r'^_LIBRARY = _library\("(\w+)"', re.MULTILINE)
_MODULE = '''\
"""The names of sources/{stem}.py, with machine code for its kernels: see manifest.json.

The operators are in C++. Without a library for the installed PyTorch, they are in Python.
"""

from pathlib import Path

from ._runtime.operators import Operators
from ._runtime.triton import Package

_operators = Operators(Path(__file__).parent)
_launcher = Package(__package__, Path(__file__).parent).load("{stem}")
{installed}
{exports}

__all__ = [{quoted}]
'''
_CALL = '''\
"""The function of the package, which calls the operators in C++.

It has a module of its own: the emitted file has the name of `{stem}.py`, and PyTorch looks up the
globals of a function by the name of its module.
"""

import math

import torch

from . import {stem} as _launcher
from ._runtime.operators import usual

{call}
'''


def write_operators(native: Native, emitted: Path, out: Path) -> None:
    """Write the sources of the operators, and the module that compiles them, into `out`.

    `emitted` is the emitted file of the spec.
    """
    if native.operators is None:
        raise ValueError(native.why_in_python)
    folder, own = out / FOLDER, out / RUNTIME / RUNTIME_MODULE.name
    folder.mkdir()
    own.parent.mkdir(exist_ok=True)
    shutil.copyfile(RUNTIME_MODULE, own)
    shutil.copyfile(template_root() / "c" / HEADER, folder / HEADER)
    text = rendered(with_code(native.operators, emitted)).rstrip("\n") + "\n"
    (folder / SOURCE).write_text(laid_out_in_c(text), encoding="utf-8")


def with_code(operators: Operators, emitted: Path) -> Operators:
    """Return the file with the name of the emitted file's library of operators."""
    found = _LIBRARY.search(emitted.read_text(encoding="utf-8"))
    assert found is not None
    return replace(operators, code=found[1])


def compiled_operators(package: Path, timeout: float) -> str | None:
    """Compile the operators of a package in a process. Return an error, or None."""
    command = [sys.executable, str(package / RUNTIME / RUNTIME_MODULE.name)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"the compiler took longer than {timeout:g} seconds"
    if not done.returncode:
        return None
    return (done.stderr.strip().splitlines() or ["the compiler failed"])[-1]


def compiled_name() -> str:
    """Return the name of the compiled operators for the installed PyTorch and this processor."""
    version = importlib.metadata.version("torch").partition("+")[0]
    return f"torch-{version}-{platform.machine()}.so"


def modules_of(native: Native, names: Sequence[str]) -> dict[str, str]:
    """Return the modules that load and call the operators, by file. They have these `names`."""
    assert native.operators is not None
    places = ", ".join(f'"{place}": "{name}"' for place, name in native.operators.places)
    installed = f"_operators.install(_launcher, {{{places}}})"
    if native.call is not None:
        installed = f"if {installed}:\n    from . import {CALL}  # noqa: F401"
    module = _MODULE.format(
        stem=STEM,
        installed=installed,
        exports="\n".join(f"{one} = _launcher.{one}" for one in names),
        quoted=", ".join(f'"{one}"' for one in names),
    )
    if native.call is None:
        return {f"{STEM}.py": module}
    call = _CALL.format(stem=STEM, call=rendered(native.call).rstrip("\n"))
    return {f"{STEM}.py": module, f"{CALL}.py": call}
