"""The functions of flash-linear-attention and mamba-ssm with emitted kernels.

Each option is compared with float64, and models of transformers with eager.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fla_models import MODELS, SPECS, compared, packaged
from support.interpreters.own_process import interpreted
from torch import Tensor
from torch.nn.functional import silu, softplus

from kgen.diagnostics import KgenError
from kgen.kernels.linear_attention.adapt.fla import adapter
from kgen.spec.load import loads_variants

TOLERANCE = 2e-2
"""Bound for relative differences of norms, because operands are bfloat16."""
HALF = 1e-2
"""The same for models in float16."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_with_eager(name: str, tmp_path: Path) -> None:
    errors, other_tokens, calls = interpreted(compared, tmp_path, name)
    assert calls >= 3, "training, prefill, and one of the steps"
    assert "loss" in errors
    assert {n: e for n, e in errors.items() if not e[0] < max(HALF, 2 * e[1])} == {}
    assert other_tokens == 0


# --- options ------------------------


def recurrence(x: dict[str, Tensor], scale: float, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return o and the final state of the delta rule, in float64, token by token."""
    q, k, v, g, beta = (x[name].double() for name in ("q", "k", "v", "g", "beta"))
    group = v.shape[2] // q.shape[2]
    q, k = (y.repeat_interleave(group, 2) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    s = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    s = s if state is None else state.double()
    g = g if g.dim() == 4 else g[..., None]
    rows = []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp()[..., None]
        before = torch.einsum("bhkv,bhk->bhv", s, k[:, t])
        update = beta[:, t, :, None] * (v[:, t] - before)
        s = s + k[:, t][..., None] * update[:, :, None]
        rows.append(scale * torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(rows, 1), s


def drawn(name: str, batch: int = 2, tokens: int = 21) -> dict[str, Tensor]:
    torch.manual_seed(2)
    heads = 1 if name == "qwen3_next" else 2
    columns = (64,) if name == "kimi_linear" else ()
    x = {n: torch.randn(batch, tokens, h, 64) for n, h in (("q", heads), ("k", heads), ("v", 2))}
    x = {n: y.bfloat16() for n, y in x.items()}
    x["g"] = -torch.rand(batch, tokens, 2, *columns)
    return {**x, "beta": torch.rand(batch, tokens, 2)}


def near(got: Tensor, want: Tensor) -> None:
    difference = (got.double() - want).norm() / want.norm()
    assert difference < TOLERANCE, difference


def checked_delta(folder: Path, name: str, chunk: str, steps: str) -> None:
    package = packaged(folder, SPECS[name])
    normed = {"use_qk_l2norm_in_kernel": True}
    x, state = drawn(name), torch.randn(2, 2, 64, 64)
    whole = {**x, "initial_state": state, "output_final_state": True, **normed}
    for function in (chunk, steps):
        call: Callable[..., Any] = getattr(package, function)
        few = (
            {n: y[:, :5] if n in x else y for n, y in whole.items()} if function == steps else whole
        )
        now = {n: few[n] for n in x}
        o, final = call(**few)
        want, end = recurrence(now, 0.125, state)
        near(o, want)
        near(final, end)
        assert torch.equal(few["initial_state"], state)
        plain, none = call(**now, **normed, scale=0.5)
        near(plain, recurrence(now, 0.5, None)[0])
        assert none is None
        flipped = {**few, "initial_state": state.transpose(-1, -2), "state_v_first": True}
        o, final = call(**flipped)
        near(final, end.transpose(-1, -2))
        o, _ = call(**{n: y.transpose(1, 2) for n, y in now.items()}, **normed, head_first=True)
        near(o, recurrence(now, 0.125, None)[0].transpose(1, 2))
        logits = now["beta"].logit()
        o, _ = call(
            **{**now, "beta": logits},
            **normed,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True,
        )
        near(o, recurrence({**now, "beta": 2 * now["beta"]}, 0.125, None)[0])
        a_log, bias = torch.randn(2), torch.randn(now["g"].shape[2:])
        rate = a_log.exp() if name == "qwen3_next" else a_log.exp()[:, None]
        o, _ = call(**now, **normed, use_gate_in_kernel=True, A_log=a_log, dt_bias=bias.flatten())
        gate = -rate * softplus(now["g"] + bias)
        near(o, recurrence({**now, "g": gate}, 0.125, None)[0])
        _packed(call, normed, name, state)
        _refused(package, call, now, normed)


def _packed(call: Callable[..., Any], normed: dict[str, bool], name: str, state: Tensor) -> None:
    """Check two packed sequences, each with its own initial state."""
    x = drawn(name, batch=1, tokens=12)
    ends = torch.tensor([0, 5, 12])
    o, final = call(**x, **normed, cu_seqlens=ends, initial_state=state, output_final_state=True)
    for n, (a, b) in enumerate(((0, 5), (5, 12))):
        part = {name: y[:, a:b] for name, y in x.items()}
        want, end = recurrence(part, 0.125, state[n : n + 1])
        near(o[:, a:b], want)
        near(final[n : n + 1], end)


def _refused(package: Any, call: Callable[..., Any], x: dict[str, Tensor], normed: Any) -> None:
    name = f"{package.__name__}: {call.__name__}"
    other = "gv" if call.__name__ == "fused_recurrent_gated_delta_rule" else "lower_bound"
    other = "cp_context" if call.__name__ == "chunk_gated_delta_rule" else other
    for keywords, words in (
        ({other: 1.5, **normed}, f"{name} does not support {other}=1.5. Leave it out, or use the"),
        ({"other": 1, **normed}, f"{name} does not know other"),
        ({}, f"{name} needs use_qk_l2norm_in_kernel=True, because the spec has `qk_norm: l2`"),
        ({**normed, "use_gate_in_kernel": True}, "needs A_log if use_gate_in_kernel=True"),
    ):
        with pytest.raises(ValueError, match=words.replace(".", r"\.")):
            call(**x, **keywords)


@pytest.mark.parametrize(
    ("name", "chunk", "steps"),
    [
        ("qwen3_next", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        pytest.param(
            *("kimi_linear", "chunk_kda", "fused_recurrent_kda"), marks=pytest.mark.thorough
        ),
    ],
)
def test_options_of_delta_rules(name: str, chunk: str, steps: str, tmp_path: Path) -> None:
    interpreted(checked_delta, tmp_path, name, chunk, steps)


def checked_gradients(folder: Path) -> None:
    """Check the gradients of a function that has none in its library, and norms in PyTorch."""
    text = SPECS["qwen3_next"].replace("qk_norm: l2\n", "")
    package = packaged(folder, text)
    x = {n: y.requires_grad_() for n, y in drawn("qwen3_next", tokens=5).items()}
    o, _ = package.fused_recurrent_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True)
    want = recurrence(x, 0.125, None)[0]
    near(o.detach(), want.detach())
    cotangent = torch.randn(o.shape)
    got = torch.autograd.grad(o, [*x.values()], cotangent.bfloat16())
    wanted = torch.autograd.grad(want, [*x.values()], cotangent.double())
    for one, other in zip(got, wanted, strict=True):
        near(one, other.double())


def test_gradients_and_norms_outside_of_kernels(tmp_path: Path) -> None:
    interpreted(checked_gradients, tmp_path)


def checked_scan(folder: Path) -> None:
    package = packaged(folder, SPECS["mamba2"])
    torch.manual_seed(3)
    x, b, c = (torch.randn(2, 21, h, 64).bfloat16() for h in (2, 1, 1))
    dt, a, bias, d, z = (
        torch.randn(2, 21, 2),
        -torch.rand(2),
        torch.randn(2),
        torch.randn(2, 64),
        torch.randn(2, 21, 2, 64).bfloat16(),
    )
    state = torch.randn(2, 2, 64, 64)
    low, high = 0.1, 1.0
    out, final = package.mamba_chunk_scan_combined(
        *(x, dt, a, b, c),
        chunk_size=8,
        D=d,
        z=z,
        dt_bias=bias,
        initial_states=state,
        dt_softplus=True,
        dt_limit=(low, high),
        return_final_states=True,
    )
    step = softplus(dt + bias).clamp(low, high).double()
    s, rows = state.double(), []
    for t in range(21):
        s = s * (step[:, t] * a)[..., None, None].exp()
        s = s + (step[:, t, :, None] * x[:, t])[..., None] * b.double()[:, t, :, None]
        rows.append(torch.einsum("bhvk,bk->bhv", s, c.double()[:, t, 0]) + d * x[:, t])
    near(out, torch.stack(rows, 1) * silu(z.double()))
    near(final, s)
    with pytest.raises(ValueError, match="does not support seq_idx=a tensor"):
        package.mamba_chunk_scan_combined(x, dt, a, b, c, 8, seq_idx=torch.zeros(2, 21))


def test_options_of_the_scan(tmp_path: Path) -> None:
    interpreted(checked_scan, tmp_path)


def checked_registration(folder: Path) -> None:
    package = packaged(folder, SPECS["mamba2"])
    with pytest.raises(
        ValueError, match="math has none of the functions mamba_chunk_scan_combined"
    ):
        package.register(__import__("math"))


def test_a_module_without_the_functions(tmp_path: Path) -> None:
    interpreted(checked_registration, tmp_path)


# --- specs ------------------------

HEAD = "kernel: linear_attention\nname: own\ndtype: bf16\nhead_dim: 64\n"
GATED = "buffers: {g: {shape: [T, HV], dtype: fp32}}\ndecay: g[t, h]\n"
BY_COLUMN = "buffers: {g: {shape: [T, HV, K], dtype: fp32}}\ndecay: g[t, h, c]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rule: delta\n", "the functions need a `decay`"),
        (BY_COLUMN + "scale: 1\n", "no function has a `decay` by column without the delta rule"),
        (GATED + "rule: delta\nq_map: silu(x)\n", "the functions have no `q_map`"),
        (GATED + "rule: delta\nskip: v\n", "the functions of a delta rule have no `skip`"),
        (GATED + "scale: 1\nskip: v * 2\n", "a `skip` of one factor for each head"),
        (GATED, "the function of Mamba 2 does not scale queries"),
        (GATED + "scale: 1\nqk_norm: l2\n", "the function of Mamba 2 has no norm"),
        (GATED + "rule: delta\nscale: 2\n", "the default scale of the functions is 1 / sqrt(K)"),
        (GATED + "rule: delta\nqk_norm: l2\neps: 0.1\n", "the norm of the functions adds 1e-06"),
        (GATED + "rule: delta\nvarlen: true\n", "derives its kernels for packed sequences"),
    ],
)
def test_specs_of_other_layers(text: str, words: str) -> None:
    with pytest.raises(KgenError) as caught:
        adapter(loads_variants(HEAD + text, "own.yaml"))
    (one,) = caught.value.diagnostics
    assert words in one.message
    assert one.hint


def test_a_spec_without_decode_and_backward() -> None:
    text = HEAD + GATED + "rule: delta\npasses: [forward]\n"
    made = adapter(loads_variants(text, "own.yaml"))
    assert "decode=None" in made.folders["own_fla"]["__init__.py"]
    assert "grad" not in made.folders["own_fla/own_gates"]["spec.yaml"]
