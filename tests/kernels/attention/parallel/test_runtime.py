"""The channel over which ranks agree, and its end with the process group."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kgen.kernels.attention.parallel.agreement import Disagreement, Told, Words, talk

CPU = torch.device("cpu")


@pytest.fixture
def alone(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    dist.init_process_group(
        getattr(request, "param", "gloo"), init_method=store, rank=0, world_size=1
    )
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_group_is_not_kept_alive() -> None:
    """Otherwise its threads abort the process when they drop a tensor during Python's shutdown."""
    group = dist.distributed_c10d._get_default_group()
    assert talk(group, CPU) is group
    there = weakref.ref(group)
    del group
    dist.destroy_process_group()
    assert there() is None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("alone", [None, "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"], indirect=True)
def test_rankstalk_over_what_their_group_has_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    group = dist.distributed_c10d._get_default_group()
    monkeypatch.setattr(dist, "all_reduce", None)  # the device is missing
    assert Words(group, CPU, (3, 2, 2), {"the plan": None}).heard() == [(3, 2)]
    assert talk(group, CPU) is group


@pytest.mark.usefixtures("alone")
def test_what_is_told_is_said_in_words() -> None:
    words = Words(
        dist.distributed_c10d._get_default_group(), CPU, (3, 2, 2), {"the plan": Told("none", None)}
    )
    words.work.wait()
    words.others = [words.others[0], words.others[0].clone().fill_(1)]
    with pytest.raises(
        Disagreement, match=r"^rank 0 and rank 1 differ in the plan, which is none on this rank$"
    ):
        words.heard()
