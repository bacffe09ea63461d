"""Build packages of machine code from emitted files, without a GPU."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

from kgen.build.files import (
    compilers,
    files_of,
    hashes,
    is_for,
    least,
    of_another_spec,
    require_any,
    require_buildable,
    runtime,
    runtimes,
    sha256,
    spelled,
)
from kgen.build.native import FOLDER, native_of, write_native
from kgen.build.operators import FOLDER as OPERATORS
from kgen.build.operators import RUNTIME, STEM, compiled_operators, modules_of, write_operators
from kgen.build.replacing import put, require_replaceable, unfinished
from kgen.build.runtime.folder import SOURCES
from kgen.build.variants import choosers, require_choosers_replaceable, write_choosers
from kgen.build.worker_job import BuildJob
from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import chips
from kgen.render.rendering import render_package
from kgen.targets import sources
from kgen.targets.native import Native
from kgen.verify.compiling import ARCHS as KNOWN
from kgen.verify.compiling import CompileJob, capability
from kgen.verify.emitted import Emitted, parts
from kgen.verify.events import LeftOut, Listener, Progressed, ignore
from kgen.verify.families import problem_of
from kgen.verify.packages import MANIFEST, digest_of
from kgen.verify.processes import WorkerError, messages, threads
from kgen.verify.toolchain import require

ARCHS = ("sm_80", "sm_90a")
SIZES: Mapping[str, Sequence[int]] = {
    "gqa": (1, 2, 4, 8),
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "width": (512, 1024, 2048, 4096, 8192, 16384),
    "heads": (8, 16, 32),
}
"""Default values of the sizes that a spec leaves open.

