"""`generated/verified.json`: which emitted file was verified where, with which error.

The key of a file is the hash of its program (`kgen.render.program`): a record never speaks for other code. Comments,
docstrings and layout are no part of it. Each hash has a record per device and versions of what ran it
(`NVIDIA H200, torch 2.11.0, triton 3.6.0`); Triton's interpreter is the device `interpreter`. `compiled sm_90` says
that it compiled for that architecture, and `racecheck NVIDIA H200` that this tool of compute-sanitizer found nothing
there. `package sm_90a by triton 3.6.0, NVIDIA H200, torch 2.11.0` is of machine code that `kgen build` made of the
file. `proof` has what is proved of its index work. A machine without a GPU reads here what a machine with one has
found. What an earlier text of a file was found to be stays until the present one was tried at the same place.
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
"""Of an emitted file, the best first; `status` says what they mean."""
WITHOUT_RESULT = ("unrecorded", "stale", "missing")
"""The states of a file whose present text has no result: a check of a project fails on each."""

Ledger = dict[str, dict[str, Any]]
"""By hash: `{"file": path below generated, "records": {place: record}}`."""


def file_hash(path: Path) -> str:
    """Return the sha256 of the programs in an emitted file and the files that belong to it."""
    return hashlib.sha256(b"".join(program(read_file(p), p.suffix) for p in parts(path))).hexdigest()


def read(generated: Path) -> Ledger:
    """The ledger, empty where there is none. Raises `KgenError` for a file that is not one."""
    path = Path(generated) / FILENAME
    try:
        return read_path(path, f"remove {path}")
    except FileNotFoundError:
        return {}


def require_readable(generated: Path) -> None:
    """Raise `KgenError` if the ledger cannot be read, before a run whose results it would get."""
    read(generated)


def read_path(path: Path, hint: str) -> Ledger:
    """The ledger that is this file. Raises `FileNotFoundError`, and `KgenError` for a file that is not one."""

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
    """The device that something ran on, and what it ran with."""

    device: str
    """Its name, or `INTERPRETER`."""
    capability: str
    """The compute capability, as `9.0`."""
    versions: Mapping[str, str]
    """The version of each package."""
    toolchain: str
    """The versions that tell records apart (`toolchain.toolchain`)."""

    def entry(self) -> dict[str, Any]:
        """The part of a record that says where it is of."""
        return {"device": self.device, "capability": self.capability, "versions": dict(self.versions)}


@dataclass(frozen=True)
class PackageCode:
    """The machine code of a package for one architecture, and what made it."""

    arch: str
    compilers: Mapping[str, str]
    """The version of each compiler."""
    unbuilt: Sequence[str]
    """Cases that it has no machine code for."""


def record(
    generated: Path,
    path: Path,
    digest: str,
    rows: Sequence[Mapping[str, Any]],
    where: Where,
    *,
    quick: bool,
) -> None:
    """Enter the rows of `verify_specs` for one file, device and toolchain.

    Rows that failed take away what was claimed of these before. A quick run does not replace the record of a full
    one.
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
    """Enter the same of the machine code that a package has of one file. It speaks for the package alone, and what ran
    in place of the file is not the file."""
    made = " and ".join(f"{tool} {version}" for tool, version in sorted(code.compilers.items()))
    place = f"package {code.arch} by {made}, {where.device}, torch {where.versions['torch']}"
    package = {"arch": code.arch, "compilers": dict(code.compilers), "unbuilt": list(code.unbuilt)}
    _enter_run(generated, path, digest, rows, place, {**where.entry(), "package": package}, quick=quick)


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
    """Enter the rows of `compile_specs` for one file and architecture."""

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
    """Enter that a tool of compute-sanitizer found nothing in one file, or take away that it did."""

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
    """Enter the rows of `prove_specs` for one file: how many are proved, how many unknown, and what is beyond the
    proof. A row that is refuted takes away what was claimed before."""

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
    """Enter how many mutants of one file were `killed`, `lived`, or are `equivalent`."""

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
    """Change the ledger under a lock, forget what `kept` does not keep, and replace it in one step."""
    generated = Path(generated)
    with locked(generated):
        files = read(generated)
        change(files)
        write(generated / FILENAME, kept(files, present(generated)))


def present(generated: Path) -> dict[str, str]:
    """The emitted files that are there, and the hash of each. Folders of other names are nobody's."""
    # A variant of a spec has its files one folder deeper.
    emitted = [*sorted(generated.glob("*/*.py")), *sorted(generated.glob("*/*/*.py"))]
    names = ((path.relative_to(generated).as_posix(), path) for path in emitted)
    return {name: file_hash(path) for name, path in names if is_name(name)}


