"""Operators in C++: compile them against the installed PyTorch, and load them.

`python FOLDER/_runtime/operators.py` compiles the operators of the package `FOLDER`, for example on
a machine with another version of PyTorch. It needs a C++ compiler.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

FOLDER = "operators"
"""The folder of a package that has the operators in C++."""
COMPILERS = ("c++", "g++", "clang++")
IN_PYTHON = "KGEN_PYTHON_OPERATORS"
"""An environment variable. If it is set, the operators in Python run."""

_KEPT: list[torch.library.Library] = []
"""The registrations of all packages. PyTorch removes a registration with its library."""
_PLAIN = frozenset((Tensor, Parameter))
_transformed = torch._C._are_functorch_transforms_active


class NotCompiled(RuntimeError):
    """Raised if the operators cannot be compiled."""


def library_of(package: Path) -> Path:
    """Return the path of the compiled operators for this PyTorch and this processor."""
    version = torch.__version__.partition("+")[0]
    return package / FOLDER / f"torch-{version}-{platform.machine()}.so"


def compile_operators(package: Path) -> Path:
    """Compile the operators of a package, and return the library.

    The environment variable `CXX` names another compiler. Raises NotCompiled without a compiler, or
    with its first error.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise NotCompiled(f"no C++ compiler was found ({', '.join(COMPILERS)}): set CXX")
    library, own = library_of(package), Path(torch.__file__).parent
    include, (source,) = own / "include", sorted((package / "c").glob("*.c"))
    command = [
        *[*compiler.split(), "-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-fvisibility=hidden"],
        f"-fmacro-prefix-map={include}=torch",
        *[f"-isystem{x}" for x in (include, include / "torch" / "csrc" / "api" / "include")],
        *[f"{FOLDER}/operators.cpp", f"c/{source.name}", "-o", f"{FOLDER}/{library.name}"],
        *[f"-L{own / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl", "-pthread"],
    ]
    try:
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotCompiled(f"{compiler} cannot run: {error}") from None
    if done.returncode:
        lines = done.stderr.splitlines()
        why = next((line for line in lines if "error" in line), lines[-1] if lines else "no output")
        raise NotCompiled(f"{compiler} failed: {why.strip()}")
    return library


class Operators:
    """The operators in C++ of a package. Without a compiled library, all methods do nothing."""

    def __init__(self, package: Path) -> None:
        """Load the operators. Do this before the emitted file makes operators of the same names:
        the second library of these names gets a number, which exported programs do not know.
        """
        self._library, path = None, library_of(package)
        if os.environ.get(IN_PYTHON):
            return
        if path.is_file():
            try:
                self._library = ctypes.CDLL(str(path))
            except OSError as error:
                _warn(package, f"cannot be loaded ({error})")
            else:
                self._library.kgen_operators.restype = ctypes.c_char_p
        elif any((package / FOLDER).glob("*.so")):
            _warn(package, f"are not compiled for PyTorch {torch.__version__}")

    def install(self, launcher: Any, names: Mapping[str, str]) -> bool:
        """Let an emitted file call the operators in C++. Return False without them.

        `names` maps globals of the file to operators. For calls without machine code, and inside
        `torch.func`, the operators in C++ call the operators in Python.
        """
        if self._library is None:
            return False
        library = self._library.kgen_operators(launcher._LIBRARY.ns.encode()).decode()
        transforms = torch.library.Library(library, "FRAGMENT")
        _KEPT.append(transforms)
        for place, name in names.items():
            in_python = getattr(launcher, place)
            transforms.impl(name, in_python, "FuncTorchDynamicLayerFrontMode")
            setattr(launcher, place, getattr(getattr(torch.ops, library), name).default)
        return True


def _warn(package: Path, why: str) -> None:
    hint = f"python {package / '_runtime' / 'operators.py'}"
    warnings.warn(
        f"{package.name}: operators in Python run, because the operators in C++ {why}. "
        f"Compile them with `{hint}`",
        UserWarning,
        stacklevel=4,
    )


def usual(*tensors: Any) -> bool:
    """True if a call may skip the checks of the emitted function, because C++ checks the tensors.

    False while PyTorch traces the call, inside `torch.func`, under forward-mode differentiation,
    and for subclasses of tensors.
    """
    if torch.compiler.is_dynamo_compiling() or _transformed() or forward_ad._current_level >= 0:
        return False
    return _PLAIN.issuperset(map(type, tensors))


if __name__ == "__main__":
    try:
        print(compile_operators(Path(__file__).resolve().parents[1]))
    except NotCompiled as error:
        sys.exit(str(error))