`gqa`: query heads per KV head. `batch`: sequences that decode together, rounded up to a power of
two. `width`: width of a norm. `heads`: heads of a norm, or heads of q and k of chunk output and
linear attention.
"""
SETTINGS = ("TRITON_", "MLIR_", "LLVM_", "NVPTX_", "DISABLE_", "ENABLE_", "PTXAS_", "CUTE_DSL_")
"""Prefixes of environment variables that change the machine code. They are unset: equal inputs give
equal bytes.
"""
PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR")
"""Variables with these prefixes that only name folders, and stay set."""
COLUMNS = ("spec", "arch", "kernels", "bytes", "spills", "ok", "error")

_INIT = '"""Machine code of {name}: see manifest.json. None of its files has the function."""\n'
_LAUNCHER = '''\
"""The names of sources/{stem}.py, with machine code for its kernels: see manifest.json."""

from pathlib import Path

from .{runtime}.{target} import Package

_launcher = Package(__package__, Path(__file__).parent).load("{stem}")
{exports}

__all__ = [{quoted}]
'''


@dataclass(frozen=True)
class BuildOptions:
    """The specs of packages, and the architectures to build for."""

    archs: Sequence[str] = ARCHS
    """Names of architectures, such as `sm_90a`."""
    sizes: Mapping[str, Sequence[int]] = field(default_factory=lambda: SIZES)
    """Values of the sizes that a spec leaves open, by the names of `SIZES`."""
    targets: Collection[str] | None = None
    """The targets to build; None for all whose tools are installed."""
    c: bool = False
    """True to write calls from C, too."""
    torch: bool = False
    """True to write operators in C++, and the calls from C that they need."""
    force: bool = False
    """True to replace edited files, and files that `kgen build` did not write."""
    jobs: int = 1
    """Number of worker processes."""
    timeout: float = 600.0
    """Seconds that a worker waits for one kernel."""


DEFAULT = BuildOptions()
_Spec = tuple[Any, list[Emitted]]
_Rows = dict[tuple[str, str], list[Mapping[str, Any]]]


def build_specs(
    loaded: Sequence[Any],
    generated: Path,
    out: Path,
    options: BuildOptions = DEFAULT,
    hear: Listener = ignore,
) -> list[dict[str, Any]]:
    """Build a package of each spec under `out`, from its emitted files in Triton, CUDA and CuTe.

    A file for one architecture is built for that architecture only. A package is written, and
    replaces an older one, if all of its kernels compile. `hear` gets an event for each file that is
    left out, and for each that is compiled.

    Returns one row per spec and architecture:
        spec, arch: their names.
        kernels, bytes: number of files of machine code, and their size.
        spills: bytes of local memory per thread, of the kernel with the most.
        ok, error: True and None, or False and the first error.

    Raises:
        KgenError: a spec is not rendered or out of date. It has no file to build, or no calls from
            C. Two specs share a name. An architecture is unknown. `out` has other files, or cannot
            be written.
        MissingError: torch, triton or the tools of a target are not installed.
    """
    options = replace(options, archs=spelled(options.archs))
    specs = _specs_with_files(loaded, generated, options, hear)
    natives = {one.folder: _native(one, files, options, hear) for one, files in specs}
    for file, why in _left_out(specs, options.archs):
        hear(LeftOut(file, why))
    names = [one.folder for one, _ in specs]
    require_replaceable(out, names, force=options.force)
    beside = choosers(((one, [file.path.name for file in files]) for one, files in specs), out)
    require_choosers_replaceable(beside, force=options.force)
    with unfinished(out, names) as folders:
        found = _all_compiled(specs, options, folders, hear)
        for one, files in specs:
            rows = [row for arch in options.archs for row in found.get((one.folder, arch), [])]
            if not any(row["error"] for row in rows):
                folder, native = folders[one.folder], natives[one.folder]
                _write(one, files, rows, options, folder, native, hear)
                put(folders[one.folder], out / one.folder)
    write_choosers(beside)
    return [_summary(folder, arch, rows) for (folder, arch), rows in found.items()]


def _specs_with_files(
    loaded: Sequence[Any], generated: Path, options: BuildOptions, hear: Listener
) -> list[_Spec]:
    """Return each spec with the files of its package. Raises the errors of `build_specs`."""
    _require_names_of_their_own(loaded)
    require("torch", "triton")

    def taken(file: Emitted) -> bool:
        package = file.missing_package() if options.targets is None else None
        if package:
            hear(LeftOut(file, f"needs `{package}`"))
        return not package

    archs, targets = options.archs, options.targets
    specs = [(one, files_of(generated, one, targets, archs, taken)) for one in loaded]
    for one, files in specs:
        require_any(one, files, targets, archs)
        require_buildable(one, files)
    for needed in {file.runtime: None for _, files in specs for file in files}:
        if needed.needs:
            require(needed.needs, extra=needed.extra)
    for one, files in specs:
        _require_rendered(one, files)
    return specs


def _all_compiled(
    specs: Sequence[_Spec], options: BuildOptions, folders: Mapping[str, Path], hear: Listener
) -> _Rows:
    """Compile every file, and return the rows of its kernels by spec and architecture."""
    tasks = [
        (one, file, arch)
        for one, files in specs
        for arch in options.archs
        for file in files
        if is_for(one, file, arch)
    ]
    done, lock = 0, Lock()

    def run(task: tuple[Any, Emitted, str]) -> list[Mapping[str, Any]]:
        nonlocal done
        one, file, arch = task
        folder = folders[one.folder]
        rows = list(_compiled(one, file, file.arch or arch, options.sizes, folder, options.timeout))
        with lock:
            done += 1
            hear(Progressed(done, len(tasks), f"{one.folder} {file.stem} {arch}"))
        return rows

    found: _Rows = {}
    with threads(options.jobs) as pool:
        for (one, _, arch), rows in zip(tasks, pool.map(run, tasks), strict=True):
            found.setdefault((one.folder, arch), []).extend(rows)
    return found


def _require_names_of_their_own(loaded: Sequence[Any]) -> None:
    """Raise `KgenError` if two specs would have the same package."""
    first: dict[str, Path] = {}
    for one in loaded:
        if first.setdefault(one.folder, one.path) is not one.path:
            message = f"{first[one.folder]} also has the name `{one.folder}`"
            hint = "change the `name` of one spec"
            raise KgenError(Diagnostic("name-taken", message, file=str(one.path), hint=hint))


def _require_rendered(loaded: Any, files: Sequence[Emitted]) -> None:
    """Raise `KgenError` if files are out of date: the code that calls them is made from the current
    spec.
    """
    for path in of_another_spec(loaded, files):
        message = f"`{path}` is out of date: the spec or kgen changed after it was rendered"
        raise KgenError(
            Diagnostic(
                "not-rendered", message, file=str(loaded.path), hint=f"kgen render {loaded.path}"
            )
        )


def _left_out(
    specs: Sequence[tuple[Any, Sequence[Emitted]]], archs: Sequence[str]
) -> Iterator[tuple[Emitted, str]]:
    """Yield the files that are not built for an architecture, with the reason."""
    for one, files in specs:
        for file, arch in product(files, archs):
            if (needed := least(one, file)) > capability(arch):
                yield file, f"for {arch}: its kernels need sm_{needed} or newer"
            elif not any(is_for(one, other, arch) for other in files):
                yield file, f"for {arch}: its kernels run on {file.arch} only"


def _native(
    loaded: Any, files: Sequence[Emitted], options: BuildOptions, hear: Listener
) -> Native | None:
    """Return the calls from C of a spec, if the package has them.

    With `--c`, raise `KgenError` if C cannot launch its kernels. Without it, operators in Python
    remain.
    """
    chips = [capability(arch) for arch in options.archs]
    file = next((file for file in files if file.target == "triton"), None)
    if options.c and file is None:
        message = f"`--c` needs Triton kernels, and `{loaded.spec.name}` has none"
        raise KgenError(Diagnostic("no-c", message, file=str(loaded.path), hint="remove `--c`"))
    if file is None or not (options.c or options.torch):
        return None
    try:
        native = native_of(loaded, options.sizes, chips)
    except KgenError as error:
        if options.c:
            raise
        hear(_in_python(file, error.diagnostics[0].message))
        return None
    if options.torch and native.operators is None:
        hear(_in_python(file, native.why_in_python))
        return native if options.c else None
    return native if options.torch else replace(native, operators=None)


def _in_python(file: Emitted, why: str) -> LeftOut:
    return LeftOut(file, f"as operators in C++: {why}")


def _compiled(
    loaded: Any,
    file: Emitted,
    arch: str,
    sizes: Mapping[str, Sequence[int]],
    folder: Path,
    timeout: float,
) -> Iterator[Mapping[str, Any]]:
    job = CompileJob(problem_of(loaded, file.target), replace(file, path=file.path.resolve()), arch)
    build = BuildJob(job, sizes, folder.resolve())
    set_here = [name for name in os.environ if name.startswith(SETTINGS) and name not in PLACES]
    # Line information contains the paths of files on this machine.
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
    options: BuildOptions,
    folder: Path,
    native: Native | None,
    hear: Listener,
) -> None:
    archs = [arch for arch in options.archs if any(is_for(loaded, file, arch) for file in files)]
    emitted = list(dict.fromkeys(part for file in files for part in parts(file.path)))
    (folder / SOURCES).mkdir()
    for path in emitted:
        shutil.copy(path, folder / SOURCES / path.name)
    (folder / RUNTIME).mkdir()
    for path in runtime(files):
        shutil.copy(path, folder / RUNTIME / path.name)
    for file in files:
        for name, text in _modules(loaded, file, native).items():
            (folder / name).write_text(text, encoding="utf-8")
    (folder / "__init__.py").write_text(_init(loaded, files), encoding="utf-8")
    kernels = sorted(
        ({k: v for k, v in row.items() if k != "error"} for row in rows), key=json.dumps
    )
    if native is not None:
        write_native(
            loaded, native, [row for row in kernels if row["target"] == "triton"], folder, folder
        )
    if native is not None and native.operators is not None:
        write_operators(native, folder / SOURCES / f"{STEM}.py", folder)
        if why := compiled_operators(folder, options.timeout):
            hear(_in_python(next(file for file in files if file.stem == STEM), why))
    written = [
        path
        for place in ("*.py", *(f"{name}/*" for name in (RUNTIME, SOURCES, FOLDER, OPERATORS)))
        for path in folder.glob(place)
    ]
    own = {chip.file: chip.arch for chip in chips()}
    manifest = {
        "spec": loaded.folder,
        "sources": hashes(files),
        "compiled": [p.name for p in emitted if p.name not in own or own[p.name] in archs],
        "beside": [Path(name).stem for name in own],
        "runtimes": runtimes(files),
        "compilers": compilers(files),
        "archs": archs,
        "known": sorted(set(KNOWN.values())),
        "sizes": {name: list(numbers) for name, numbers in options.sizes.items()},
        "targets": None if options.targets is None else sorted(options.targets),
        "files": {p.relative_to(folder).as_posix(): sha256(p) for p in sorted(written)},
        "kernels": kernels,
    }
    text = json.dumps({**manifest, "digest": digest_of(manifest)}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _init(loaded: Any, files: Sequence[Emitted]) -> str:
    """Return the text of `__init__.py`: the emitted folder's, for the files that are built."""
    return render_package(loaded, [file.path.name for file in files]) or _INIT.format(
        name=loaded.spec.name
    )


def _modules(loaded: Any, file: Emitted, native: Native | None) -> dict[str, str]:
    """Return the texts of the modules that replace an emitted file, by file."""
    (offers,) = (s.offers for s in sources(loaded, file.target) if s.filename == file.path.name)
    names = (problem_of(loaded, file.target).name, *offers)
    if native is not None and native.operators is not None and file.stem == STEM:
        return modules_of(native, names)
    exports = "\n".join(f"{one} = _launcher.{one}" for one in names)
    quoted = ", ".join(f'"{one}"' for one in names)
    text = _LAUNCHER.format(
        stem=file.stem, runtime=RUNTIME, target=file.target, exports=exports, quoted=quoted
    )
    return {file.path.name: text}


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
