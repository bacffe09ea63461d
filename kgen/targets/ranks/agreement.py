"""The check before each pass that all ranks are alive and make the same call.

It uses gloo, on the hosts.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, MutableSet
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


class Disagreement(RuntimeError):
    """Raised on all ranks of a group if their calls differ, or if a rank is gone."""


@dataclass(frozen=True)
class Told:
    """A value that all ranks must share (`alike`), and its text in the error message (`words`)."""

    words: str
    alike: object


_TALKS: MutableMapping[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""The gloo group of each group that has no gloo backend for CPUs.

References are weak. If a group outlives `destroy_process_group`, its threads may release a tensor
while Python exits, which aborts the process.
"""
_MET: MutableSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups whose ranks have all taken part in one NCCL operation."""


def talk(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a group of the same ranks for messages on CPUs. Its operations fail if a rank is gone.

    The first call of a group on GPUs also connects all of its ranks over NCCL.
    """
    backends = dist.get_backend_config(group).split(",")
    spoken = "cpu:gloo" in backends
    if not spoken and group not in _TALKS:
        members = dist.get_process_group_ranks(group)
        _TALKS[group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    if device.type == "cuda" and "cuda:gloo" not in backends and group not in _MET:
        # If the first transfer of a group involves only some of its ranks, NCCL waits for the
        # others.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _MET.add(group)
    return group if spoken else _TALKS[group]


class Words:
    """The description of a rank's call: the numbers of its rows, and the values that all ranks must
    share.

    The constructor sends it without waiting. `heard` waits for the descriptions of the others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        rows: tuple[int, int, int],
        said: Mapping[str, object],
    ) -> None:
        self.said = said
        alike = (value.alike if isinstance(value, Told) else value for value in said.values())
        words = torch.tensor([*rows, *map(digest, alike)], dtype=torch.int64)
        self.others = [torch.empty_like(words) for _ in range(dist.get_world_size(group))]
        with _missing():
            self.work = dist.all_gather(
                self.others, words, group=talk(group, device), async_op=True
            )

    def heard(self) -> list[tuple[int, int]]:
        """Wait for all ranks, and return their numbers of queries and keys.

        Raises `Disagreement` on all ranks if a description differs or a rank is gone.
        """
        with _missing():
            self.work.wait()
        rows = [x.tolist() for x in self.others]
        for i, (name, value) in enumerate(self.said.items(), 3):
            if len({row[i] for row in rows}) > 1:
                alike = [
                    [r for r, row in enumerate(rows) if row[i] == one]
                    for one in dict.fromkeys(row[i] for row in rows)
                ]
                parts = " and ".join(
                    f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}" for some in alike
                )
                shown = value.words if isinstance(value, Told) else value
                raise Disagreement(f"{parts} differ in {name}, which is {shown} on this rank")
        if wrong := [(r, row[1], row[2]) for r, row in enumerate(rows) if row[1] != row[2]]:
            raise Disagreement(
                "; ".join(f"rank {r} has {k} keys and {v} values" for r, k, v in wrong)
            )
        return [(row[0], row[1]) for row in rows]


@contextmanager
def _missing() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Disagreement(f"a rank of the group does not respond: {error}") from error


def digest(value: object) -> int:
    """Return a 64-bit hash of a value's repr."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)


@functools.cache
def say_once(message: str) -> None:
    """Warn once per message and process."""
    warnings.warn(message, UserWarning, stacklevel=2)
