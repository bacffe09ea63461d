"""Plans for users: the calls that they are valid for, and invalid plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from kgen.kernels.attention.parallel.call_plans import Kernels
from kgen.kernels.attention.parallel.layout import Layout, laid_out, local
from kgen.kernels.attention.parallel.partial_sums import empty
from kgen.kernels.attention.parallel.planning import decoded, encoded
from kgen.kernels.attention.parallel.runtime import called

CAUSAL = Kernels(
    module=lambda q, v: None,
    name="causal_part",
    views=(),
    tensors=(),
    numbers=("window",),
    places=(),
    learned=(),
    packed=False,
    listed=False,
    keys=lambda q_start, q_last, **_: [(0, q_last + 1)],
    queries=None,
    reads=("h", "window"),
)
GIVEN = {"window": 5, "scale": 1.0}


def _layout(
    length: int = 60, ranks: Any = 1, sizes: tuple[int, int, int] = (1, 4, 2), **more: Any
) -> Layout:
    return laid_out(CAUSAL, (length, length), GIVEN | more, sizes, ranks, "contiguous")


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


def test_a_plan_is_of_one_mask_and_of_the_numbers_and_sizes_that_this_reads(alone: Any) -> None:
    """A plan fits any values of the numbers that the mask does not read. It fits any batch if the
    mask does not read it.
    """
    q, k = torch.zeros(3, 4, 60, 16), torch.zeros(3, 2, 60, 16)

    def call(layout: Layout, kernels: Kernels = CAUSAL) -> None:
        called(kernels, alone.group_name, layout.numbers, (q, k, k), GIVEN, back=False)

    call(_layout())
    call(_layout(window=5.0))
    call(_layout(scale=2.0))
    call(_layout(sizes=(2, 4, 2)))
    for layout, kernels in (
        (_layout(window=30), CAUSAL),
        (_layout(sizes=(1, 1, 1)), CAUSAL),
        (_layout(), replace(CAUSAL, name="other_part")),
    ):
        with pytest.raises(ValueError, match="the plan was made for another function than"):
            call(layout, kernels)


def test_a_plan_travels_as_numbers() -> None:
    plan = _layout(ranks=3).plan
    assert plan.of != 0
    assert decoded(encoded(plan)) == plan


def test_ranks_without_positions_have_no_rows() -> None:
    layout, x = _layout(length=2, ranks=3), torch.arange(2.0).view(1, 1, 2, 1)
    rows = [layout.shard(x, 2, rank=rank) for rank in range(3)]
    assert sorted(len(one.flatten()) for one in rows) == [0, 1, 1]
    assert torch.equal(layout.joined(rows, 2), x)


@pytest.mark.parametrize(
    "wrong",
    [{"length": -1}, {"ranks": 0}, {"ranks": -2}, {"sizes": (0, 1, 1)}, {"sizes": (1, 0, 1)}],
)
def test_what_is_no_plan_is_said(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lengths must be at least 0, sizes and ranks at least 1"):
        _layout(**wrong)


DOCUMENTS = replace(
    CAUSAL,
    views=(("doc", "doc", (None, "q")), ("kv_doc", "doc", (None, "kv"))),
    keys=lambda q_start, q_last, doc, **_: [(0, doc[0, q_last] + 1)],
    reads=("doc", "window"),
)


@pytest.mark.parametrize(
    ("doc", "window", "said"),
    [
        (torch.zeros(60), 5, "doc must have 60 elements along dimension 1"),
        (torch.zeros(1, 10), 5, "doc must have 60 elements along dimension 1"),
        (
            torch.zeros(1, 60, 2, dtype=torch.int64),
            5,
            r"invalid arguments of the mask \(it reads doc, window\)",
        ),
    ],
)
def test_a_plan_of_what_its_mask_cannot_read_is_said(
    doc: torch.Tensor, window: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        laid_out(DOCUMENTS, (60, 60), {"doc": doc, "window": window}, (1, 4, 2), 2, "head_tail")


@pytest.mark.parametrize("group", ["x", 2.0, True])
def test_what_is_no_group_is_said(group: Any) -> None:
    with pytest.raises(TypeError, match="expected a process group or a DeviceMesh, got"):
        _layout(ranks=group)


def test_tensors_of_other_lengths_are_not_sharded() -> None:
    """Rows after the last packed sequence are allowed."""
    layout = _layout(ranks=2)
    for rows in (59, 61):
        with pytest.raises(ValueError, match="expected 60 rows along dimension 2"):
            layout.shard(torch.zeros(1, 1, rows, 1), 2, rank=0)
    packed = replace(layout, packed=True)
    assert packed.shard(torch.zeros(61, 1, 1), 0, rank=1).shape == (30, 1, 1)
    with pytest.raises(ValueError, match="expected 60 rows along dimension 0"):
        packed.shard(torch.zeros(59, 1, 1), 0, rank=1)


def test_a_plan_for_other_ranks_than_there_are_asks_for_one(alone: Any) -> None:
    layout, x = _layout(ranks=2), torch.zeros(1, 1, 60, 1)
    with pytest.raises(ValueError, match="the plan is for 2 ranks, the group has 1"):
        layout.shard(x, 2)
    assert layout.shard(x, 2, rank=1).shape == (1, 1, 30, 1)


def test_dtensors_are_sharded_along_positions_alone(alone: Any) -> None:
    mesh, x = DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int64)), torch.zeros(1, 2, 60, 16)

    def placed(*placements: Any) -> DTensor:
        return DTensor.from_local(x, mesh, placements, run_check=False)

    right = placed(Shard(1), Shard(2))
    layout = laid_out(CAUSAL, (60, 60), GIVEN, (1, 2, 2), None, "contiguous")
    assert local(right, right, right, 2, layout, None)[1].shape == x.shape
    part = placed(Partial(), Shard(2))
    for tensors in (
        (part, part, part),
        (x, right, right),
        (right, right, placed(Shard(2), Shard(1))),
    ):
        with pytest.raises(
            ValueError, match="must be sharded alike, over one mesh dimension along dimension 2"
        ):
            local(*tensors, 2, None, None)
    apart = laid_out(CAUSAL, (60, 60), GIVEN, (1, 2, 2), 2, "head_tail")
    with pytest.raises(ValueError, match="one run of positions per rank, got head_tail"):
        local(right, right, right, 2, apart, None)


@pytest.mark.parametrize("turned", [False, True])
def test_room_has_the_memory_order_of_a_tensor(turned: bool) -> None:
    x = torch.zeros(2, 5, 3, 8) if turned else torch.zeros(2, 3, 5, 8)
    x = x.transpose(1, 2) if turned else x
    assert empty(x.shape, x).stride() == x.stride()
    assert empty((2, 3, 5, 4), x).stride() == ((60, 4, 12, 1) if turned else (60, 20, 4, 1))
    assert empty((7, 3, 8), torch.zeros(7, 3, 8)).stride() == (24, 8, 1)
