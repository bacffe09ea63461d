"""What a ledger has, as models: one that was written elsewhere is looked at whole before any of it is taken."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

Count = Annotated[int, Field(ge=0)]
Error = Annotated[float, Field(ge=0)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_NAME = r"(\w[\w.-]*/)*\w[\w.-]*"
Name = Annotated[str, StringConstraints(pattern=f"^{_NAME}$")]
"""Of a file below a folder: no part of it leads out, on any system."""


def is_name(text: str) -> bool:
    """Whether that is a `Name`."""
    return re.fullmatch(_NAME, text) is not None


class Part(BaseModel):
    """Part of a record: no other keys, no conversions, no numbers that are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Worst(Part):
    """Of one output of all cases; `ratio` is of the error that is allowed."""

    error: Error
    ratio: Error


class OfPackage(Part):
    """Which machine code ran, and the cases that there was none for; the oldest records do not say these."""

    arch: str
    compilers: dict[str, str]
    unbuilt: list[str] = []


class Ran(Part):
    """What came of the cases of a file, or of a package, on a device."""

    device: str
    capability: str
    versions: dict[str, str]
    passes: list[str]
    cases: Count
    quick: bool
    worst: dict[str, Worst]
    package: OfPackage | None = None


class Compiled(Part):
    """Registers, spills and shared memory of each kernel for an architecture, the most of its variants."""

    versions: dict[str, str]
    kernels: dict[str, dict[str, Count]]


class Proof(Part):
    """How many obligations of the kernels' index work are proved and unknown, and what is beyond the proof."""

    versions: dict[str, str]
    kernels: list[str]
    beyond: list[str]
    proved: Count
    unknown: Count


class Sanitized(Part):
    """A tool of compute-sanitizer found nothing."""

    versions: dict[str, str]
    capability: str


class Mutants(Part):
    """How many mutants were `killed`, `lived`, or are `equivalent`."""

    versions: dict[str, str]
    counts: dict[str, Count]


def _kind(record: Any) -> str:
    """What a record is of, by what no other has."""
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
    """What is known of one text of a file, by place, tool or kind."""

    file: Name
    records: dict[str, Record]


class LedgerFile(Part):
    """A ledger."""

    format: Literal[1]
    files: dict[Digest, Entry]
