"""Open the executor of a command's tasks: this machine, or a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from kgen.verify.farm.tasks import Hands, Here


@contextlib.contextmanager
def hands(jobs: int, ray: str | None, code: Sequence[str] = ()) -> Iterator[Hands]:
    """Yield this machine with `jobs` processes, or the Ray cluster at the address `ray` (`auto`:
    the local one).

    Tasks also import from the folders `code` next to the package. Raises errors as `nodes.farm`.
    """
    if ray is None:
        yield Here(jobs)
        return
    from kgen.verify.farm.nodes import farm  # imports Ray

    with farm(ray, code) as cluster:
        yield cluster
