"""`kgen tune`: find the fastest tiles with each family's tuner (`kgen.family.Family.tune`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.family import family
from kgen.verify.events import Listener, ignore
from kgen.verify.farm.sharding import WHOLE, Shard
from kgen.verify.farm.tasks import Hands


@dataclass(frozen=True)
class TuneOptions:
    """Options of `kgen tune`."""

    shape: str | None = None
    """Size as text, for example `2x16x8192`; None for the family's default."""
    timeout: float = 60.0
    """Seconds that one trial may take."""
    write: bool = True
    """True to write the winners to the tables of the families."""
    shard: Shard = WHOLE
    """The part of the specs to tune."""


DEFAULT = TuneOptions()


def tune_specs(
    loaded: Sequence[Any],
    generated: Path,
    options: TuneOptions = DEFAULT,
    hands: Hands | None = None,
    hear: Listener = ignore,
) -> list[dict[str, Any]]:
    """Time the candidate tiles of every kernel of some specs.

    Return rows of spec, kernel, tile, milliseconds, chosen and error. A spec of a family without a
    table gives one row with an error. `hands` run the trials, each spec on one device; the default
    is one process on this machine. `hear` receives an event per timed spec.
    """
    rows: list[dict[str, Any]] = []
    loaded = options.shard.of(loaded, lambda one: one.folder)
    for kernel in dict.fromkeys(one.spec.kernel for one in loaded):
        own, tune = [one for one in loaded if one.spec.kernel == kernel], family(kernel).tune
        if tune is None:
            rows += [untuned(one.spec.name) for one in own]
        else:
            rows += tune(own, generated, options, hands, hear)
    return rows


def untuned(spec: str) -> dict[str, Any]:
    """Return the row of a spec whose kernels have no tile table."""
    return {
        "spec": spec,
        "kernel": "-",
        "tile": "-",
        "milliseconds": None,
        "chosen": False,
        "error": "has no kernel with a tile table",
    }
