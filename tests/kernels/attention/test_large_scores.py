"""Scores so large that float32 has no digits left for a log-sum-exp.

In fp32, backward recomputes P to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted

from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.verify.toolchain import import_file

SPEC = """kernel: attention
name: single
dtype: fp32
head_dim: 16
{more}
"""
FIELDS = {
    "plain": "mask_mod: q_idx >= kv_idx",
    "tf32x3": "precision: tf32x3\nmask_mod: q_idx >= kv_idx",
    "capped": "score_mod: 1000000000000.0 * tanh(score / 1000000000000.0)",
    "sinks": "sinks: true\nmask_mod: q_idx >= kv_idx",
    "packed": "varlen: true\nmask_mod: q_idx >= kv_idx",
    "decode": "gqa: 1\npasses: [forward, backward, decode]",
}
OFTEN = ("plain", "sinks", "packed")
"""Specs that run at every change."""
MAGNITUDES = (1.0, 2.0**8, 2.0**15)
"""Magnitudes of q and k. Scores are up to 2**35."""


@pytest.mark.parametrize(
    "name", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.thorough) for x in FIELDS]
)
def test_gradients_do_not_depend_on_the_size_of_scores(name: str, tmp_path: Path) -> None:
    path = tmp_path / "single.py"
    path.write_text(
        next(
            iter(
                render_spec(
                    loads(SPEC.format(more=FIELDS[name]), "single.yaml"), single=True
                ).values()
            )
        )
    )
    assert not interpreted(_off, path, name)


def _off(path: Path, name: str) -> list[str]:
    """Return the results with errors above eight roundings of float32, with the magnitude."""
    from kgen.verify import interpreter

    interpreter.mend()
    function = import_file(path, "single").single
    rows = (70, 2) if name == "packed" else (1, 2, 70)
    if name == "decode":
        rows = (1, 2, 5)
    found = []
    for magnitude in MAGNITUDES:
        random = torch.Generator().manual_seed(0)
        # Integers make scores exact. Every key occurs three times, so that no row attends to a
        # single key.
        q, k = (
            torch.randn(*rows, 16, generator=random).round().clamp(-2, 2) * magnitude for _ in "qk"
        )
        k = k.index_select(
            k.dim() - 2 if name != "packed" else 0,
            torch.arange(rows[0 if name == "packed" else 2]) // 3,
        )
        v, dout = (torch.randn(*rows, 16, generator=random) for _ in "vd")
        given: dict[str, Any] = {"sinks": torch.tensor([1.5, -2.0])} if name == "sinks" else {}
        packed = [torch.tensor([0, 40, 70], dtype=torch.int32)] * 2 if name == "packed" else []
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = function(*leaves, *packed, **given, return_lse=True)
        _, _, dv = torch.autograd.grad(out, leaves, dout)
        wanted = _in_float64(q, k, v, dout, name, given)
        for what, got, want in zip(("out", "lse", "dv"), (out, lse, dv), wanted, strict=True):
            error = float((got.detach().double() - want).norm() / want.norm())
            if not error < 8 * 2**-24:
                found.append(f"{what} at {magnitude:g}: {error:.1e}")
    return found


def _in_float64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    name: str,
    given: dict[str, Any],
) -> list[torch.Tensor]:
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    if name == "packed":
        parts = [
            _in_float64(*(x[run].transpose(0, 1)[None] for x in (q, k, v, dout)), "plain", given)
            for run in (slice(0, 40), slice(40, 70))
        ]
        out, lse, dv = (torch.cat(x, 2)[0] for x in zip(*parts, strict=True))
        return [out.transpose(0, 1), lse, dv.transpose(0, 1)]
    v = v.requires_grad_()
    scores = q @ k.mT / 4
    if name == "capped":
        scores = 1e12 * torch.tanh(scores / 1e12)
    elif name != "decode":
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    if given:
        scores = torch.cat(
            [scores, given["sinks"].double()[None, :, None, None].expand(*scores.shape[:3], 1)], 3
        )
    out = scores.softmax(3)[..., : v.shape[2]] @ v
    (dv,) = torch.autograd.grad(out, v, dout)
    return [out.detach(), scores.logsumexp(3), dv]


def test_splits_of_a_cache_are_merged_by_their_exact_weights(tmp_path: Path) -> None:
    path = tmp_path / "single.py"
    more = "gqa: 1\npasses: [forward, decode]"
    path.write_text(
        next(iter(render_spec(loads(SPEC.format(more=more), "single.yaml"), single=True).values()))
    )
    assert interpreted(_merged, path) < 8 * 2**-24


def _merged(path: Path) -> float:
    """Return the error of decoding, relative to the result, if splits have equal maxima."""
    from kgen.verify import interpreter

    interpreter.mend()
    module = import_file(path, "single")
    module._splits = lambda programs, most, at_once: 5
    random = torch.Generator().manual_seed(1)
    k = (torch.randn(1, 2, 12, 16, generator=random).round() * 2.0**12).repeat(1, 1, 28, 1)[
        :, :, :330
    ]
    q, v = k[:, :, :3], torch.randn(1, 2, 330, 16, generator=random)
    want = (q.double() @ k.double().mT / 4).softmax(3) @ v.double()
    return float((module.single(q, k, v).double() - want).norm() / want.norm())


def test_parts_of_keys_are_merged_by_their_exact_weights() -> None:
    assert interpreted(_merged_parts) < 8 * 2**-24


def _merged_parts() -> float:
    from kgen.kernels.attention.parallel import merging
    from kgen.verify import interpreter

    interpreter.mend()
    random = torch.Generator().manual_seed(2)
    parts = [torch.randn(1, 2, 9, 24, generator=random) for _ in range(3)]
    lses = [2.0**30 + torch.rand(1, 2, 9, generator=random, dtype=torch.float64) for _ in parts]
    out, lse = torch.empty_like(parts[0]), torch.empty_like(lses[0])
    merging.merge(out, parts, lse, lses)
    weights = torch.stack(lses).sub(2.0**30).exp2()
    want = (weights[..., None] * torch.stack(parts).double()).sum(0) / weights.sum(0)[..., None]
    assert (lse - 2.0**30 - weights.sum(0).log2()).abs().max() < 2**-20
    return float((out.double() - want).norm() / want.norm())
