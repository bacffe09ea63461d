"""Models of ledger records.

A ledger from elsewhere is validated as a whole before any record is used.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

Count = Annotated[int, Field(ge=0)]
Error = Annotated[float, Field(ge=0)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_NAME = r"(\w[\w.-]*/)*\w[\w.-]*"
Name = Annotated[str, StringConstraints(pattern=f"^{_NAME}$")]
"""Name of a file below a folder, without a part that leaves the folder on any system."""


def is_name(text: str) -> bool:
    """Return True if a text is a `Name`."""
    return re.fullmatch(_NAME, text) is not None


class Part(BaseModel):
    """Part of a record: no extra keys, no conversions, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Worst(Part):
    """Worst error of one output over all cases. `ratio` is relative to the allowed error."""

    error: Error
    ratio: Error


class OfPackage(Part):
    """The machine code that ran, and the cases without machine code, which the oldest records
    lack.
    """

    arch: str
    compilers: dict[str, str]
    unbuilt: list[str] = []


class Ran(Part):
    """Results of the cases of a file, or of a package, on a device."""

    device: str
    capability: str
    versions: dict[str, str]
    passes: list[str]
    cases: Count
    quick: bool
    worst: dict[str, Worst]
    package: OfPackage | None = None


class Compiled(Part):
    """Registers, spills and shared memory of each kernel for an architecture: the maximum over its
    variants.
    """

    versions: dict[str, str]
    kernels: dict[str, dict[str, Count]]


class Proof(Part):
    """Numbers of proved and unknown obligations of index arithmetic, and the reasons for unknown
    ones.
    """

    versions: dict[str, str]
    kernels: list[str]
    beyond: list[str]
    proved: Count
    unknown: Count


class Sanitized(Part):
    """A run of compute-sanitizer without errors."""

    versions: dict[str, str]
    capability: str


class Mutants(Part):
    """Numbers of mutants by result: `killed`, `lived`, `equivalent`."""

    versions: dict[str, str]
    counts: dict[str, Count]


def _kind(record: Any) -> str:
    """Return the kind of a record, by a key that only this kind has."""
    kinds = {"worst": "ran", "proved": "proof", "kernels": "compiled", "counts": "mutants"}
    has = record if isinstance(record, dict) else {}
    return next((kind for key, kind in kinds.items() if key in has), "sanitized")


Record: TypeAlias = Annotated[
    Annotated[Ran, Tag("ran")]
    | Annotated[Proof, Tag("proof")]
    | Annotated[Compiled, Tag("compiled")]
    | Annotated[Mutants, Tag("mutants")]
    | Annotated[Sanitized, Tag("sanitized")],
    Discriminator(_kind),
]


class Entry(Part):
    """The records of one text of a file, by place, tool or kind."""

    file: Name
    records: dict[str, Record]


class LedgerFile(Part):
    """A ledger."""

    format: Literal[1]
    files: dict[Digest, Entry]
