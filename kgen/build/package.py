"""`kgen build`: packages of machine code, made without a GPU from what was rendered and verified."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kgen.build.job import BuildJob
from kgen.build.native import FOLDER, native_of, write_native
from kgen.build.runtime.folder import SOURCES
from kgen.diagnostics import Diagnostic, KgenError
from kgen.render.rendering import render_package
from kgen.targets import sources
from kgen.targets.native import Native
from kgen.verify import ledger
from kgen.verify.compiling import CompileJob, capability
from kgen.verify.emitted import Emitted, parts, require_emitted
from kgen.verify.families import problem_of
from kgen.verify.processes import WorkerError, messages, threads
from kgen.verify.toolchain import Progress, require, versions
from kgen.verify.verifying import altered, manifest_of

ARCHS = ("sm_80", "sm_90a")
SIZES: Mapping[str, Sequence[int]] = {
    "gqa": (1, 2, 4, 8),
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "width": (512, 1024, 2048, 4096, 8192, 16384),
    "heads": (8, 16, 32),
}
"""Of what a spec leaves open: query heads for a KV head, sequences that decode at a time (rounded up to a power of
two), the width of a norm, its heads."""
TARGETS = sorted(path.stem.removeprefix("compile_") for path in Path(__file__).parent.glob("compile_*.py"))
"""Whose files are built: those that a module here compiles, `compile_NAME.py`. In a package `_runtime/NAME.py`
loads and launches what came of it."""
RUNTIME = "_runtime"
"""The folder of a package that has what loads its machine code, as `kgen.build.runtime` here."""
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
    skipped: Callable[[Emitted, str], None] | None = None,
) -> list[dict[str, Any]]:
    """Build a package of each spec under `out`, of its files in Triton, CUDA and CuTe as they were rendered; no GPU is
    needed. `targets` leaves out the files of others; without it, those whose package is not installed go to `skipped`,
    with why. A file that is for one architecture is built for that. With `c` it has calls from C, too.

    Returns rows of spec, arch, kernels, bytes (of machine code), spills (bytes of local memory of a thread, of the
    kernel that has most), ok, error. A package is written where all of it compiles, and replaces the one that was
    there. `timeout` is in seconds, for one kernel. Raises `KgenError` for a spec that is not rendered or has no file
    to build or no calls from C, and for an unknown architecture, `MissingError` without torch, triton or the package
    of a target.
    """
    archs = list(dict.fromkeys(archs))
    for arch in archs:
        capability(arch)
    require("torch", "triton")

    def taken(file: Emitted) -> bool:
        package = file.missing_package() if targets is None else None
        if package and skipped is not None:
            skipped(file, f"needs `{package}`")
        return not package

    specs = [(one, _files(generated, one, targets, archs, taken)) for one in loaded]
    for runtime in {file.runtime: None for _, files in specs for file in files}:
        if runtime.needs:
            require(runtime.needs, extra=runtime.extra)
    natives = {one.folder: native_of(one, sizes) for one, files in specs if c and _for_c(one, files)}
    tasks = [
        (one, file, arch)
        for one, files in specs
        for arch in archs
        for file in files
        if _is_for(one, file, arch)
    ]
    for one, file, arch in ((one, file, arch) for one, files in specs for file in files for arch in archs):
        if (least := _least(one, file)) > capability(arch) and skipped is not None:
            skipped(file, f"for {arch}: its kernels need sm_{least} or newer")
    done: list[int] = []

    def run(task: tuple[Any, Emitted, str]) -> list[Mapping[str, Any]]:
        one, file, arch = task
        folder = _unfinished(out, one.folder)
        rows = list(_compiled(one, file, file.arch or arch, sizes, folder, timeout))
        done.append(1)
        if progress is not None:
            progress(len(done), len(tasks), f"{one.folder} {file.stem} {arch}")
        return rows

    for one, _ in specs:
        shutil.rmtree(_unfinished(out, one.folder), ignore_errors=True)
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    with threads(jobs) as pool:
        for (one, _, arch), rows in zip(tasks, pool.map(run, tasks), strict=True):
            found.setdefault((one.folder, arch), []).extend(rows)
    for one, files in specs:
        rows = [row for arch in archs for row in found.get((one.folder, arch), [])]
        if not any(row["error"] for row in rows):
            here = [arch for arch in archs if any(_is_for(one, file, arch) for file in files)]
            asked = {"archs": here, "sizes": sizes, "targets": targets}
            _write(one, files, rows, asked, out, natives.get(one.folder))
        shutil.rmtree(_unfinished(out, one.folder), ignore_errors=True)
    return [_summary(folder, arch, rows) for (folder, arch), rows in found.items()]


def stale(loaded: Sequence[Any], generated: Path, out: Path) -> list[str]:
    """Which packages are not there, or not of what is rendered and installed now, each as a sentence."""
    said = []
    for one in loaded:
        if not (out / one.folder / "manifest.json").exists():
            said.append(f"{one.folder}: not built")
            continue
        manifest = manifest_of(out, one.folder)

        def taken(file: Emitted, built: Collection[str] = manifest["sources"]) -> bool:
            return file.path.name in built or not file.missing_package()

        files = _files(generated, one, manifest["targets"], manifest["archs"], taken)
        said += [f"{one.folder}: {why}" for why in _stale(manifest, files)]
        said += [f"{one.folder}: {name} is not what was built" for name in altered(out, one.folder)]
    return said


def _stale(manifest: Mapping[str, Any], files: Sequence[Emitted]) -> Iterator[str]:
    if manifest["sources"] != _hashes(files):
        yield "built from other files"
    if manifest.get("runtimes") != _runtimes(files):
        yield "built by another kgen"
    here = _compilers(files)
    for tool, version in manifest["compilers"].items():
        if version != here.get(tool):
            yield f"built with {tool} {version}, and here is {here.get(tool, 'none')}"


def _files(
    generated: Path,
    loaded: Any,
    targets: Collection[str] | None,
    archs: Collection[str],
    taken: Callable[[Emitted], bool],
) -> list[Emitted]:
    """The emitted files of a spec for these, of which those are built that are `taken`. Raises `KgenError` where there
    is none."""
    files = [
        file
        for file in require_emitted(generated, loaded)
        if file.target in (targets or TARGETS)
        and any(_is_for(loaded, file, arch) for arch in archs)
        and taken(file)
    ]
    if files:
        return files
    asked = f"the targets {', '.join(targets or TARGETS)} and {', '.join(archs)}"
    message = f"spec `{loaded.folder}` has no file to build for {asked}"
    hint = f"targets that are built: {', '.join(TARGETS)}"
    raise KgenError(Diagnostic("nothing-to-build", message, file=str(loaded.path), hint=hint))


def _is_for(loaded: Any, file: Emitted, arch: str) -> bool:
    """Whether a file is built where an architecture is asked for: `sm_90` stands for `sm_90a` too."""
    if file.arch is None:
        return capability(arch) >= _least(loaded, file)
    return capability(file.arch) == capability(arch)


def _least(loaded: Any, file: Emitted) -> int:
    """The compute capability that kernels need, as of dtypes that older chips do not have."""
    least: int = getattr(problem_of(loaded, file.target), "least_capability", 0)
    return least


def _for_c(loaded: Any, files: Sequence[Emitted]) -> bool:
    """Raises `KgenError` where there are no kernels that C launches: these are Triton's."""
    if any(file.target == "triton" for file in files):
        return True
    message, hint = f"`{loaded.spec.name}` has no kernels in Triton, which C launches", "leave `--c` out"
    raise KgenError(Diagnostic("no-c", message, file=str(loaded.path), hint=hint))


