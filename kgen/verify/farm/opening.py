"""Open the hands that do the tasks of a command: this machine, or a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from kgen.verify.farm.tasks import Hands, Here


@contextlib.contextmanager
def hands(jobs: int, ray: str | None, code: Sequence[str] = ()) -> Iterator[Hands]:
    """Open this machine with `jobs` processes, or with an address the Ray cluster there (`auto`: the local one).

    `code` are folders beside the package that tasks import from, too. Raises what `nodes.farm` does.
    """
    if ray is None:
        yield Here(jobs)
        return
    from kgen.verify.farm.nodes import farm  # imports more than a command of one machine needs

    with farm(ray, code) as cluster:
        yield cluster
