"""Manifests of packages of `kgen build`, and checks that a package is unchanged."""

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
"""Name, kind and value of an argument."""


class Kernel(BaseModel):
    """One file of machine code, with the data that its launcher reads.

    Some fields depend on the target.
    """

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
    """The sources and compilers of a package, and the hash of each of its files."""

    spec: str
    sources: dict[Name, Digest]
    compiled: list[Name]
    beside: list[Name]
    """The modules that `triton.py` imports when it needs them, with or without a file."""
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
    """Return the manifest of a spec's package as JSON.

    Raises `KgenError` if there is no package.
    """
    path, hint = Path(built) / spec / MANIFEST, f"kgen build {spec} -o {built}"
    if not path.is_file():
        raise KgenError(Diagnostic("not-built", f"`{path}` does not exist", hint=hint))
    return read_as(Manifest, path, "bad-package", hint)


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest without its own digest."""
    said = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def altered(built: Path, spec: str) -> list[str]:
    """Return the files of a package that changed since it was built."""
    manifest = manifest_of(built, spec)
    files = manifest["files"] | {row["file"]: row["sha256"] for row in manifest["kernels"]}
    paths = {name: Path(built) / spec / name for name in files}
    edited = [
        name
        for name, path in paths.items()
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != files[name]
    ]
    return [MANIFEST, *edited] if manifest["digest"] != digest_of(manifest) else edited
