"""`kgen build`: packages of machine code, made without a GPU from what was rendered and verified."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kgen.build.job import BuildJob
from kgen.build.native import FOLDER, native_of, write_native
from kgen.diagnostics import Diagnostic, KgenError
from kgen.targets import sources
from kgen.targets.native import Native
from kgen.verify import ledger
from kgen.verify.compiling import CompileJob, capability
from kgen.verify.emitted import Emitted, require_emitted
from kgen.verify.families import problem_of
from kgen.verify.processes import WorkerError, messages, threads
from kgen.verify.toolchain import Progress, require, versions

ARCHS = ("sm_80", "sm_90a")
SIZES: Mapping[str, Sequence[int]] = {
    "gqa": (1, 2, 4, 8),
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "width": (512, 1024, 2048, 4096, 8192, 16384),
    "heads": (8, 16, 32),
}
"""Of what a spec leaves open: query heads for a KV head, sequences that decode at a time (rounded up to a power of
two), the width of a norm, its heads."""
SOURCES = ("triton.py", "hopper.py")
RUNTIME = Path(__file__).parent / "runtime.py"
COLUMNS = ("spec", "arch", "kernels", "bytes", "spills", "ok", "error")

_INIT = '''"""{name}, as machine code: see manifest.json. Needs torch and a GPU, neither a compiler nor Triton."""

from pathlib import Path

from ._runtime import Package

_launcher = Package(__name__, Path(__file__).parent).load()
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
    c: bool = False,
) -> list[dict[str, Any]]:
    """Build a package of each spec under `out`, of the Triton files as they were rendered; no GPU is needed. With `c`
    it has calls from C, too.

    Returns rows of spec, arch, kernels, bytes (of machine code), spills (bytes of local memory of a thread, of the
    kernel that has most), ok, error. A package is written where all of it compiles, and replaces the one that was
    there. `timeout` is in seconds, for one kernel. Raises `KgenError` for a spec that is not rendered or has no Triton
    file or no calls from C, and for an unknown architecture, `MissingError` without torch and triton.
    """
    archs = list(dict.fromkeys(archs))
    for arch in archs:
        capability(arch)
    require("torch", "triton")
    files = [(one, _file(generated, one)) for one in loaded]
    natives = {one.folder: native_of(one, sizes) for one in loaded if c}
    tasks = [(one, file, arch) for one, file in files for arch in archs]
    done: list[int] = []

    def run(task: tuple[Any, Emitted, str]) -> list[Mapping[str, Any]]:
        one, file, arch = task
        rows = list(_compiled(one, file, arch, sizes, _unfinished(out, one.folder), timeout))
        done.append(1)
        if progress is not None:
            progress(len(done), len(tasks), f"{one.folder} {arch}")
        return rows

    for one, _ in files:
        shutil.rmtree(_unfinished(out, one.folder), ignore_errors=True)
    with threads(jobs) as pool:
        found = dict(zip([(one.folder, arch) for one, _, arch in tasks], pool.map(run, tasks), strict=True))
    for one, file in files:
        rows = [row for arch in archs for row in found[one.folder, arch]]
        if not any(row["error"] for row in rows):
            _write(one, file, rows, archs, sizes, out, natives.get(one.folder))
        shutil.rmtree(_unfinished(out, one.folder), ignore_errors=True)
    return [_summary(folder, arch, rows) for (folder, arch), rows in found.items()]


def stale(loaded: Sequence[Any], generated: Path, out: Path) -> list[str]:
    """Which packages are not there, or not of what is rendered and installed now, each as a sentence."""
    said = []
    for one in loaded:
        folder = out / one.folder
        if not (folder / "manifest.json").exists():
            said.append(f"{one.folder}: not built")
            continue
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        said += [f"{one.folder}: {why}" for why in _stale(manifest, folder, _file(generated, one))]
    return said


def _stale(manifest: Mapping[str, Any], folder: Path, file: Emitted) -> Iterator[str]:
    if manifest["sources"] != _hashes(file.path.parent):
        yield "built from other files"
    if manifest["runtime"] != _sha256(RUNTIME):
        yield "built by another kgen"
    if manifest["compilers"] != _compilers():
        yield f"built with Triton {manifest['triton']}, and here is {_compilers()['triton']}"
    for row in manifest["kernels"]:
        path = folder / row["file"]
        if not path.exists() or _sha256(path) != row["sha256"]:
            yield f"{row['file']} is not what was built"
    for name, digest in manifest["files"].items():
        if not (folder / name).exists() or _sha256(folder / name) != digest:
            yield f"{name} is not what was built"


def _file(generated: Path, loaded: Any) -> Emitted:
    for file in require_emitted(generated, loaded):
        if file.path.name == "triton.py":
            return file
    message = f"spec `{loaded.folder}` has no Triton file to build"
    raise KgenError(
        Diagnostic("nothing-to-build", message, file=str(loaded.path), hint="add `triton` to `targets`")
    )


def _unfinished(out: Path, name: str) -> Path:
    return out / f".{name}.unfinished"


def _compiled(
    loaded: Any, file: Emitted, arch: str, sizes: Mapping[str, Sequence[int]], folder: Path, timeout: float
) -> Iterator[Mapping[str, Any]]:
    job = CompileJob(problem_of(loaded), replace(file, path=file.path.resolve()), arch)
    build = BuildJob(job, sizes, folder.resolve())
    # Places of files are no part of what is built.
    environment = {"TRITON_INTERPRET": None, "TRITON_DISABLE_LINE_INFO": "1"}
    found = 0
    try:
        for row in messages("kgen.build.compile_built", build, timeout, environment):
            found += 1
            yield row
    except WorkerError as error:
        yield {"error": str(error)}
        return
    if not found:
        yield {"error": "launches no kernel"}


def _write(
    loaded: Any,
    file: Emitted,
    rows: Sequence[Mapping[str, Any]],
    archs: Sequence[str],
    sizes: Mapping[str, Sequence[int]],
    out: Path,
    native: Native | None,
) -> None:
    folder = _unfinished(out, loaded.folder)
    for source in SOURCES:
        if (file.path.parent / source).exists():
            shutil.copy(file.path.parent / source, folder / source)
    shutil.copy(RUNTIME, folder / "_runtime.py")
    (folder / "__init__.py").write_text(_init(loaded, problem_of(loaded).name), encoding="utf-8")
    kernels = sorted(({k: v for k, v in row.items() if k != "error"} for row in rows), key=json.dumps)
    if native is not None:
        write_native(loaded, native, kernels, folder)
    written = [*folder.glob("*.py"), *folder.glob(f"{FOLDER}/*")]
    hopper = (folder / "hopper.py").exists() and "sm_90a" in archs
    manifest = {
        "spec": loaded.folder,
        "sources": _hashes(file.path.parent),
        "compiled": ["triton.py", *["hopper.py"] * hopper],
        "runtime": _sha256(RUNTIME),
        "triton": _compilers()["triton"],
        "compilers": _compilers(),
        "archs": list(archs),
        "sizes": {name: list(numbers) for name, numbers in sizes.items()},
        "files": {p.relative_to(folder).as_posix(): _sha256(p) for p in sorted(written)},
        "kernels": kernels,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(out / loaded.folder, ignore_errors=True)
    folder.rename(out / loaded.folder)


def _init(loaded: Any, name: str) -> str:
    (offers,) = (source.offers for source in sources(loaded, "triton") if source.filename == "triton.py")
    names = (name, *offers)
    exports = "\n".join(f"{one} = _launcher.{one}" for one in names)
    return _INIT.format(name=name, exports=exports, quoted=", ".join(f'"{one}"' for one in names))


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


def _hashes(folder: Path) -> dict[str, str]:
    return {name: ledger.file_hash(folder / name) for name in SOURCES if (folder / name).exists()}


def _compilers() -> dict[str, str]:
    return {"triton": versions()["triton"]}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
