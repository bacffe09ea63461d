"""`kgen build`: packages of machine code, made without a GPU from what was rendered and verified."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from kgen.build.files import (
    compilers,
    files_of,
    hashes,
    is_for,
    least,
    of_another_spec,
    require_any,
    runtime,
    runtimes,
    sha256,
    spelled,
)
from kgen.build.native import FOLDER, native_of, write_native
from kgen.build.replacing import put, require_replaceable, unfinished
from kgen.build.runtime.folder import SOURCES
from kgen.build.variants import choosers, require_choosers_replaceable, write_choosers
from kgen.build.worker_job import BuildJob
from kgen.diagnostics import Diagnostic, KgenError
from kgen.render.rendering import render_package
from kgen.targets import sources
from kgen.targets.native import Native
from kgen.verify.compiling import ARCHS as KNOWN
from kgen.verify.compiling import CompileJob, capability
from kgen.verify.emitted import Emitted, parts
from kgen.verify.families import problem_of
from kgen.verify.packages import MANIFEST, digest_of
from kgen.verify.processes import WorkerError, messages, threads
from kgen.verify.toolchain import Progress, require

ARCHS = ("sm_80", "sm_90a")
SIZES: Mapping[str, Sequence[int]] = {
    "gqa": (1, 2, 4, 8),
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "width": (512, 1024, 2048, 4096, 8192, 16384),
    "heads": (8, 16, 32),
}
"""Of what a spec leaves open: query heads for a KV head, sequences that decode at a time (rounded up to a power of
two), the width of a norm, its heads."""
RUNTIME = "_runtime"
"""The folder of a package that has what loads its machine code, as `kgen.build.runtime` here."""
SETTINGS = ("TRITON_", "MLIR_", "LLVM_", "NVPTX_", "DISABLE_", "ENABLE_", "PTXAS_", "CUTE_DSL_")
PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR")
"""What names of settings of compilers begin with, and those that say where it keeps things: equal inputs give
equal bytes, whatever one has set."""
COLUMNS = ("spec", "arch", "kernels", "bytes", "spills", "ok", "error")

_INIT = '"""{name}, as machine code: see manifest.json. None of its files has the function."""\n'
_LAUNCHER = '''"""What sources/{stem}.py offers, whose kernels are machine code here: see manifest.json."""

from pathlib import Path

from .{runtime}.{target} import Package

_launcher = Package(__package__, Path(__file__).parent).load("{stem}")
{exports}

__all__ = [{quoted}]
'''


def build_specs(
    loaded: Sequence[Any],
    generated: Path,
    out: Path,
    archs: Sequence[str] = ARCHS,
    sizes: Mapping[str, Sequence[int]] = SIZES,
    jobs: int = 1,
    timeout: float = 600.0,
    progress: Progress | None = None,
    *,
    targets: Collection[str] | None = None,
    c: bool = False,
    force: bool = False,
    skipped: Callable[[Emitted, str], None] | None = None,
) -> list[dict[str, Any]]:
    """Build a package of each spec under `out`, of its files in Triton, CUDA and CuTe as they were rendered; no GPU is
    needed. `targets` leaves out the files of others; without it, those whose package is not installed go to `skipped`,
    with why. A file that is for one architecture is built for that. With `c` it has calls from C, too.

    Returns rows of spec, arch, kernels, bytes (of machine code), spills (bytes of local memory of a thread, of the
    kernel that has most), ok, error. A package is written where all of it compiles, and replaces the one that was
    there; with `force` also what `kgen build` did not make. `timeout` is in seconds, for one kernel. Raises `KgenError`
    for a spec that is not rendered as it is or has no file to build or no calls from C, for two specs of one name, for
    an unknown architecture, and for what would be lost or cannot be written, `MissingError` without torch, triton or
    the package of a target.
    """
    archs = spelled(archs)
    _require_names_of_their_own(loaded)
    require("torch", "triton")

    def taken(file: Emitted) -> bool:
        package = file.missing_package() if targets is None else None
        if package and skipped is not None:
            skipped(file, f"needs `{package}`")
        return not package

    specs = [(one, files_of(generated, one, targets, archs, taken)) for one in loaded]
    for one, files in specs:
        require_any(one, files, targets, archs)
    for needed in {file.runtime: None for _, files in specs for file in files}:
        if needed.needs:
            require(needed.needs, extra=needed.extra)
    for one, files in specs:
        _require_rendered(one, files)
    chips = [capability(arch) for arch in archs]
    natives = {one.folder: native_of(one, sizes, chips) for one, files in specs if c and _for_c(one, files)}
    tasks = [
        (one, file, arch)
        for one, files in specs
        for arch in archs
        for file in files
        if is_for(one, file, arch)
    ]
    if skipped is not None:
        for file, why in _left_out(specs, archs):
            skipped(file, why)
    names = [one.folder for one, _ in specs]
    require_replaceable(out, names, force=force)
    beside = choosers(((one, [file.path.name for file in files]) for one, files in specs), out)
    require_choosers_replaceable(beside, force=force)
    done: list[int] = []
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    with unfinished(out, names) as folders:

        def run(task: tuple[Any, Emitted, str]) -> list[Mapping[str, Any]]:
            one, file, arch = task
            rows = list(_compiled(one, file, file.arch or arch, sizes, folders[one.folder], timeout))
            done.append(1)
            if progress is not None:
                progress(len(done), len(tasks), f"{one.folder} {file.stem} {arch}")
            return rows

        with threads(jobs) as pool:
            for (one, _, arch), rows in zip(tasks, pool.map(run, tasks), strict=True):
                found.setdefault((one.folder, arch), []).extend(rows)
        for one, files in specs:
            rows = [row for arch in archs for row in found.get((one.folder, arch), [])]
            if not any(row["error"] for row in rows):
                here = [arch for arch in archs if any(is_for(one, file, arch) for file in files)]
                asked = {"archs": here, "sizes": sizes, "targets": targets}
                folder = folders[one.folder]
                _write(one, files, rows, asked, folder, natives.get(one.folder))
                put(folder, out / one.folder)
    write_choosers(beside)
    return [_summary(folder, arch, rows) for (folder, arch), rows in found.items()]


def _require_names_of_their_own(loaded: Sequence[Any]) -> None:
    """Raise `KgenError` where two specs would be one package."""
    first: dict[str, Path] = {}
    for one in loaded:
        if first.setdefault(one.folder, one.path) is not one.path:
            message = f"the name `{one.folder}` belongs to {first[one.folder]} as well"
            hint = "give the spec another `name`"
            raise KgenError(Diagnostic("name-taken", message, file=str(one.path), hint=hint))


def _require_rendered(loaded: Any, files: Sequence[Emitted]) -> None:
    """Raise `KgenError` where files are not of the spec as it is: what calls them would be."""
    for path in of_another_spec(loaded, files):
        message = f"`{path}` was rendered from another text of the spec, or by another kgen"
        raise KgenError(
            Diagnostic("not-rendered", message, file=str(loaded.path), hint=f"kgen render {loaded.path}")
        )


def _left_out(
    specs: Sequence[tuple[Any, Sequence[Emitted]]], archs: Sequence[str]
) -> Iterator[tuple[Emitted, str]]:
    """Files that are not built for an architecture, and why."""
    for one, files in specs:
        for file, arch in product(files, archs):
            if (needed := least(one, file)) > capability(arch):
                yield file, f"for {arch}: its kernels need sm_{needed} or newer"
            elif not any(is_for(one, other, arch) for other in files):
                yield file, f"for {arch}: it is for {file.arch}"


def _for_c(loaded: Any, files: Sequence[Emitted]) -> bool:
    """Raises `KgenError` where there are no kernels that C launches: these are Triton's."""
    if any(file.target == "triton" for file in files):
        return True
    message, hint = f"`{loaded.spec.name}` has no kernels in Triton, which C launches", "leave `--c` out"
    raise KgenError(Diagnostic("no-c", message, file=str(loaded.path), hint=hint))


