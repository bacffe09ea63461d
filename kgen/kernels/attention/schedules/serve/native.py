"""The C launches of the serving kernels: there are none yet."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.kernels.attention.schedules.serve.plan import serves
from kgen.kernels.attention.targets.triton.native_calls import Calls, Prepared
from kgen.targets.native import refuse


def calls(of: Prepared, others: Sequence[Calls]) -> Calls:
    """Return no launches. Raise `KgenError` for a spec with the pass `serve`."""
    if serves(of.loaded):
        refuse(of.loaded, "C has no launches for the pass `serve` yet", "leave `--c` out")
    return Calls()
