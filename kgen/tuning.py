"""`kgen tune`: which tiles are the fastest, as each family tries them (`kgen.family.Family.tune`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kgen.family import family
from kgen.verify.farm.sharding import WHOLE, Shard
from kgen.verify.farm.tasks import Hands
from kgen.verify.toolchain import Progress


def tune_specs(
    loaded: Sequence[Any],
    generated: Path,
    shape: str | None = None,
    write: bool = True,
    jobs: int = 1,
    timeout: float = 60.0,
    progress: Progress | None = None,
    hands: Hands | None = None,
    shard: Shard = WHOLE,
) -> list[dict[str, Any]]:
    """Time the candidates of every kernel of some specs; with `write`, enter the winners in the tables of families.

    Returns rows of spec, kernel, tile, milliseconds, chosen and error; a spec of a family without a table is a row with
    an error. `shape` is text that the family reads, `timeout` is in seconds, for one trial. `hands` try in place of
    `jobs` processes here, each spec on one device; `shard` is the part of the specs that is tried.
    """
    rows: list[dict[str, Any]] = []
    loaded = shard.of(loaded, lambda one: one.folder)
    table = {} if write else {"table": None}
    for kernel in dict.fromkeys(one.spec.kernel for one in loaded):
        own, tune = [one for one in loaded if one.spec.kernel == kernel], family(kernel).tune
        if tune is None:
            rows += [untuned(one.spec.name) for one in own]
        else:
            rows += tune(
                own, generated, shape, jobs=jobs, timeout=timeout, progress=progress, hands=hands, **table
            )
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
