"""Find packages that are out of date, or lack a requested option."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kgen.build.files import compilers, files_of, hashes, of_another_spec, runtimes, sha256, spelled
from kgen.build.native import FOLDER, native_of, write_native
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
) -> list[str]:
    """Return what is wrong with the packages of specs, each as `FOLDER: reason`.

    A package may be missing. It may differ from the rendered files or the installed tools. It may
    lack one of these architectures, sizes and targets, or calls from C. Raises `KgenError` for an
    unknown architecture, and for a spec that is not rendered.
    """
    asked = spelled(archs), sizes or {}, targets, c
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
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_native(
                loaded, native_of(loaded, manifest["sizes"], chips), rows, package, Path(folder)
            )
        except (KgenError, ValueError, KeyError):  # the current spec has no calls from C
            return True
        now = {f"{FOLDER}/{p.name}": sha256(p) for p in Path(folder, FOLDER).iterdir()}
    return now != {
        name: digest for name, digest in manifest["files"].items() if name.startswith(f"{FOLDER}/")
    }
