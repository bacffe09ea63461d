"""Sums over parts of rows, against sums of whole tensors in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.interpreters.own_process import interpreted

ROWS = 40


def shaped(axis: int, rows: int, columns: int = 24) -> tuple[int, ...]:
    return (rows, 3, columns) if axis == 0 else (2, 3, rows, columns)


@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_parts_add_up(axis: int, merged: bool, whole: bool, small: bool) -> None:
    interpreted(adds_up, axis, merged, whole, small)


def adds_up(axis: int, merged: bool, whole: bool, small: bool) -> None:
    from kgen.kernels.attention.parallel import merging
    from kgen.kernels.attention.parallel.partial_sums import Sum, run_of
    from kgen.verify import interpreter

    interpreter.mend()
    merging.SMALL = 2**21 if small else 0  # if 0, only the Triton kernels run
    for seed in range(4):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        like = torch.empty(shaped(axis, ROWS), dtype=torch.float32 if seed % 2 else torch.bfloat16)
        total = Sum(like.shape, like, axis)
        heads = like.shape[:3] if axis == 2 else (3, ROWS)
        weighted = torch.zeros(like.shape, dtype=torch.float64)
        weights = torch.zeros(heads, dtype=torch.float64)
        ends = [tuple(sorted(rng.sample(range(ROWS + 1), 2))) for _ in range(6)]
        ends[seed:seed] = [(0, ROWS)] * whole
        for lo, hi in ends:
            part = torch.randn(shaped(axis, hi - lo)).to(like.dtype)
            lse = torch.randn((*heads[:-1], hi - lo))
            lse[..., 0] = -math.inf  # rows without keys, whose output is zero
            run_of(part, axis, (0, 1)).zero_()
            total.add((lo, hi), part, lse if merged else None)
            weight = (
                torch.exp2(lse.double()) if merged else torch.ones(lse.shape, dtype=torch.float64)
            )
            if axis == 0:
                weight = weight.T
            run_of(weighted, axis, (lo, hi)).add_(weight[..., None] * part.double())
            run_of(weights, -1, (lo, hi)).add_(weight if axis == 2 else weight.T)
        assert (total.whole is not None) is whole
        if merged:
            out, lse = total.attended()
            assert torch.allclose(lse.double(), torch.log2(weights), atol=1e-5)
            by = torch.where(weights == 0, 1.0, weights)
            wanted = weighted / (by if axis == 2 else by.T)[..., None]
        else:
            wanted = weighted
            assert torch.allclose(total.wide().double(), wanted, rtol=0, atol=2e-6)
            out = total.result()
        assert out.dtype == like.dtype
        assert torch.allclose(
            out.double(),
            wanted,
            rtol=0,
            atol=2e-6 if seed % 2 else 2**-8 * wanted.abs().max().item(),
        )


def test_a_part_that_is_alone_stays_where_it_is() -> None:
    interpreted(alone)


def alone() -> None:
    from kgen.kernels.attention.parallel.partial_sums import Sum

    like = torch.empty(1, 2, ROWS, 16)
    part = torch.randn(like.shape)
    before = part.clone()
    total = Sum(like.shape, like, 2)
    total.add((0, ROWS), part)
    total.add((10, 12), torch.ones(1, 2, 2, 16))
    assert total.result() is part
    before[:, :, 10:12] += 1
    assert torch.equal(part, before)


def test_a_part_that_was_given_room_is_written_there_alone() -> None:
    interpreted(given_room)


def given_room() -> None:
    from kgen.kernels.attention.parallel.partial_sums import Sum

    like = torch.empty(1, 2, ROWS, 16)
    total = Sum(like.shape, like, 2)
    room = total.room((5, 25))
    others = [torch.randn(1, 2, 10, 16) for _ in range(5)]
    for x in others[:4]:
        total.add((20, 30), x)
    placed = torch.randn(room.shape)
    room.copy_(placed)
    total.add((5, 25), room, placed=True)
    total.add((20, 30), others[4])
    wanted = torch.zeros(like.shape)
    wanted[:, :, 20:30] = sum(others)
    wanted[:, :, 5:25] += placed
    found = total.result()
    assert found.data_ptr() == room.data_ptr() - 5 * room.stride(2) * room.element_size()
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.equal(found[:, :, 5:20], placed[:, :, :15])


def test_rows_are_written_where_they_are_wanted() -> None:
    interpreted(written)


def written() -> None:
    from kgen.kernels.attention.parallel.partial_sums import Sum

    like = torch.empty(1, 2, ROWS, 16)
    total = Sum(like.shape, like, 2)
    first, second = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 15, 16)
    total.add((5, 25), first)
    total.add((10, 25), second)
    out = torch.full((17, 1, 2, 16), math.nan)
    total.write((3, 20), out.movedim(0, 2))
    wanted = torch.cat([torch.zeros(1, 2, 2, 16), first[:, :, :15]], 2)
    wanted[:, :, 7:] += second[:, :, :10]
    assert torch.equal(out.movedim(0, 2), wanted)


def test_columns_that_lie_apart_are_copied() -> None:
    interpreted(apart)


def apart() -> None:
    from kgen.kernels.attention.parallel.partial_sums import copied

    x = torch.randn(1, 2, 16, 8).transpose(2, 3)
    out = torch.empty(8, 1, 2, 16)
    copied(out.movedim(0, 2), x)
    assert torch.equal(out.movedim(0, 2), x)


def test_a_part_of_all_rows_in_another_memory_order_is_copied() -> None:
    """The result has the memory order of `like`, whatever order a kernel stored."""
    interpreted(copies_what_lies_otherwise)


def copies_what_lies_otherwise() -> None:
    from kgen.kernels.attention.parallel.partial_sums import Sum
    from kgen.verify import interpreter

    interpreter.mend()
    like, part = torch.zeros(shaped(2, ROWS)), torch.randn(2, ROWS, 3, 24).transpose(1, 2)
    total = Sum(like.shape, like, 2)
    total.add((0, ROWS), part)
    assert total.result().stride() == like.stride()
    assert torch.equal(total.result(), part)
