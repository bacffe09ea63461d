"""Process groups by name: operators take strings."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def group_of(group: Any) -> str:
    """Return the name of a process group, or of a one-dimensional DeviceMesh's group (default: all
    ranks).

    Raises `TypeError` for anything else, and `ValueError` if there is no process group.
    """
    if group is None:
        group = dist.group.WORLD
    elif not isinstance(group, dist.ProcessGroup):
        if not hasattr(group, "get_group"):
            raise TypeError(f"expected a process group or a DeviceMesh, got {group!r}")
        group = group.get_group()
    if group is None:
        raise ValueError(
            "there is no process group: call torch.distributed.init_process_group first"
        )
    return str(group.group_name)


def resolved(name: str | None) -> dist.ProcessGroup:
    """Return the process group of this name (default: all ranks)."""
    return dist.distributed_c10d._resolve_process_group(group_of(None) if name is None else name)
