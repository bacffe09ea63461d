"""Wrong factors and wrong roundings, and errors of rounding that are neither."""

from __future__ import annotations

import pytest
import torch

from kgen.verify.compare import Traits, check, tolerance
from kgen.verify.finer import misrounded, wrong_factor

SMALL, LARGE = 0.1, 1.0


def terms() -> tuple[torch.Tensor, torch.Tensor]:
    """A small term of a large sum."""
    make = torch.Generator().manual_seed(0)
    small, large = (
        size * torch.randn(300, 64, generator=make, dtype=torch.float64) for size in (SMALL, LARGE)
    )
    return small, large


def test_a_factor_of_a_small_term_is_found() -> None:
    small, large = terms()
    want = small + large
    parts = {"the small term": small, "the large term": large}
    allowed = tolerance("bf16")
    rounded = want.bfloat16()
    assert check("o", rounded, want, rounded, allowed, Traits(parts=parts)).ok
    for more in (0.01 * small, -0.01 * small, 0.01 * large):
        assert not check(
            "o", (want + more).bfloat16(), want, rounded, allowed, Traits(parts=parts)
        ).ok
    scaled = (want + 0.01 * small).bfloat16()
    assert check("o", scaled, want, rounded, allowed).ok
    message = check("o", scaled, want, rounded, allowed, Traits(parts=parts)).message
    assert "the small term is off by a factor of 1.0" in message


def test_errors_that_rows_share_are_no_factor() -> None:
    """Each row has a factor of its own, as the eager computation has."""
    want = terms()[1]
    make = torch.Generator().manual_seed(1)
    got, eager = (
        want * (1 + 0.05 * torch.randn(300, 1, generator=make, dtype=torch.float64))
        for _ in range(2)
    )
    assert wrong_factor("all of it", got, want, eager, want, 0.0, by_row=True) is None
    assert wrong_factor("all of it", got * 1.05, want, eager, want, 0.0, by_row=True) is not None


def test_a_term_of_zeros_has_no_factor() -> None:
    want = terms()[1]
    assert wrong_factor("nothing", want * 2, want, want, 0 * want, 0.0, by_row=True) is None


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_elements_of_8_bits_are_rounded_to_the_nearest(factor: float) -> None:
    want = 100 * terms()[1][:2]
    norms = want.norm(dim=-1)
    kind = torch.float8_e4m3fn
    for right in (want, want * (1 + 1e-5), want + 1e-6 * norms[:, None]):
        assert misrounded(right.to(kind).double(), want, norms, kind) is None
    wrong = misrounded((want * factor).to(kind).double(), want, norms, kind)
    assert wrong is not None
    assert "not rounded to the nearest" in wrong


def test_small_elements_of_8_bits_have_steps_of_one_size() -> None:
    want = torch.tensor([[2.0**-10, 2.0**-8 * 1.2, 0.0]], dtype=torch.float64)
    got = want.to(torch.float8_e4m3fn).double()
    assert misrounded(got, want, want.norm(dim=-1), torch.float8_e4m3fn) is None
    assert misrounded(got + 2.0**-9, want, want.norm(dim=-1), torch.float8_e4m3fn) is not None
