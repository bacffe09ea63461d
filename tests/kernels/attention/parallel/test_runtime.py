"""Groups of ranks end when PyTorch ends them."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch.distributed as dist

from kgen.kernels.attention.parallel.words import _talk


def test_a_group_is_not_kept_alive(tmp_path: Path) -> None:
    """Its threads would end the process by an abort, where they drop a tensor while Python ends."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = dist.distributed_c10d._get_default_group()
    assert _talk(group) is group
    there = weakref.ref(group)
    del group
    dist.destroy_process_group()
    assert there() is None
