"""The short causal convolution of the adapter, against float64."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fla_models import SPECS, packaged
from support.interpreters.own_process import interpreted
from torch import Tensor
from torch.nn.functional import conv1d, silu

CHANNELS, WIDTH = 70, 4
"""More channels than a block has."""


def reference(x: Tensor, weight: Tensor, bias: Any, state: Any, active: bool) -> Tensor:
    """Return the outputs [B, D, T] of whole sequences."""
    if not x.shape[2]:
        return x
    before = x.new_zeros(*x.shape[:2], weight.shape[1] - 1) if state is None else state
    z = conv1d(torch.cat([before, x], -1), weight[:, None], bias, groups=weight.shape[0])
    return silu(z) if active else z


def drawn(batch: int, tokens: int, states: int) -> list[Tensor]:
    """Return x in the memory order of models, weight, bias and states, in float64."""
    torch.manual_seed(4)
    x = torch.randn(batch, tokens, CHANNELS, dtype=torch.float64).transpose(1, 2)
    weight, bias = torch.randn(CHANNELS, WIDTH).double(), torch.randn(CHANNELS).double()
    state = torch.randn(states, CHANNELS, WIDTH - 1).double()
    return [y.float().double().requires_grad_() for y in (x, weight, bias, state)]


def compared(got: Tensor, want: Tensor, given: list[Tensor], wanted: list[Tensor]) -> None:
    """Compare outputs, and the gradients of all inputs."""
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(want.shape, dtype=torch.float64)
    unused = {"allow_unused": True, "materialize_grads": True}
    ours = torch.autograd.grad(got, given, cotangent.float(), **unused)
    theirs = torch.autograd.grad(want, wanted, cotangent, **unused)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def checked_rows(folder: Path) -> None:
    package = packaged(folder, SPECS["mamba2"])
    for tokens in (0, 1, 2, 37):
        exact = drawn(2, tokens, 2)
        x, weight, bias, state = (y.detach().float().requires_grad_() for y in exact)
        want = reference(*exact, active=True)
        got, final = package.causal_conv1d_fn(
            *(x, weight, bias),
            initial_states=state,
            return_final_states=True,
            activation="silu",
        )
        whole = torch.cat([exact[3], exact[0]], -1)[..., tokens:]
        both, wanted = torch.cat([got, final], -1), torch.cat([want, whole], -1)
        compared(both, wanted, [x, weight, bias, state], exact)
    want = reference(exact[0], exact[1], None, None, active=False)
    compared(package.causal_conv1d_fn(x, weight), want, [x, weight], exact[:2])
    with pytest.raises(ValueError, match="activation must be None, 'silu' or 'swish', got 'relu'"):
        package.causal_conv1d_fn(x, weight, activation="relu")


def checked_packed(folder: Path) -> None:
    package = packaged(folder, SPECS["mamba2"])
    ends = [0, 1, 1, 35, 37]
    exact = drawn(1, 37, 4)
    x, weight, bias, state = (y.detach().float().requires_grad_() for y in exact)
    got, final = package.causal_conv1d_fn(
        *(x, weight, bias),
        cu_seqlens=torch.tensor(ends),
        initial_states=state,
        return_final_states=True,
        activation="silu",
    )
    parts, finals = [], []
    for n, (a, b) in enumerate(pairwise(ends)):
        part, first = exact[0][..., a:b], exact[3][n : n + 1]
        parts.append(reference(part, exact[1], exact[2], first, active=True))
        finals.append(torch.cat([first, part], -1)[..., b - a :])
    both = torch.cat([got.flatten(), final.flatten()])
    want = torch.cat([torch.cat(parts, -1).flatten(), torch.cat(finals).flatten()])
    compared(both, want, [x, weight, bias, state], exact)
    # Tokens after the last sequence have no state.
    tail = package.causal_conv1d_fn(
        *(x, weight, bias), cu_seqlens=torch.tensor(ends[:-1]), initial_states=state[:3]
    )
    after = reference(exact[0][..., 35:], *exact[1:3], None, active=False)
    torch.testing.assert_close(tail[..., 35:].double(), after, rtol=1e-5, atol=1e-5)
    numbers = torch.tensor([[0, *[1] * 34, 0, 0]], dtype=torch.int32)
    got = package.causal_conv1d_fn(x, weight, bias, seq_idx=numbers)
    plain = [
        reference(exact[0][..., a:b], *exact[1:3], None, active=False)
        for a, b in ((0, 1), (1, 35), (35, 37))
    ]
    compared(got, torch.cat(plain, -1), [x, weight, bias], exact[:3])
    with pytest.raises(ValueError, match="seq_idx allows no states"):
        package.causal_conv1d_fn(x, weight, seq_idx=numbers, initial_states=state)


def checked_steps(folder: Path) -> None:
    package = packaged(folder, SPECS["mamba2"])
    with torch.no_grad():
        for size in (WIDTH - 1, WIDTH):
            for tokens in (1, 2, 5):
                exact = [y.detach() for y in drawn(2, tokens, 2)]
                x, weight, bias, state = (y.float() for y in exact)
                state = torch.cat([state[..., :1] * 2, state], -1)[..., -size:].contiguous()
                both = torch.cat([state.double(), exact[0]], -1)
                want = reference(*exact, active=True)
                got = package.causal_conv1d_update(x, state, weight, bias, "silu")
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(state.double(), both[..., -size:], rtol=0, atol=0)
        flat = package.causal_conv1d_update(x[..., 0], state, weight)
        assert flat.shape == (2, CHANNELS)
        with pytest.raises(ValueError, match="the state must have 3 tokens, got 2"):
            package.causal_conv1d_update(x, state[..., :2], weight)


@pytest.mark.parametrize("check", [checked_rows, checked_packed, checked_steps])
def test_convolutions(check: Any, tmp_path: Path) -> None:
    interpreted(check, tmp_path)
