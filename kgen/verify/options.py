"""Options of runs on a device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kgen.verify.farm.sharding import WHOLE, Shard


@dataclass(frozen=True)
class RunOptions:
    """Options of `sanitize_specs` and `verify_specs`."""

    device: str = "auto"
    """`auto`, `cuda` or `cpu` (Triton's interpreter)."""
    timeout: float = 300.0
    """Time limit of a case, or of a process of a sanitizer, in seconds."""
    record: bool | None = None
    """True to write the ledger. None: only after a run of all cases on `cuda`."""
    targets: Collection[str] | None = None
    """The targets whose files run. None for all."""
    shard: Shard = WHOLE
    """The part of the files that runs."""


@dataclass(frozen=True)
class VerifyOptions(RunOptions):
    """Options of `verify_specs`."""

    quick: bool | None = None
    """True for the small cases only. None: small on the CPU, all on a GPU."""
    cases: Collection[str] | None = None
    """The names of the cases that run, in all passes. None for all. Only runs of all cases are
    recorded.
    """
    built: Path | None = None
    """The folder of packages that run instead of the emitted files. Only `record=True` records
    their results.
    """
