"""The emitted files that a package is built from, and their entries in its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.render.header import inputs_hash
from kgen.render.rendering import render_spec
from kgen.targets import sources
from kgen.verify import ledger
from kgen.verify.compiling import ARCHS as KNOWN
from kgen.verify.compiling import capability
from kgen.verify.emitted import Emitted, parts, require_emitted
from kgen.verify.families import problem_of
from kgen.verify.toolchain import versions

TARGETS = sorted(
    path.stem.removeprefix("compile_") for path in Path(__file__).parent.glob("compile_*.py")
)
"""The targets that `kgen build` compiles, one per module `compile_NAME.py`.

In a package, `_runtime/NAME.py` loads and launches the machine code of a target.
"""
BESIDE = {"triton": ("descriptors", "parameters")}
"""Further modules of `_runtime` that a target's module imports."""


def spelled(archs: Iterable[str]) -> list[str]:
    """Return the architectures without duplicates, with `sm_90` spelled `sm_90a`.

    Kernels use features of one chip alone, so the two names mean the same. Raises `KgenError` for
    an unknown one.
    """
    found = (f"sm_{capability(arch)}" for arch in archs)
    return list(dict.fromkeys(f"{arch}a" if f"{arch}a" in KNOWN else arch for arch in found))


def files_of(
    generated: Path,
    loaded: Any,
    targets: Collection[str] | None,
    archs: Collection[str],
    taken: Callable[[Emitted], bool],
) -> list[Emitted]:
    """Return the emitted files of a spec for these targets and architectures that `taken` accepts.

    Raises `KgenError` for a spec that is not rendered.
    """
    return [
        file
        for file in require_emitted(generated, loaded)
        if file.target in (targets or TARGETS)
        and any(is_for(loaded, file, arch) for arch in archs)
        and taken(file)
    ]


def require_any(
    loaded: Any, files: Sequence[Emitted], targets: Collection[str] | None, archs: Collection[str]
) -> None:
    """Raise `KgenError` if a spec has no file to build for these targets and architectures."""
    if not files:
        asked = f"the targets {', '.join(targets or TARGETS)} on {', '.join(archs)}"
        message = f"spec `{loaded.folder}` has no file to build for {asked}"
        hint = f"`--target` accepts {', '.join(TARGETS)}"
        raise KgenError(Diagnostic("nothing-to-build", message, file=str(loaded.path), hint=hint))


def require_buildable(loaded: Any, files: Sequence[Emitted]) -> None:
    """Raise `KgenError` if a spec has a pass that `kgen build` does not support."""
    for target in dict.fromkeys(file.target for file in files):
        for source in sources(loaded, target):
            if source.unbuilt:
                message = f"`kgen build` does not support the pass `{source.unbuilt}` yet"
                hint = f"build a spec without `{source.unbuilt}` in `passes`"
                place = str(loaded.path)
                raise KgenError(Diagnostic("unsupported-pass", message, file=place, hint=hint))


def is_for(loaded: Any, file: Emitted, arch: str) -> bool:
    """True if a file is built for an architecture."""
    if file.arch is None:
        return capability(arch) >= least(loaded, file)
    return capability(file.arch) == capability(arch)


def least(loaded: Any, file: Emitted) -> int:
    """Return the lowest compute capability that the kernels need, such as 89 for fp8."""
    found: int = getattr(problem_of(loaded, file.target), "least_capability", 0)
    return found


def of_another_spec(loaded: Any, files: Sequence[Emitted]) -> list[Path]:
    """Return the files that are out of date: the spec or its templates changed after they were
    rendered.
    """
    now = {name: inputs_hash(text) for name, text in render_spec(loaded).items()}
    return [
        path
        for file in files
        for path in dict.fromkeys(parts(file.path))
        if path.name in now and inputs_hash(path.read_text(encoding="utf-8")) != now[path.name]
    ]


def hashes(files: Sequence[Emitted]) -> dict[str, str]:
    """Return the ledger's hash of each file, by name."""
    return {file.path.name: ledger.file_hash(file.path) for file in files}


def runtime(files: Sequence[Emitted]) -> list[Path]:
    """Return the modules that load and launch the machine code of these files."""
    here, targets = Path(__file__).parent / "runtime", sorted({file.target for file in files})
    beside = [name for target in targets for name in BESIDE.get(target, ())]
    return [here / f"{name}.py" for name in ("__init__", "folder", *targets, *beside)]


def runtimes(files: Sequence[Emitted]) -> dict[str, str]:
    """Return the sha256 of each module of `runtime`, by name."""
    return {path.name: sha256(path) for path in runtime(files)}


def compilers(files: Sequence[Emitted]) -> dict[str, str]:
    """Return the versions of the compilers of these files."""
    tools = [tool for file in files for tool in file.runtime.tools]
    return {tool: version for tool, version in versions(tools).items() if tool in tools}


def sha256(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
