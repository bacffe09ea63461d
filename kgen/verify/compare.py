"""Comparison of outputs with float64, relative to the error of an eager computation.

An output passes under three conditions. Its relative Frobenius error is at most `RATIO` times the
eager error, plus a floor that covers one rounding. No row is far worse than the worst eager row.
Rows without keys are exactly zero (or -inf). NaN never passes. `docs/verification.md` has the
formulas.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kgen.verify.finer import misrounded, wrong_factor
from kgen.verify.memory import watched

RATIO = 1.35
ROW_RATIO = 3.0

CANARY = 0xA5
# bytes on each side of an output; a multiple of every alignment that kernels specialise on
_MARGIN = 256


@dataclass(frozen=True)
class Tolerance:
    """Allowed errors. `floor` is relative to the result, `noise` to the result before cancellation.

    `row_noise` is `noise` for a single row. Fused backward passes use the rounded output. Rows of a
    gradient therefore cancel only to one rounding of the dtype.
    """

    floor: float
    noise: float
    row_noise: float = 0.0
    unit: float = 0.0
    """Half a unit in the last place of an output, as it is stored."""
    smallest: float = 0.0
    """Smallest positive number of the dtype. Smaller values vanish."""


_TOLERANCES = {
    "bf16": Tolerance(2e-3, 2e-5, 2**-7, 2**-9),
    "fp16": Tolerance(3e-4, 2e-5, 2**-10, 2**-12, 2**-24),
    "fp32": Tolerance(2e-6, 5e-6, 2e-5, 2**-25),
    "fp8_e4m3": Tolerance(2e-3, 2e-5, 2**-3, 2**-5),
}


def tolerance(
    dtype: str,
    precision: str | None = None,
    fast_math: bool = False,
    reach: float = 0.0,
) -> Tolerance:
    """Return the tolerance of a spec's arithmetic.

    `reach` is the largest absolute log-sum-exp. Backward recomputes probabilities from it in fp32,
    so its rounding error grows with it.
    """
    allowed = _TOLERANCES[dtype]
    if precision == "tf32":
        # Results are rounded as in fp32, but the terms that cancel in them have operands as coarse
        # as fp16.
        allowed = replace(allowed, noise=2e-5, row_noise=2**-10)
    floor = max(allowed.floor, 2e-3) if fast_math else allowed.floor
    return replace(allowed, floor=floor + 2e-7 * reach)


def of_log_sums(allowed: Tolerance, fast_math: bool, reach: float) -> Tolerance:
    """Return the tolerance of log-sum-exps, which are float32 in all dtypes.

    Ten times the worst measured error without `fast_math` (2.4e-6 of a whole output; H200, H100).
    """
    wide = Tolerance(2e-5 + 2e-7 * reach, 2e-5, 1e-4)
    return wide if wide.floor < allowed.floor and not fast_math else allowed


@dataclass(frozen=True)
class Check:
    """The verdict on one output.

    `error` and `eager` are relative Frobenius errors against float64.
    """

    name: str
    ok: bool
    error: float
    eager: float
    ratio: float
    message: str = ""


@dataclass(frozen=True)
class Traits:
    """The traits of an output that decide its tolerance. The defaults require nothing."""

    natural: Tensor | None = None
    """Norms of the rows if no terms cancelled."""
    rounding: float = 0.0
    """Change of the result for a relative change of 1 in the stored outputs."""
    empty: Tensor | None = None
    """Rows without a contribution, for `lse` entries. They must be exactly zero, or -inf if the
    truth is.
    """
    dtype: Any = None
    """Required dtype of the output."""
    apart: bool = False
    """True if each element is rounded separately. Such errors average out, so an error along the
    truth is a factor.
    """
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Terms whose sum is the truth. None of them may have a wrong factor."""
    terms: Tensor | None = None
    """Norms of the rows before cancellation, if elements are computed in float32 and rounded once
    to `dtype`.
    """


PLAIN = Traits()


def check(
    name: str, got: Tensor, want: Tensor, eager: Tensor, allowed: Tolerance, traits: Traits = PLAIN
) -> Check:
    """Compare an output with the float64 truth `want` of the same shape."""
    if wrong := _misfit(got, want, traits.dtype):
        return failure(name, f"{name}: {wrong}")
    if want.numel() == 0:
        return Check(name, True, 0.0, 0.0, 0.0)
    got64, eager64 = got.detach().double(), eager.detach().double()
    infinite = want == -torch.inf
    if wrong := _wrong_infinity(got64, want, infinite):
        return failure(name, f"{name}: {wrong}")
    if not infinite.any() and (wrong := _not_empty(got64, traits.empty)):
        return replace(failure(name, f"{name}: {wrong}"), error=1.0)
    want, got64, eager64 = (x.masked_fill(infinite, 0.0) for x in (want, got64, eager64))
    return _by_numbers(name, got64, want, eager64, allowed, traits)


