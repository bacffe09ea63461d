"""The interface of a schedule, a way to organize attention kernels.

Each schedule is a subfolder of this folder. Its parts are imported lazily: rendering needs no
proofs, and explanations need no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.family import Chip, Lazy


@dataclass(frozen=True)
class Schedule:
    """The parts of one schedule. Its templates are in `templates/attention/<name>/`."""

    name: str
    made: Lazy
    """`(Planned, Sequence[Made]) -> Made` of `targets/triton/made.py`: its parts of the files of a
    spec.

    The sequence has the parts of the schedules before it.
    """
    chip: Chip | None = None
    """The only chip that it supports, with its file; None for every chip."""
    explained: Lazy | None = None
    """`(Loaded, AttentionPlan) -> Explained` of `explaining/explained.py`: its conditions, tiles
    and facts as text.
    """
    obligations: Lazy | None = None
    """`(Loaded, Extent) -> Iterator[Obligation]`: the obligations of its kernels."""
    calls: Lazy | None = None
    """`(Prepared, Sequence[Calls]) -> Calls` of `targets/triton/native_calls.py`: its launches from
    C.

    The sequence has the launches of the schedules after it.
    """