def write(path: Path, files: Ledger) -> None:
    """Replace a ledger in one step, where it is another."""
    text = json.dumps({"format": 1, "files": files}, indent=2, sort_keys=True, allow_nan=False) + "\n"
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
    """Without files that are gone, and of earlier texts without the places where the present text was tried."""
    # Of copies that are of no entry yet, as an adapter has them, the kernels' own are named.
    names = {digest: name for name, digest in reversed([*present.items()])}
    left: Ledger = {}
    for digest, entry in files.items():
        name: str = entry["file"]
        if present.get(name) != digest:
            name = names.get(digest, name)
        if name not in present:
            continue
        newer = {} if digest in names else files.get(present[name], {}).get("records", {})
        if records := {place: found for place, found in entry["records"].items() if place not in newer}:
            left[digest] = {"file": name, "records": records}
    return left


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    # The folder itself is the lock: the ledger is replaced, and a lock file would be litter.
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def status(loaded: Sequence[Any], generated: Path) -> list[dict[str, Any]]:
    """A row for each emitted file that can be called: spec, file, state, device, error, verified, earlier, proof.

    `missing`: not rendered. `verified`: this text ran right on a GPU; the row's own `verified` has the worst error by
    device and toolchain, a GPU before the interpreter, and `device` and `error` are those of the first device.
    `interpreted`: it ran right in the interpreter alone. `compiled`: it was compiled, for the architecture that it is
    for or for any, and has not run. `stale`: none of these, but an earlier text of the file ran or was compiled.
    `unrecorded`: no text of the file ran or was compiled, as far as the ledger knows. `earlier` names the places where
    another text of the file ran, and this one did not. `proof` has how many obligations are proved and unknown, where
    they were looked at.
    """
    files = read(generated)
    return [_status(file, files, generated) for one in loaded for file in emitted_files(generated, one)]


def _status(file: Emitted, files: Ledger, generated: Path) -> dict[str, Any]:
    path = file.path
    row: dict[str, Any] = {"spec": file.spec, "file": str(path), "state": "missing", "device": None}
    row |= {"error": None, "verified": {}, "earlier": [], "proof": None}
    if not path.is_file():
        return row
    digest, name = file_hash(path), Path(os.path.relpath(path, generated)).as_posix()
    records = files.get(digest, {"records": {}})["records"]
    others = [entry["records"] for other, entry in files.items() if other != digest and entry["file"] == name]
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
        error for place in places if ran[place]["device"] == device and (error := errors[place]) is not None
    ]
    return row | {
        "state": "interpreted" if device == INTERPRETER else "verified",
        "device": device,
        "error": max(own, default=None),
        "verified": errors,
    }


def _compiled(records: Mapping[str, Any]) -> list[str]:
    """The architectures that the file was compiled for."""
    return [place.removeprefix("compiled ") for place in records if place.startswith("compiled ")]


def _ran(records: Mapping[str, Any]) -> dict[str, Any]:
    """The records of where the file itself ran, without those of what compiled or was looked through by a sanitizer,
    and of packages."""
    return {place: found for place, found in records.items() if "worst" in found and "package" not in found}


def records_of(path: Path, generated: Path) -> dict[str, Any]:
    """All that is recorded of an emitted file as it is, by place, tool or kind. Raises `KgenError` without the file."""
    if not path.is_file():
        hint = "name an emitted file, as generated/causal/triton.py"
        raise KgenError(Diagnostic("no-file", "there is no such file", file=str(path), hint=hint))
    records: dict[str, Any] = read(generated).get(file_hash(path), {"records": {}})["records"]
    return records


def proof_of(path: Path, generated: Path) -> dict[str, Any] | None:
    """What is recorded of the proof of an emitted file: how many obligations are proved and unknown, and by which
    versions."""
    if not path.is_file():
        return None
    records: dict[str, Any] = read(generated).get(file_hash(path), {"records": {}})["records"]
    return records.get(PROOF)


def _proof(records: Mapping[str, Any]) -> dict[str, int] | None:
    found = records.get(PROOF)
    return None if found is None else {verdict: found[verdict] for verdict in ("proved", "unknown")}


def _greatest_error(record: Mapping[str, Any]) -> float | None:
    return max((entry["error"] for entry in record["worst"].values()), default=None)
