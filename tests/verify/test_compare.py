from __future__ import annotations

import pytest
import torch

from kgen.verify import compare
from kgen.verify.compare import (
    AGAIN,
    AGAIN_SECONDS,
    Tolerance,
    Traits,
    broken_canaries,
    careful,
    check,
    of_log_sums,
    poisoned_outputs,
    same_bits,
    tolerance,
)

torch.manual_seed(0)
WANT = torch.randn(2, 3, 64, 32, dtype=torch.float64)
EAGER = WANT.bfloat16().double() * (1 + 2e-3 * torch.randn_like(WANT))
GOOD = WANT.bfloat16()
ALLOWED = tolerance("bf16")


def test_right():
    verdict = check("out", GOOD, WANT, EAGER, ALLOWED, Traits(dtype=torch.bfloat16))
    assert verdict.ok
    assert 0 < verdict.error < 2e-3
    assert verdict.ratio < 1


def broken(change):
    value = GOOD.clone()
    change(value)
    return value


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (GOOD * 1.01, "error"),
        (broken(lambda t: t[0, 0, 0].fill_(torch.nan)), "not finite"),
        (broken(lambda t: t[1, 2, 3, 4:5].fill_(torch.inf)), "not finite"),
        (broken(lambda t: t[1, 1, 63].mul_(1.03)), "row 319 of 384"),
        (broken(lambda t: t[0, 1, 5].zero_()), "error"),
        (GOOD[:, :, :-1], "shape"),
        (GOOD.float(), "dtype"),
        (torch.full_like(GOOD, torch.nan), "not finite"),
    ],
)
def test_wrong(got, message):
    verdict = check("out", got, WANT, EAGER, ALLOWED, Traits(dtype=torch.bfloat16))
    assert not verdict.ok
    assert message in verdict.message


def test_a_factor_shows_through_coarse_rounding():
    """A factor of 1 % is below the noise of elements with 3 bits, but the second bound finds it."""
    coarse = {name: WANT * (1 + 3e-2 * torch.randn_like(WANT)) for name in ("eager", "got")}
    allowed = tolerance("fp8_e4m3")
    assert check("out", coarse["got"], WANT, coarse["eager"], allowed, Traits(apart=True)).ok
    scaled = check("out", coarse["got"] * 1.01, WANT, coarse["eager"], allowed, Traits(apart=True))
    assert "a factor of 1.0" in scaled.message
    assert not scaled.ok
    assert check("out", coarse["got"] * 1.01, WANT, coarse["eager"], allowed).ok


def test_log_sums_are_float32_in_16_bits():
    want = 5 + torch.rand(300, 1, dtype=torch.float64)
    natural = torch.ones(300)
    limit = of_log_sums(ALLOWED, False, 6.0)
    assert check("lse", want.float(), want, want, limit, Traits(natural=natural)).ok
    assert check("lse", want.float() * (1 + 5e-6), want, want, limit, Traits(natural=natural)).ok
    assert not check(
        "lse", want.float() * (1 + 2e-4), want, want, limit, Traits(natural=natural)
    ).ok
    alone = want.float()
    alone[17] *= 1 + 3e-4
    assert "row 17" in check("lse", alone, want, want, limit, Traits(natural=natural)).message
    assert of_log_sums(tolerance("fp32"), False, 0.0) == tolerance("fp32")
    fast = tolerance("bf16", fast_math=True)
    assert of_log_sums(fast, True, 0.0) == fast


def test_what_is_computed_from_less_than_fp16_has_is_nothing():
    for size, ok in ((2.0**-25, True), (2.0**-22, False)):
        want = torch.tensor([size, 0.0], dtype=torch.float64)
        assert check("dsinks", torch.zeros(2), want, want, tolerance("fp16")).ok == ok
    want = torch.tensor([2.0**-25, 0.0], dtype=torch.float64)
    assert not check("dsinks", torch.zeros(2), want, want, tolerance("bf16")).ok


