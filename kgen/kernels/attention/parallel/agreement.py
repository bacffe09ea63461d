"""The check of ranks before a pass, on their hosts: all agree on the call, and none is gone."""

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
    """Ranks of a group call with arguments that do not belong together."""


@dataclass(frozen=True)
class Told:
    """The settings that all ranks must share, and the message if they differ."""

    words: str
    alike: object


_TALKS: MutableMapping[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""By group, where that is not gloo's on CPUs. It keeps none alive: threads of one that outlives
`destroy_process_group` end a process by an abort, where they drop a tensor while Python ends."""
_MET: MutableSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups whose ranks have all been in one transfer of NCCL."""


def talk(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of the same ranks whose words do not wait for the device of tensors, and that notices who is gone."""
    backends = dist.get_backend_config(group).split(",")
    spoken = "cpu:gloo" in backends
    if not spoken and group not in _TALKS:
        members = dist.get_process_group_ranks(group)
        _TALKS[group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    if device.type == "cuda" and "cuda:gloo" not in backends and group not in _MET:
        # If the first transfer of a group involves only some of its ranks, NCCL waits for the others.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _MET.add(group)
    return group if spoken else _TALKS[group]


class Words:
    """The description of a rank's call: the numbers of its rows, and the settings that all ranks must share.

    It goes out at once, and what the others say is heard when it has to be.
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
            self.work = dist.all_gather(self.others, words, group=talk(group, device), async_op=True)

    def heard(self) -> list[tuple[int, int]]:
        """The numbers of queries and keys of all ranks.

        Raises `Disagreement` on all ranks where one says something else, or is gone.
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
                raise Disagreement(f"{name} {shown} here: {parts} differ")
        if wrong := [(r, row[1], row[2]) for r, row in enumerate(rows) if row[1] != row[2]]:
            raise Disagreement("; ".join(f"rank {r} has {k} keys and {v} values" for r, k, v in wrong))
        return [(row[0], row[1]) for row in rows]


@contextmanager
def _missing() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Disagreement(f"not every rank of the group is there: {error}") from error


def digest(value: object) -> int:
    """A number that other values do not have."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)


@functools.cache
def say_once(message: str) -> None:
    """A warning, of a process."""
    warnings.warn(message, UserWarning, stacklevel=2)
