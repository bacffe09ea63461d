"""`kgen tune`: which tiles are the fastest, as each family tries them (`kgen.family.Family.tune`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kgen.family import family
from kgen.verify.toolchain import Progress


def tune_specs(
    loaded: Sequence[Any],
    generated: Path,
    shape: str | None = None,
    write: bool = True,
    jobs: int = 1,
    timeout: float = 60.0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Time the candidates of every kernel of some specs; with `write`, enter the winners in the tables of families.

    Returns rows of spec, kernel, tile, milliseconds, chosen and error; a spec of a family without a table is a row with
    an error. `shape` is text that the family reads, `timeout` is in seconds, for one trial.
    """
    rows: list[dict[str, Any]] = []
    table = {} if write else {"table": None}
    for kernel in dict.fromkeys(one.spec.kernel for one in loaded):
        own, tune = [one for one in loaded if one.spec.kernel == kernel], family(kernel).tune
        if tune is None:
            rows += [untuned(one.spec.name) for one in own]
        else:
            rows += tune(own, generated, shape, jobs=jobs, timeout=timeout, progress=progress, **table)
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
