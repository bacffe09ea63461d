"""The interface of a schedule: kernels of attention that are organized in one way, for the calls that they serve.

A schedule is a folder beside this module. It is imported piece by piece: rendering needs no proofs, and words for
people need no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.family import Chip, Lazy


@dataclass(frozen=True)
class Schedule:
    """What the folder of a schedule offers. Its templates are in `templates/attention/` under the same name."""

    name: str
    made: Lazy
    """`(Planned, Sequence[Made]) -> Made` of `targets/triton/made.py`: what it puts into the files of a spec. The
    sequence is of the schedules ahead of it."""
    chip: Chip | None = None
    """The one chip that it is for, and its file."""
    explained: Lazy | None = None
    """`(Loaded, AttentionPlan) -> Explained` of `explaining/explained.py`: its conditions, tiles and facts in words."""
    obligations: Lazy | None = None
    """`(Loaded, Extent) -> Iterator[Obligation]`: what is to be proved of its kernels."""
    calls: Lazy | None = None
    """`(Prepared, Sequence[Calls]) -> Calls` of `targets/triton/native_calls.py`: its launches from C.
    The sequence is of the schedules behind it."""
