"""The sequences of each rank: which ones cross the boundaries of ranks, and where they end."""

from __future__ import annotations

from itertools import accumulate, pairwise
from random import Random

import pytest

from kgen.kernels.linear_attention.parallel.shares import Share, of_packed, of_rows


def test_rows_cross_all_boundaries() -> None:
    first, middle, last = of_rows(3, 2)
    assert first == Share(0, 2, 0, False, True, 2)
    assert middle == Share(0, 2, 0, True, True, 2)
    assert last == Share(0, 2, 2, True, False, 2)
    assert [share.carries for share in (first, middle, last)] == [False, True, False]
    assert of_rows(1, 2) == [Share(0, 2, 2, False, False, 2)]


def test_packed_sequences_over_three_ranks() -> None:
    """The third sequence enters the second rank, and the fourth one leaves it."""
    first, second, third = of_packed([20, 17, 18], [0, 5, 5, 25, 55])
    assert first == Share(0, 3, 2, False, True, 1, (0, 5, 5, 20))
    assert second == Share(2, 4, 3, True, True, 1, (0, 5, 17))
    assert third == Share(3, 4, 4, True, False, 1, (0, 18))
    assert (second.carries, second.entering, second.leaving) == (False, slice(0, 1), slice(1, 2))


def test_a_state_passes_through_a_rank_without_tokens() -> None:
    shares = of_packed([3, 0, 2], [0, 5])
    assert [share.carries for share in shares] == [False, True, False]
    assert shares[1].starts == (0, 0)


def test_a_rank_may_have_no_sequence() -> None:
    """Its kernels get one empty sequence, and no result of it is used."""
    share = of_packed([4, 3], [0, 4])[1]
    assert share == Share(1, 1, 1, False, False, 1, (0, 0))
    assert share.sequences == 1


@pytest.mark.parametrize("starts", [[1, 5], [0, 4, 3], [0, 11]])
def test_wrong_offsets_raise(starts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens must begin with 0, .* of all ranks, 10, got"):
        of_packed([5, 5], starts)


@pytest.mark.parametrize("seed", range(60))
def test_random_batches(seed: int) -> None:
    """Each token has its sequence, each sequence ends once, and each crossing has two sides."""
    random = Random(seed)
    lengths = [random.choice((0, 0, 1, 2, 5)) for _ in range(random.randint(1, 5))]
    total = sum(lengths)
    inner = sorted(random.choices(range(total + 1), k=random.randint(0, 6)))
    starts = [0, *inner, random.choice((total, *inner[-1:]))]
    shares = of_packed(lengths, starts)
    ended = [n for share in shares for n in range(share.first, share.ended)]
    assert ended == [*range(len(starts) - 1)]
    edges = [*accumulate(lengths, initial=0)]
    for share, (lo, hi) in zip(shares, pairwise(edges), strict=True):
        want = [
            n for n, (a, b) in enumerate(pairwise(starts)) for _ in range(max(a, lo), min(b, hi))
        ]
        own = pairwise(share.starts)
        assert [share.first + n for n, (a, b) in enumerate(own) for _ in range(a, b)] == want
        crossing = [
            [n for n, (a, b) in enumerate(pairwise(starts)) if a < at < b] for at in (lo, hi)
        ]
        assert [[share.first] * share.enters, [share.last - 1] * share.leaves] == crossing
        assert share.carries == (bool(crossing[0]) and crossing[0] == crossing[1])
    assert [share.leaves for share in shares[:-1]] == [share.enters for share in shares[1:]]
    assert not shares[0].enters
    assert not shares[-1].leaves