def _unfinished(out: Path, name: str) -> Path:
    return out / f".{name}.unfinished"


def _compiled(
    loaded: Any, file: Emitted, arch: str, sizes: Mapping[str, Sequence[int]], folder: Path, timeout: float
) -> Iterator[Mapping[str, Any]]:
    job = CompileJob(problem_of(loaded, file.target), replace(file, path=file.path.resolve()), arch)
    build = BuildJob(job, sizes, folder.resolve())
    # Places of files are no part of what is built.
    environment = {"TRITON_INTERPRET": None, "TRITON_DISABLE_LINE_INFO": "1"}
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
    out: Path,
    native: Native | None,
) -> None:
    folder = _unfinished(out, loaded.folder)
    emitted = [part for file in files for part in parts(file.path)]
    (folder / SOURCES).mkdir()
    for path in emitted:
        shutil.copy(path, folder / SOURCES / path.name)
    (folder / RUNTIME).mkdir()
    for path in _runtime(files):
        shutil.copy(path, folder / RUNTIME / path.name)
    for file in files:
        (folder / file.path.name).write_text(_launcher(loaded, file), encoding="utf-8")
    (folder / "__init__.py").write_text(_init(loaded, files), encoding="utf-8")
    kernels = sorted(({k: v for k, v in row.items() if k != "error"} for row in rows), key=json.dumps)
    if native is not None:
        write_native(loaded, native, [row for row in kernels if row["target"] == "triton"], folder)
    written = [
        path
        for place in ("*.py", *(f"{name}/*" for name in (RUNTIME, SOURCES, FOLDER)))
        for path in folder.glob(place)
    ]
    manifest = {
        "spec": loaded.folder,
        "sources": _hashes(files),
        "compiled": [p.name for p in emitted if p.name != "hopper.py" or "sm_90a" in asked["archs"]],
        "runtimes": _runtimes(files),
        "compilers": _compilers(files),
        "archs": list(asked["archs"]),
        "sizes": {name: list(numbers) for name, numbers in asked["sizes"].items()},
        "targets": None if asked["targets"] is None else sorted(asked["targets"]),
        "files": {p.relative_to(folder).as_posix(): _sha256(p) for p in sorted(written)},
        "kernels": kernels,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(out / loaded.folder, ignore_errors=True)
    folder.rename(out / loaded.folder)


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


def _hashes(files: Sequence[Emitted]) -> dict[str, str]:
    """As the ledger knows the files, each with what belongs to it."""
    return {file.path.name: ledger.file_hash(file.path) for file in files}


def _runtime(files: Sequence[Emitted]) -> list[Path]:
    """What loads and launches the machine code of files."""
    here = Path(__file__).parent / "runtime"
    return [here / f"{name}.py" for name in ("__init__", "folder", *sorted({file.target for file in files}))]


def _runtimes(files: Sequence[Emitted]) -> dict[str, str]:
    return {path.name: _sha256(path) for path in _runtime(files)}


def _compilers(files: Sequence[Emitted]) -> dict[str, str]:
    """The versions of what made machine code of files."""
    tools = [tool for file in files for tool in file.runtime.tools]
    return {tool: version for tool, version in versions(tools).items() if tool in tools}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
