"""Find packages that are out of date, or lack a requested option."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kgen.build.files import compilers, files_of, hashes, of_another_spec, runtimes, sha256, spelled
from kgen.build.native import FOLDER, native_of, write_native
from kgen.build.operators import (
    FOLDER as OPERATORS,
)
from kgen.build.operators import (
    RUNTIME,
    RUNTIME_MODULE,
    SOURCE,
    STEM,
    compiled_name,
    write_operators,
)
from kgen.build.runtime.folder import SOURCES
from kgen.build.variants import stale_choosers
from kgen.diagnostics import KgenError
from kgen.verify.compiling import ARCHS, capability
from kgen.verify.emitted import Emitted
from kgen.verify.packages import MANIFEST, altered, manifest_of


def stale(
    loaded: Sequence[Any],
    generated: Path,
    out: Path,
    archs: Sequence[str] = (),
    sizes: Mapping[str, Sequence[int]] | None = None,
    targets: Collection[str] | None = None,
    c: bool = False,
    torch: bool = False,
) -> list[str]:
    """Return what is wrong with the packages of specs, each as `FOLDER: reason`.

    A package may be missing. It may differ from the rendered files or the installed tools. It may
    lack one of these architectures, sizes and targets, calls from C, or operators in C++. Raises
    `KgenError` for an unknown architecture, and for a spec that is not rendered.
    """
    asked = spelled(archs), sizes or {}, targets, c, torch
    packages = [
        f"{one.folder}: {why}" for one in loaded for why in _of(one, generated, out, *asked)
    ]
    return [*packages, *stale_choosers(loaded, out)]


def _of(
    loaded: Any,
    generated: Path,
    out: Path,
    archs: Sequence[str],
    sizes: Mapping[str, Sequence[int]],
    targets: Collection[str] | None,
    c: bool,
    torch: bool,
) -> Iterator[str]:
    if not (out / loaded.folder / MANIFEST).exists():
        yield "not built"
        return
    try:
        manifest = manifest_of(out, loaded.folder)
        changed = altered(out, loaded.folder)
    except KgenError:
        yield f"its {MANIFEST} is not a manifest of this version of kgen"
        return
    if MANIFEST in changed:
        yield f"{MANIFEST} was edited after the build"
        return

    if unknown := [arch for arch in manifest["archs"] if arch not in ARCHS]:
        yield f"built for {unknown[0]}, which this version of kgen does not support"
        return

    def taken(file: Emitted) -> bool:
        return file.path.name in manifest["sources"] or not file.missing_package()

    files = files_of(generated, loaded, manifest["targets"], manifest["archs"], taken)
    if not files:
        yield "built from other files"
        return
    yield from (
        f"`{path}` is out of date: the spec or kgen changed after it was rendered"
        for path in of_another_spec(loaded, files)
    )
    if manifest["sources"] != hashes(files):
        yield "built from other files"
    if manifest["runtimes"] != runtimes(files) or _native_changed(
        loaded, manifest, out / loaded.folder, changed
    ):
        yield "built by another version of kgen"
    here = compilers(files)
    for tool, version in manifest["compilers"].items():
        if version != here.get(tool):
            yield f"built with {tool} {version}, installed is {here.get(tool, 'none')}"
    yield from (f"{name} was edited after the build" for name in changed)
    yield from _lacks(manifest, archs, sizes, targets, c)
    if torch and (lacks := _lacks_operators(loaded, manifest)):
        yield lacks


def _lacks(
    manifest: Mapping[str, Any],
    archs: Sequence[str],
    sizes: Mapping[str, Sequence[int]],
    targets: Collection[str] | None,
    c: bool,
) -> Iterator[str]:
    yield from (f"not built for {arch}" for arch in archs if arch not in manifest["archs"])
    for name, numbers in sizes.items():
        missing = [number for number in numbers if number not in manifest["sizes"].get(name, ())]
        yield from (f"not built with `--{name} {number}`" for number in missing)
    built = {row["target"] for row in manifest["kernels"]}
    yield from (
        f"not built with `--target {target}`" for target in targets or () if target not in built
    )
    if c and not _has_c(manifest):
        yield "not built with `--c`"


def _lacks_operators(loaded: Any, manifest: Mapping[str, Any]) -> str | None:
    """Return why a package lacks compiled operators in C++ that the spec has, or None."""
    chips = [capability(arch) for arch in manifest["archs"]]
    try:
        has = native_of(loaded, manifest["sizes"], chips).operators is not None
    except KgenError:
        return None
    if not has:
        return None
    if f"{OPERATORS}/{SOURCE}" not in manifest["files"]:
        return "not built with `--torch`"
    name = compiled_name()
    if f"{OPERATORS}/{name}" not in manifest["files"]:
        return f"`{OPERATORS}/{name}` is missing: the operators in C++ were not compiled"
    return None


def _has_c(manifest: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{FOLDER}/") for name in manifest["files"])


def _native_changed(
    loaded: Any, manifest: Mapping[str, Any], package: Path, changed: Collection[str]
) -> bool:
    """True if the current version of kgen would write other C files for the same machine code."""
    rows = [row for row in manifest["kernels"] if row["target"] == "triton"]
    if not _has_c(manifest) or any(row["file"] in changed for row in rows):
        return False
    chips = [capability(arch) for arch in manifest["archs"]]
    known = {name: digest for name, digest in manifest["files"].items() if _is_native(name)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            native = native_of(loaded, manifest["sizes"], chips)
            write_native(loaded, native, rows, package, Path(folder))
            if f"{OPERATORS}/{SOURCE}" in known:
                write_operators(native, package / SOURCES / f"{STEM}.py", Path(folder))
        except (KgenError, ValueError, KeyError):  # the current spec has no calls from C
            return True
        found = (p for p in Path(folder).rglob("*") if p.is_file())
        now = {p.relative_to(folder).as_posix(): sha256(p) for p in found}
    return now != known


def _is_native(name: str) -> bool:
    """True for a file of a package that `--c` or `--torch` adds, except compiled operators."""
    if name.startswith(f"{OPERATORS}/"):
        return not name.endswith(".so")
    return name.startswith(f"{FOLDER}/") or name == f"{RUNTIME}/{RUNTIME_MODULE.name}"