def test_empty_rows_are_exactly_zero():
    empty = torch.zeros(2, 3, 64, dtype=torch.bool)
    empty[0, 0, 7] = True
    want = WANT.masked_fill(empty[..., None], 0.0)
    got = GOOD.masked_fill(empty[..., None], 0.0)
    eager = EAGER.masked_fill(empty[..., None], 0.0)
    assert check("out", got, want, eager, ALLOWED, Traits(empty=empty)).ok
    got[0, 0, 7, 0] = 1e-6
    assert "without a key" in check("out", got, want, eager, ALLOWED, Traits(empty=empty)).message


def test_minus_infinity_where_expected_and_nowhere_else():
    want = torch.tensor([1.0, -torch.inf, 2.0], dtype=torch.float64)
    assert check("lse", want.float(), want, want, ALLOWED).ok
    assert not check("lse", torch.tensor([1.0, -1e30, 2.0]), want, want, ALLOWED).ok
    assert not check("lse", torch.tensor([-torch.inf, -torch.inf, 2.0]), want, want, ALLOWED).ok


def test_an_eager_overflow_is_no_licence():
    eager = EAGER.clone()
    eager[0, 0, 0, 0] = torch.inf
    assert check("out", GOOD, WANT, eager, ALLOWED).ok
    assert not check("out", GOOD * 1.05, WANT, eager, ALLOWED).ok


def test_a_reference_that_is_not_finite_judges_nothing():
    truth = WANT.clone()
    truth[0, 0, 0, 0] = torch.nan
    assert (
        "the reference is not finite in 1 of" in check("out", GOOD, truth, EAGER, ALLOWED).message
    )


def test_what_cancels_is_judged_by_what_cancelled():
    want = torch.zeros(4, 8, dtype=torch.float64)
    noise = torch.full((4, 8), 1e-7)
    assert check(
        "dq", noise, want, want, Tolerance(1e-6, 1e-5), Traits(natural=torch.full((4,), 0.5))
    ).ok
    assert not check(
        "dq", noise * 1e4, want, want, Tolerance(1e-6, 1e-5), Traits(natural=torch.full((4,), 0.5))
    ).ok


def test_outputs_are_poisoned_and_guarded():
    with poisoned_outputs() as storages:
        a = torch.empty(3, 5)
        b = torch.empty_like(torch.zeros(4, 6, dtype=torch.bfloat16).t())
        c = a.new_empty((7,), dtype=torch.int32)
        d = torch.empty_strided((2, 3), (8, 2))
        e = torch.empty(0)
        f = torch.empty(2, device="meta")
    assert torch.isnan(a).all()
    assert torch.isnan(b).all()
    assert (c == 2**30).all()
    assert torch.isnan(d).all()
    assert b.stride() == (1, 6)
    assert d.stride() == (8, 2)
    assert e.shape == (0,)
    assert f.device.type == "meta"
    assert not a._is_view()
    assert broken_canaries(storages) == 0
    torch.as_strided(a, (1,), (1,), a.storage_offset() + 15)[0] = 1.0
    torch.as_strided(c, (1,), (1,), c.storage_offset() - 1)[0] = 1
    assert broken_canaries(storages) == 2
    assert torch.empty.__name__ == "empty"


def test_same_bits():
    a = torch.tensor([1.0, torch.nan, -0.0])
    assert same_bits(a, a.clone())
    assert not same_bits(a, torch.tensor([1.0, torch.nan, 0.0]))
    assert not same_bits(a, a.double())
    assert same_bits(torch.zeros(2, 2)[:, :1], torch.zeros(2, 1))


def test_every_run_has_the_bits_of_the_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    clock = iter(range(1000))
    monkeypatch.setattr(compare.time, "perf_counter", lambda: next(clock) * seconds)

    def checked(wrong):
        runs = iter(range(100))

        def run():
            number = next(runs)
            return {"out": torch.ones(4), "dq": torch.full((4,), float(number == wrong))}

        return [verdict.message for verdict in careful(run, {}, "cuda")[1]]

    seconds = 1.0  # one run
    assert checked(wrong=50) == []
    assert checked(wrong=AGAIN) == ["dq differ from run to run"]
    seconds = AGAIN_SECONDS / 40
    assert checked(wrong=50) == []
    assert checked(wrong=30) == ["dq differ from run to run"]
    assert careful(lambda: {"out": torch.rand(4)}, {}, "cuda", fixed=lambda name: False)[1] == []
