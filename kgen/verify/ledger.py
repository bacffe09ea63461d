"""The ledger, `generated/verified.json`: the results of each emitted file, by device and versions.

The key of a file is the hash of its program (`kgen.render.program`), without comments, docstrings
and layout. So a record is valid only for the code that ran. Each hash has records by place:

| place | record |
|---|---|
| `NVIDIA H200, torch 2.11.0, triton 3.6.0` | errors of a run, in Triton's interpreter too |
| `compiled sm_90` | the file compiled for that architecture |
| `racecheck NVIDIA H200` | this tool of compute-sanitizer found no error |
| `package sm_90a by triton 3.6.0, NVIDIA H200, torch 2.11.0` | errors of a built package |
| `proof` | obligations that are proved and unknown |

Triton's interpreter is the device `interpreter`, and `kgen build` makes the packages. Machines
without a GPU use the records of machines with one. Records of an earlier program of a file stay
until the present program has run at the same place.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.files import read as read_file
from kgen.files import read_as
from kgen.render.program import program
from kgen.verify.emitted import Emitted, emitted_files, parts
from kgen.verify.records import LedgerFile, is_name

FILENAME = "verified.json"
INTERPRETER = "interpreter"
PROOF = "proof"
MUTANTS = "mutants"

STATES = ("verified", "interpreted", "compiled", "unrecorded", "stale", "missing")
"""The states of an emitted file, the best first. `status` defines them."""
WITHOUT_RESULT = ("unrecorded", "stale", "missing")
"""The states of a file without a result for its present program. A check of a project fails on
them.
"""

Ledger = dict[str, dict[str, Any]]
"""By hash: `{"file": path below generated, "records": {place: record}}`."""


def file_hash(path: Path) -> str:
    """Return the sha256 of the programs in an emitted file and the files that belong to it."""
    return hashlib.sha256(
        b"".join(program(read_file(p), p.suffix) for p in dict.fromkeys(parts(path)))
    ).hexdigest()


def read(generated: Path) -> Ledger:
    """Read the ledger; empty if there is none. Raise `KgenError` if the file is not a ledger."""
    path = Path(generated) / FILENAME
    try:
        return read_path(path, f"remove {path}")
    except FileNotFoundError:
        return {}


def require_readable(generated: Path) -> None:
    """Raise `KgenError` if the ledger cannot be read.

    Call this before a run that records results.
    """
    read(generated)


def read_path(path: Path, hint: str) -> Ledger:
    """Read a ledger. Raise `FileNotFoundError`, or `KgenError` if the file is not a ledger."""

    def wrong(why: str, line: int | None = 1, column: int | None = 1) -> KgenError:
        message = f"cannot read the ledger: {why}"
        return KgenError(Diagnostic("bad-ledger", message, str(path), line, column, hint=hint))

    try:
        files: Ledger = read_as(LedgerFile, path, "bad-ledger", hint)["files"]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise wrong(error.strerror or str(error)) from None
    except KgenError as error:
        (said,) = error.diagnostics
        raise wrong(said.message, said.line, said.column) from None
    return files


@dataclass(frozen=True)
class Where:
    """The device of a run, and the versions of its packages."""

    device: str
    """The name of the device, or `INTERPRETER`."""
    capability: str
    """The compute capability, such as `9.0`."""
    versions: Mapping[str, str]
    """The version of each package."""
    toolchain: str
    """The versions that are part of the place of a record (`toolchain.toolchain`)."""

    def entry(self) -> dict[str, Any]:
        """Return the part of a record that describes the device and versions."""
        return {
            "device": self.device,
            "capability": self.capability,
            "versions": dict(self.versions),
        }


@dataclass(frozen=True)
class PackageCode:
    """The machine code of a package for one architecture, and its compilers."""

    arch: str
    compilers: Mapping[str, str]
    """The version of each compiler."""
    unbuilt: Sequence[str]
    """The cases without machine code."""


def record(
    generated: Path,
    path: Path,
    digest: str,
    rows: Sequence[Mapping[str, Any]],
    where: Where,
    *,
    quick: bool,
) -> None:
    """Record the rows of `verify_specs` for one file, device and toolchain.

    Failed rows remove earlier results of their cases. A quick run does not replace the record of a
    full run.
    """
    place = f"{where.device}, {where.toolchain}"
    _enter_run(generated, path, digest, rows, place, where.entry(), quick=quick)


def record_package(
    generated: Path,
    path: Path,
    digest: str,
    rows: Sequence[Mapping[str, Any]],
    where: Where,
    code: PackageCode,
    *,
    quick: bool,
) -> None:
    """Record the rows of `verify_specs` for the machine code of one file in a package.

    The record is valid only for the package, and not for the emitted file.
    """
    made = " and ".join(f"{tool} {version}" for tool, version in sorted(code.compilers.items()))
    place = f"package {code.arch} by {made}, {where.device}, torch {where.versions['torch']}"
    package = {"arch": code.arch, "compilers": dict(code.compilers), "unbuilt": list(code.unbuilt)}
    _enter_run(
        generated, path, digest, rows, place, {**where.entry(), "package": package}, quick=quick
    )


def _enter_run(
    generated: Path,
    path: Path,
    digest: str,
    rows: Sequence[Mapping[str, Any]],
    place: str,
    where: Mapping[str, Any],
    *,
    quick: bool,
) -> None:
    def change(files: Ledger) -> None:
        records = _records(files, generated, path, digest)
        if not rows or not all(row["ok"] for row in rows):
            records.pop(place, None)
            return
        if quick and not records.get(place, {"quick": True})["quick"]:
            return
        records[place] = {
            **where,
            "passes": sorted({str(row["pass"]) for row in rows}),
            "cases": len(rows),
            "quick": quick,
            "worst": _worst(rows),
        }

    update(generated, change)


def record_compiled(
    generated: Path,
    path: Path,
    digest: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    arch: str,
    versions: Mapping[str, str],
) -> None:
    """Record the rows of `compile_specs` for one file and architecture."""

    def change(files: Ledger) -> None:
        records = _records(files, generated, path, digest)
        if not rows or not all(row["ok"] for row in rows):
            records.pop(f"compiled {arch}", None)
            return
        kernels: dict[str, dict[str, int]] = {}
        for row in rows:
            use = kernels.setdefault(row["kernel"], {})
            for what in ("registers", "spills", "shared"):
                use[what] = max(use.get(what, 0), int(row[what]))
        records[f"compiled {arch}"] = {"versions": dict(versions), "kernels": kernels}

    update(generated, change)


def record_sanitized(
    generated: Path,
    path: Path,
    digest: str,
    tool: str,
    clean: bool,
    *,
    device: str,
    capability: str,
    versions: Mapping[str, str],
) -> None:
    """Record that a tool of compute-sanitizer found no error in one file, or remove that record."""

    def change(files: Ledger) -> None:
        records = _records(files, generated, path, digest)
        if clean:
            records[f"{tool} {device}"] = {"capability": capability, "versions": dict(versions)}
        else:
            records.pop(f"{tool} {device}", None)

    update(generated, change)


def record_proved(
    generated: Path,
    path: Path,
    digest: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    versions: Mapping[str, str],
) -> None:
    """Record the rows of `prove_specs` for one file: the numbers of proved and unknown obligations,
    and the limits.

    A refuted row removes the earlier record.
    """

    def change(files: Ledger) -> None:
        records = _records(files, generated, path, digest)
        verdicts = [row["verdict"] for row in rows]
        if not rows or "refuted" in verdicts:
            records.pop(PROOF, None)
            return
        records[PROOF] = {
            "versions": dict(versions),
            "kernels": list(dict.fromkeys(row["kernel"] for row in rows)),
            "beyond": sorted({row["message"] for row in rows if row["verdict"] == "unknown"}),
            **{verdict: verdicts.count(verdict) for verdict in ("proved", "unknown")},
        }

    update(generated, change)


def record_mutated(
    generated: Path, path: Path, digest: str, counts: Mapping[str, int], versions: Mapping[str, str]
) -> None:
    """Record the numbers of mutants of one file that were `killed`, `lived`, or are
    `equivalent`.
    """

    def change(files: Ledger) -> None:
        records = _records(files, generated, path, digest)
        records[MUTANTS] = {"versions": dict(versions), "counts": dict(counts)}

    update(generated, change)


def _records(files: Ledger, generated: Path, path: Path, digest: str) -> dict[str, Any]:
    name = Path(os.path.relpath(path, generated)).as_posix()
    records: dict[str, Any] = files.setdefault(digest, {"file": name, "records": {}})["records"]
    return records


def _worst(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    worst: dict[str, dict[str, float]] = {}
    for row in rows:
        for name, (error, ratio) in row.get("outputs", {}).items():
            entry = worst.setdefault(name, {"error": 0.0, "ratio": 0.0})
            entry["error"] = max(entry["error"], float(f"{error or 0.0:.3g}"))
            entry["ratio"] = max(entry["ratio"], float(f"{ratio or 0.0:.3g}"))
    return worst


def update(generated: Path, change: Callable[[Ledger], None]) -> None:
    """Change the ledger under a lock, drop the records that `kept` drops, and replace the file
    atomically.
    """
    generated = Path(generated)
    with locked(generated):
        files = read(generated)
        change(files)
        write(generated / FILENAME, kept(files, present(generated)))


def present(generated: Path) -> dict[str, str]:
    """Return the hash of each emitted file, by path.

    Ignore folders whose name is not a name of a spec.
    """
    # A variant of a spec has its files one folder deeper.
    emitted = [*sorted(generated.glob("*/*.py")), *sorted(generated.glob("*/*/*.py"))]
    names = ((path.relative_to(generated).as_posix(), path) for path in emitted)
    return {name: file_hash(path) for name, path in names if is_name(name)}


def write(path: Path, files: Ledger) -> None:
    """Replace a ledger atomically if it differs."""
    text = (
        json.dumps({"format": 1, "files": files}, indent=2, sort_keys=True, allow_nan=False) + "\n"
    )
    if path.exists() and path.read_text() == text:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def kept(files: Ledger, present: Mapping[str, str]) -> Ledger:
    """Drop records of missing files, and records of earlier programs at places where the present
    program ran.
    """
    # If several files have a hash without an entry, such as copies in adapters, the first name is
    # used.
    names = {digest: name for name, digest in reversed([*present.items()])}
    left: Ledger = {}
    for digest, entry in files.items():
        name: str = entry["file"]
        if present.get(name) != digest:
            name = names.get(digest, name)
        if name not in present:
            continue
        newer = {} if digest in names else files.get(present[name], {}).get("records", {})
        if records := {
            place: found for place, found in entry["records"].items() if place not in newer
        }:
            left[digest] = {"file": name, "records": records}
    return left


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    # The folder itself is the lock, because the ledger is replaced, and a lock file would remain.
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def status(loaded: Sequence[Any], generated: Path) -> list[dict[str, Any]]:
    """Return a row for each emitted file that can be called.

    | state | meaning |
    |---|---|
    | `verified` | the program passed on a GPU |
    | `interpreted` | it passed only in the interpreter |
    | `compiled` | it has not run, but compiled for its architecture, or for any if it has none |
    | `stale` | it has no result, but an earlier program of the file has |
    | `unrecorded` | the ledger has no result for any program of the file |
    | `missing` | the file is not rendered |

    The keys of a row are `spec`, `file`, `state`, `device`, `error`, `verified`, `earlier` and
    `proof`. `verified` has the worst error by device and toolchain, GPUs first; `device` and
    `error` are from the first device. `earlier` lists the places where only an earlier program ran.
    `proof` has the numbers of proved and unknown obligations, or None.
    """
    files = read(generated)
    return [
        _status(file, files, generated) for one in loaded for file in emitted_files(generated, one)
    ]


def _status(file: Emitted, files: Ledger, generated: Path) -> dict[str, Any]:
    path = file.path
    row: dict[str, Any] = {"spec": file.spec, "file": str(path), "state": "missing", "device": None}
    row |= {"error": None, "verified": {}, "earlier": [], "proof": None}
    if not path.is_file():
        return row
    digest, name = file_hash(path), Path(os.path.relpath(path, generated)).as_posix()
    records = files.get(digest, {"records": {}})["records"]
    others = [
        entry["records"]
        for other, entry in files.items()
        if other != digest and entry["file"] == name
    ]
    earlier = {place for other in others for place in _ran(other) if place not in records}
    row["earlier"] = sorted(earlier)
    row["proof"] = _proof(records)
    ran = _ran(records)
    if not ran:
        archs = _compiled(records)
        compiled = file.arch in archs if file.arch else bool(archs)
        before = any(_ran(other) or _compiled(other) for other in others)
        return row | {"state": "compiled" if compiled else "stale" if before else "unrecorded"}
    places = sorted(ran, key=lambda place: (ran[place]["device"] == INTERPRETER, place))
    errors = {place: _greatest_error(ran[place]) for place in places}
    device = ran[places[0]]["device"]
    own = [
        error
        for place in places
        if ran[place]["device"] == device and (error := errors[place]) is not None
    ]
    return row | {
        "state": "interpreted" if device == INTERPRETER else "verified",
        "device": device,
        "error": max(own, default=None),
        "verified": errors,
    }


def _compiled(records: Mapping[str, Any]) -> list[str]:
    """Return the architectures for which the file was compiled."""
    return [place.removeprefix("compiled ") for place in records if place.startswith("compiled ")]


def _ran(records: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records of runs of the file itself, without compilers, sanitizers and packages."""
    return {
        place: found
        for place, found in records.items()
        if "worst" in found and "package" not in found
    }


def records_of(path: Path, generated: Path) -> dict[str, Any]:
    """Return all records of the present program of a file, by place.

    Raise `KgenError` if the file is missing.
    """
    if not path.is_file():
        hint = "name an emitted file, as generated/causal/triton.py"
        raise KgenError(Diagnostic("no-file", "there is no such file", file=str(path), hint=hint))
    records: dict[str, Any] = read(generated).get(file_hash(path), {"records": {}})["records"]
    return records


def proof_of(path: Path, generated: Path) -> dict[str, Any] | None:
    """Return the record of the proof of an emitted file, with its versions; None without one.

    It has the numbers of proved and unknown obligations.
    """
    if not path.is_file():
        return None
    records: dict[str, Any] = read(generated).get(file_hash(path), {"records": {}})["records"]
    return records.get(PROOF)


def _proof(records: Mapping[str, Any]) -> dict[str, int] | None:
    found = records.get(PROOF)
    return None if found is None else {verdict: found[verdict] for verdict in ("proved", "unknown")}


def _greatest_error(record: Mapping[str, Any]) -> float | None:
    return max((entry["error"] for entry in record["worst"].values()), default=None)