def _compiled(
    loaded: Any, file: Emitted, arch: str, sizes: Mapping[str, Sequence[int]], folder: Path, timeout: float
) -> Iterator[Mapping[str, Any]]:
    job = CompileJob(problem_of(loaded, file.target), replace(file, path=file.path.resolve()), arch)
    build = BuildJob(job, sizes, folder.resolve())
    set_here = [name for name in os.environ if name.startswith(SETTINGS) and name not in PLACES]
    # Places of files are no part of what is built.
    environment = {**dict.fromkeys(set_here), "TRITON_DISABLE_LINE_INFO": "1"}
    found = 0
    try:
        for row in messages(f"kgen.build.compile_{file.target}", build, timeout, environment):
            found += 1
            yield {"target": file.target, **row}
    except WorkerError as error:
        yield {"error": str(error)}
        return
    if not found:
        yield {"error": f"{file.path.name} launches no kernel"}


def _write(
    loaded: Any,
    files: Sequence[Emitted],
    rows: Sequence[Mapping[str, Any]],
    asked: Mapping[str, Any],
    folder: Path,
    native: Native | None,
) -> None:
    emitted = [part for file in files for part in parts(file.path)]
    (folder / SOURCES).mkdir()
    for path in emitted:
        shutil.copy(path, folder / SOURCES / path.name)
    (folder / RUNTIME).mkdir()
    for path in runtime(files):
        shutil.copy(path, folder / RUNTIME / path.name)
    for file in files:
        (folder / file.path.name).write_text(_launcher(loaded, file), encoding="utf-8")
    (folder / "__init__.py").write_text(_init(loaded, files), encoding="utf-8")
    kernels = sorted(({k: v for k, v in row.items() if k != "error"} for row in rows), key=json.dumps)
    if native is not None:
        write_native(loaded, native, [row for row in kernels if row["target"] == "triton"], folder, folder)
    written = [
        path
        for place in ("*.py", *(f"{name}/*" for name in (RUNTIME, SOURCES, FOLDER)))
        for path in folder.glob(place)
    ]
    manifest = {
        "spec": loaded.folder,
        "sources": hashes(files),
        "compiled": [p.name for p in emitted if p.name != "hopper.py" or "sm_90a" in asked["archs"]],
        "runtimes": runtimes(files),
        "compilers": compilers(files),
        "archs": list(asked["archs"]),
        "known": sorted(set(KNOWN.values())),
        "sizes": {name: list(numbers) for name, numbers in asked["sizes"].items()},
        "targets": None if asked["targets"] is None else sorted(asked["targets"]),
        "files": {p.relative_to(folder).as_posix(): sha256(p) for p in sorted(written)},
        "kernels": kernels,
    }
    text = json.dumps({**manifest, "digest": digest_of(manifest)}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _init(loaded: Any, files: Sequence[Emitted]) -> str:
    """What the emitted folder has, for the files that are built."""
    return render_package(loaded, [file.path.name for file in files]) or _INIT.format(name=loaded.spec.name)


def _launcher(loaded: Any, file: Emitted) -> str:
    """What is imported in place of an emitted file."""
    (offers,) = (s.offers for s in sources(loaded, file.target) if s.filename == file.path.name)
    names = (problem_of(loaded, file.target).name, *offers)
    exports = "\n".join(f"{one} = _launcher.{one}" for one in names)
    quoted = ", ".join(f'"{one}"' for one in names)
    return _LAUNCHER.format(
        stem=file.stem, runtime=RUNTIME, target=file.target, exports=exports, quoted=quoted
    )


def _summary(folder: str, arch: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    errors = [row["error"] for row in rows if row["error"]]
    files = {row["file"]: row for row in rows if not row["error"]}
    return {
        "spec": folder,
        "arch": arch,
        "kernels": len(files),
        "bytes": sum(row["bytes"] for row in files.values()),
        "spills": max((row["spills"] for row in files.values()), default=0),
        "ok": not errors,
        "error": errors[0] if errors else None,
    }
