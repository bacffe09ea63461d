"""Packages of `kgen build`, as far as others go by them: what one says of itself, and whether it is as it was built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kgen.diagnostics import Diagnostic, KgenError
from kgen.files import read_as
from kgen.verify.records import Count, Digest, Name, Part

MANIFEST = "manifest.json"


Argument = Annotated[list[Any], Field(min_length=3, max_length=3)]
"""Name, kind and value."""


class Kernel(BaseModel):
    """One file of machine code, and what its launcher goes by: part of that is of its target alone."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    target: str
    kernel: str
    arch: str
    capability: Count
    file: Name
    sha256: Digest
    arguments: list[Argument] = []
    options: dict[str, Any] = {}
    parameters: list[list[int]] = []
    maps: list[dict[str, Any]] = []


class Manifest(Part):
    """What a package is made of and by what, and every file that it has, each with its hash."""

    spec: str
    sources: dict[Name, Digest]
    compiled: list[Name]
    runtimes: dict[Name, Digest]
    compilers: dict[str, str]
    archs: list[str]
    known: list[Count]
    sizes: dict[str, list[Count]]
    targets: list[str] | None
    files: dict[Name, Digest]
    kernels: list[Kernel]
    digest: Digest


def manifest_of(built: Path, spec: str) -> Any:
    """What the package of a spec says of itself, as JSON. Raises `KgenError` where `kgen build` made none."""
    path, hint = Path(built) / spec / MANIFEST, f"kgen build {spec} -o {built}"
    if not path.is_file():
        raise KgenError(Diagnostic("not-built", f"`{path}` does not exist", hint=hint))
    return read_as(Manifest, path, "bad-package", hint)


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Of what a manifest says beside it."""
    said = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def altered(built: Path, spec: str) -> list[str]:
    """The files of a package that are not what was built."""
    manifest = manifest_of(built, spec)
    files = manifest["files"] | {row["file"]: row["sha256"] for row in manifest["kernels"]}
    paths = {name: Path(built) / spec / name for name in files}
    edited = [
        name
        for name, path in paths.items()
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != files[name]
    ]
    return [MANIFEST, *edited] if manifest["digest"] != digest_of(manifest) else edited
