"""Ranks determine once, and all alike, if they can read each other's memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from kgen.kernels.attention.parallel import peer_memory
from kgen.kernels.attention.parallel.agreement import say_once
from kgen.kernels.attention.parallel.peer_memory import Peers, aligned, peers_of

GPU = torch.device("cuda", 0)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A group of one rank with a simulated GPU."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    say_once.cache_clear()
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


@pytest.fixture
def seen(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> dist.ProcessGroup:
    """The group, with symmetric memory on its GPU."""
    options = SimpleNamespace(_timeout=SimpleNamespace(total_seconds=lambda: 3.5))
    backend = SimpleNamespace(options=options)
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: backend)
    monkeypatch.setattr(
        symmetric, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype)
    )
    monkeypatch.setattr(symmetric, "rendezvous", lambda buffer, name: f"{name} {len(buffer)}")
    return group


def calls() -> tuple[list[int], Any]:
    """Return a list that counts the agreements, and the function that agrees."""
    found: list[int] = []
    return found, lambda: found.append(1)


def test_a_tensor_has_whole_lines_of_a_buffer() -> None:
    assert [aligned((n,), torch.bfloat16) for n in (0, 1, 128, 129)] == [0, 256, 256, 512]


def test_cpus_have_none(group: dist.ProcessGroup) -> None:
    agreed, agree = calls()
    assert peers_of(group, torch.device("cpu"), 10, agree) is None
    assert not agreed


def test_what_hinders_is_said_once(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("no such memory here\nat line 3")

    monkeypatch.setattr(symmetric, "empty", refused)
    agreed, agree = calls()
    with pytest.warns(
        UserWarning, match="other's memory: no such memory here. NCCL does their transfers"
    ):
        assert peers_of(group, GPU, 10, agree) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peers_of(group, GPU, 20, agree) is None
    assert agreed == [1]


def test_ranks_of_several_hosts_say_nothing(
    seen: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [(("here", "1"), 0), (("there", "2"), 0)]
    monkeypatch.setattr(peer_memory, "_told", lambda speaking, said: places)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peers_of(seen, GPU, 10, calls()[1]) is None


@pytest.mark.parametrize(("other", "visible"), [(0, True), (1, False)])
def test_gpus_must_see_each_other(
    other: int, visible: bool, seen: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If several processes use the same device number, peer access is unknown."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: visible)
    monkeypatch.setattr(
        peer_memory,
        "_told",
        lambda speaking, said: (
            [said, (said[0], other)] if isinstance(said, tuple) else [said, said]
        ),
    )
    with pytest.warns(UserWarning, match="memory: their GPUs have no peer access"):
        assert peers_of(seen, GPU, 10, calls()[1]) is None


def test_a_buffer_grows_and_graphs_keep_theirs(seen: dist.ProcessGroup) -> None:
    agreed, agree = calls()
    first = peers_of(seen, GPU, 100, agree)
    assert isinstance(first, Peers)
    assert (first.handle, first.size, first.milliseconds) == (f"{seen.group_name} 100", 100, 3500)
    assert peers_of(seen, GPU, 60, agree) is first
    second = peers_of(seen, GPU, 104, agree)
    assert isinstance(second, Peers)
    assert second.size == 125  # buffers grow by more than the request
    second.captured = True
    third = peers_of(seen, GPU, 1000, agree)
    assert isinstance(third, Peers)
    assert third.size == 1000
    assert peer_memory._FOUND[seen].kept == [second]
    assert agreed == [1, 1, 1]


def test_a_graph_ahead_of_a_first_call_is_said(
    seen: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(UserWarning, match="captured before the first call of its size"):
        assert peers_of(seen, GPU, 100, calls()[1]) is None


def test_brief_transfers_are_in_the_stream_that_computes(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brief transfers run in the order of calls and wait for no other stream."""
    done: list[Any] = []
    here = SimpleNamespace(wait_stream=lambda other: done.append(other))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    handle = SimpleNamespace(
        barrier=lambda channel, milliseconds: done.append((channel, milliseconds))
    )
    copying: Any = "copying"  # a string, so that any use of the stream fails
    found = Peers(handle, torch.empty(8), 8, 3500, copying)
    assert found.begin(brief=True)
    x = torch.zeros(3)
    for point in (found.open(), found.copy([(x, torch.ones(3))]), found.close()):
        point.wait()
    found.free()
    # waits first for the copies of an earlier call
    assert done == ["copying", (0, 3500), (1, 3500)]
    assert x.tolist() == [1, 1, 1]


def test_a_graph_has_brief_transfers_beside(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    copying: Any = None
    found = Peers(None, torch.empty(8), 8, 3500, copying)
    assert not found.begin(brief=True)
    assert found.captured