def _misfit(got: Tensor, want: Tensor, dtype: Any) -> str | None:
    """A shape or a dtype that is not the expected one, as a message."""
    if tuple(got.shape) != tuple(want.shape):
        return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if dtype is not None and got.dtype != dtype:
        return f"dtype {got.dtype}, expected {dtype}"
    return None


def _wrong_infinity(got: Tensor, want: Tensor, infinite: Tensor) -> str | None:
    """Elements that are not finite, but for -inf where the truth is `infinite`, as a message."""
    if not (torch.isfinite(want) | infinite).all():
        return f"the reference is not finite in {_count(~torch.isfinite(want) & ~infinite)}"
    if (infinite != (got == -torch.inf)).any():
        return f"-inf in {_count(got == -torch.inf)}, expected in {_count(infinite)}"
    bad = ~torch.isfinite(got) & ~infinite
    return f"not finite in {_count(bad)}" if bad.any() else None


def _not_empty(got: Tensor, empty: Tensor | None) -> str | None:
    """Rows that nothing contributes to and that are not zero, as a message."""
    if empty is None or not empty.any():
        return None
    rows = got[empty]
    if rows.abs().max() > 0:
        return f"{_count((rows != 0).flatten(1).any(1))} rows without a key are not zero"
    return None


def _by_numbers(
    name: str, got: Tensor, want: Tensor, eager: Tensor, allowed: Tolerance, traits: Traits
) -> Check:
    """Check finite float64 numbers: the whole output, each row, and the error along the truth."""
    norm, whole = (
        float(want.norm()),
        0.0 if traits.natural is None else float(traits.natural.norm()),
    )
    size = norm
    if size <= 1e-6 * whole or size == 0:
        size = whole or 1.0  # All terms cancelled, so the error is relative to the terms.
    distance, yardstick = float((got - want).norm()), float((eager - want).norm())
    if not math.isfinite(yardstick):
        # The eager computation overflowed where the kernel must not.
        yardstick, eager = 0.0, want
    slack = (
        allowed.floor * norm
        + allowed.noise * whole
        + allowed.unit * traits.rounding
        + allowed.smallest
    )
    error, eager_error = distance / size, yardstick / size
    ratio = distance / max(yardstick, slack, 1e-300)
    if distance > RATIO * yardstick + slack:
        message = f"{name}: error {error:.2e}, eager {eager_error:.2e}, ratio {ratio:.2f}"
        return Check(name, False, error, eager_error, ratio, message)
    wrong = _worst_row(got, want, eager, slack, allowed.row_noise, traits.natural)
    if wrong is None and traits.apart:
        wrong = wrong_factor("all of it", got, want, eager, want, slack)
    for part, term in traits.parts.items():
        share = allowed.floor * float(term.norm()) + allowed.noise * max(size, whole)
        wrong = wrong or wrong_factor(part, got, want, eager, term, share, by_row=True)
    if wrong is None and traits.terms is not None:
        wrong = misrounded(got, want, traits.terms, traits.dtype)
    message = "" if wrong is None else f"{name}: {wrong}"
    return Check(name, wrong is None, error, eager_error, ratio, message)


def _count(flags: Tensor) -> str:
    return f"{int(flags.sum())} of {flags.numel()}"


def _worst_row(
    got: Tensor, want: Tensor, eager: Tensor, slack: float, noise: float, natural: Tensor | None
) -> str | None:
    """Return a message if a row is much worse than the worst eager row."""
    if want.ndim < 2:
        return None
    width = want.shape[-1]
    got, want, eager = (t.reshape(-1, width) for t in (got, want, eager))
    norms = want.norm(dim=1)
    # The errors of a small row come from the other rows. The bound includes a share of their size.
    size = norms + 0.05 * norms.square().mean().sqrt() + 1e-300
    errors, yardstick = (got - want).norm(dim=1) / size, (eager - want).norm(dim=1) / size
    bound = ROW_RATIO * yardstick.max() + 4 * slack / math.sqrt(len(want)) / size
    if natural is not None:
        # Rounding has the size of a row's terms. If their sum is small by chance, other rows show
        # that size.
        terms = natural.reshape(-1)
        bound = bound + noise * terms.clamp_min(float(terms.square().mean().sqrt())) / size
    worst = int((errors / bound.clamp_min(1e-300)).argmax())
    if float(errors[worst]) <= float(bound[worst]):
        return None
    limit = float(yardstick.max())
    return (
        f"row {worst} of {len(want)} has error {float(errors[worst]):.2e}, eager at most "
        f"{limit:.2e}"
    )


