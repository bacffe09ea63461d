"""Options of runs on a device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kgen.verify.farm.sharding import WHOLE, Shard


@dataclass(frozen=True)
class RunOptions:
    """What runs where, for `sanitize_specs` and `verify_specs`."""

    device: str = "auto"
    """`auto`, `cuda` or `cpu` (Triton's interpreter)."""
    timeout: float = 300.0
    """Seconds that one case, or one process of a sanitizer, may take."""
    record: bool | None = None
    """True to write the ledger; None to write it after a whole run on `cuda`."""
    targets: Collection[str] | None = None
    """The targets whose files run; None for all."""
    shard: Shard = WHOLE
    """The part of the files that runs."""


@dataclass(frozen=True)
class VerifyOptions(RunOptions):
    """Options of `verify_specs`."""

    quick: bool | None = None
    """True for the small cases only; None for these on the CPU and all on a GPU."""
    cases: Collection[str] | None = None
    """The names of the cases that run, of all passes; None for all. The ledger hears of whole runs alone."""
    built: Path | None = None
    """The folder of packages that run instead of the emitted files. Only `record=True` enters them in the ledger."""
