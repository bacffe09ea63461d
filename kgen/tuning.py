"""`kgen tune`: which tiles are the fastest, as each family tries them (`kgen.family.Family.tune`)."""

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
    """The tiles to try, and if the result is entered in the table."""

    shape: str | None = None
    """Text that the family reads; None for its default."""
    timeout: float = 60.0
    """Seconds that one trial may take."""
    write: bool = True
    """True to enter the winners in the tables of families."""
    shard: Shard = WHOLE
    """The part of the specs that is tried."""


DEFAULT = TuneOptions()


def tune_specs(
    loaded: Sequence[Any],
    generated: Path,
    options: TuneOptions = DEFAULT,
    hands: Hands | None = None,
    hear: Listener = ignore,
) -> list[dict[str, Any]]:
    """Time the candidates of every kernel of some specs.

    Returns rows of spec, kernel, tile, milliseconds, chosen and error; a spec of a family without a table is a row with
    an error. `hands` try, each spec on one device; by default that is one process here. `hear` gets an event for each
    spec that is timed.
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
    """The row of a spec without a kernel whose tiles are in a table."""
    return {
        "spec": spec,
        "kernel": "-",
        "tile": "-",
        "milliseconds": None,
        "chosen": False,
        "error": "has no such kernel",
    }