# --- poison and canaries ---


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[list[Tensor]]:
    """Fill results of `torch.empty` and similar functions with poison, between canaries.

    Only Python functions are replaced, which emitted launchers use. Determinism settings and the
    allocator stay the same. Yields the storages, for `broken_canaries`.
    """
    storages: list[Tensor] = []
    places = [(torch, n) for n in ("empty", "empty_like", "empty_strided")]
    places += [(torch.Tensor, n) for n in ("new_empty", "new_empty_strided")]
    originals = [(place, name, getattr(place, name)) for place, name in places]

    def poisoning(original: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> Any:
            plain = original(*args, **kwargs)
            # Fake, meta and symbolic tensors have no memory to poison.
            if (
                type(plain) is not torch.Tensor
                or plain.device.type == "meta"
                or plain.layout != torch.strided
            ):
                return plain
            return _guarded(plain, originals[0][2], storages)

        return allocate

    try:
        for place, name, original in originals:
            setattr(place, name, poisoning(original))
        yield storages
    finally:
        for place, name, original in originals:
            setattr(place, name, original)


def _guarded(plain: Tensor, empty: Any, storages: list[Tensor]) -> Tensor:
    """Return a tensor like `plain` in the middle of a larger storage."""
    span = (
        sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True)) + 1
        if plain.numel()
        else 0
    )
    item = plain.element_size()
    margin = _MARGIN // item
    with torch.no_grad():
        whole = empty(
            2 * _MARGIN + -(-span * item // 16) * 16, dtype=torch.uint8, device=plain.device
        )
        whole.fill_(CANARY)
        typed = whole.view(plain.dtype)
        inside = typed[margin : margin + span]
        inside.fill_(
            torch.nan
            if plain.is_floating_point()
            else plain.dtype == torch.bool or min(2**30, _top(plain))
        )
        # Not a view of the storage's first tensor, so that autograd sees an ordinary new tensor.
        fresh = empty(0, dtype=plain.dtype, device=plain.device)
        fresh.set_(typed.untyped_storage(), margin, plain.shape, plain.stride())
    whole.kgen_span = span * item
    storages.append(whole)
    return fresh.requires_grad_(plain.requires_grad)


def _top(tensor: Tensor) -> int:
    return int(torch.iinfo(tensor.dtype).max) if not tensor.is_complex() else 0


def broken_canaries(storages: list[Tensor]) -> int:
    """Return the number of storages with writes outside their tensor."""
    return sum(
        bool((s[:_MARGIN] != CANARY).any() or (s[_MARGIN + s.kgen_span :] != CANARY).any())
        for s in storages
    )


def snapshot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the whole storages of tensors, including gaps between rows."""
    return {name: _bytes(tensor).clone() for name, tensor in tensors.items()}


def changed(tensors: dict[str, Tensor], before: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors whose storage changed in any bit."""
    return [
        name for name, tensor in tensors.items() if not torch.equal(_bytes(tensor), before[name])
    ]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal bit for bit, including NaN."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool((a.reshape(-1).view(torch.uint8) == b.reshape(-1).view(torch.uint8)).all())


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


AGAIN, AGAIN_SECONDS = 8, 0.05
"""Number and seconds of further runs that must have the same bits. Few runs miss a race in one of
300 calls.
"""


def careful(
    run: Callable[[], Mapping[str, Tensor]],
    inputs: dict[str, Tensor],
    device: str,
    fixed: Callable[[str], bool] = lambda name: True,
) -> tuple[Mapping[str, Tensor], list[Check]]:
    """Return the results of `run` with poisoned outputs, and failures other than wrong values.

    Failures are writes outside of tensors and writes to `inputs`. In Triton's interpreter, reads
    outside of the tensors of a launch fail, too. On a GPU, `run` repeats `AGAIN` times and for
    `AGAIN_SECONDS`, and outputs that are `fixed` must have the same bits.
    """
    before = snapshot(inputs)
    with poisoned_outputs() as storages, watched() as outside:
        got = run()
        if device == "cuda":
            torch.cuda.synchronize()
    found = []
    if broken := broken_canaries(storages):
        found.append(failure("canaries", f"wrote outside of {broken} of its tensors"))
    if outside:
        found.append(failure("memory", f"{outside[0]} outside of the tensors of a launch"))
    if written := changed(inputs, before):
        found.append(failure("inputs", f"wrote to {', '.join(written)} or next to it"))
    if device == "cuda":
        moved: dict[str, None] = {}
        runs, began = 0, time.perf_counter()
        while runs < AGAIN or time.perf_counter() - began < AGAIN_SECONDS:
            again = run()
            runs += 1
            moved |= {
                name: None for name in got if fixed(name) and not same_bits(got[name], again[name])
            }
        if moved:
            found.append(failure("determinism", f"{', '.join(moved)} differ from run to run"))
    return got, found


def wrong_offsets(right: Tensor) -> Mapping[str, Tensor]:
    """Return wrong offsets of packed sequences, by a description of the error."""
    far = torch.full_like(right, 2**31 - 1)
    return {
        "past the tokens": right + 40,
        "beyond the last alone": torch.cat([right[:-1], right[-1:] + 7]),
        "descending": right.flip(0).contiguous(),
        "negative": right - 200,
        "far": torch.where(right % 2 == 0, far, -far),
    }


def failure(name: str, message: str) -> Check:
    """Return a failed verdict without numbers."""
    return Check(name, False, math.inf, math.nan, math.inf, message)
