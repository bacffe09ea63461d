"""Arguments of emitted functions: dtypes that autocast changes, and errors that name the dtype that
they got.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted
from torch import Tensor

from kgen.render.rendering import render_variants
from kgen.spec.load import loads_variants

ATTENTION = """kernel: attention
name: attention_of
dtype: {dtype}
head_dim: 16
buffers: {{slopes: {{shape: [HQ], dtype: fp32, grad: true}}}}
score_mod: score + slopes[h] * (kv_idx - q_idx)
mask_mod: q_idx >= kv_idx
"""
NORM = "kernel: norm\nname: norm_of\nnorm: rms\nwidth: 16\ndtype: {dtype}\n"
LEARNED = """kernel: attention
name: learned
dtype: bf16
head_dim: 16
buffers: {t: {shape: [HQ], dtype: any, grad: true}}
score_mod: score * t[h]
"""


def written(text: str, folder: Path) -> None:
    for inner, files in render_variants(loads_variants(text, "own.yaml")).items():
        (folder / inner).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / inner / name).write_text(content)


def imported(folder: Path, name: str) -> Any:
    from kgen.verify import interpreter

    torch.set_num_threads(1)
    interpreter.mend()
    sys.path.insert(0, str(folder))
    return getattr(importlib.import_module(name), name)


def operands(dtype: torch.dtype, learned: bool = False) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, 9, 16).bfloat16().to(dtype).requires_grad_(learned) for _ in range(3)
    )
    return [q, k, v], torch.tensor([0.5, 0.25]).to(dtype).requires_grad_(learned)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "[bf16, fp16]"])
def test_under_autocast_operands_have_the_dtype_of_the_kernels(dtype: str, tmp_path: Path) -> None:
    written(ATTENTION.format(dtype=dtype), tmp_path)
    interpreted(_attention, tmp_path, dtype)


def _attention(folder: Path, dtype: str) -> None:
    function = imported(folder, "attention_of")
    own = {"fp16": torch.float16, "fp32": torch.float32}.get(dtype, torch.bfloat16)
    for given in (torch.float32, torch.bfloat16):
        (q, k, v), slopes = operands(given, learned=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = function(q, k, v, slopes=slopes)
        assert out.dtype == own
        plain = [x.detach().to(own).requires_grad_() for x in (q, k, v)]
        wanted = function(*plain, slopes=slopes.detach().float())
        torch.testing.assert_close(out, wanted)
        grads = torch.autograd.grad(out.sum(), (q, k, v, slopes))
        assert [g.dtype for g in grads] == [given] * 4
        for got, want in zip(grads, torch.autograd.grad(wanted.sum(), plain), strict=False):
            torch.testing.assert_close(got, want.to(given))
    (q, k, v), slopes = operands(torch.float64)
    with (
        pytest.raises((TypeError, ValueError), match="float64"),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        function(q, k, v, slopes=slopes.float())


def test_autocast_is_compiled_and_exported(tmp_path: Path) -> None:
    written(ATTENTION.format(dtype="bf16"), tmp_path)
    interpreted(_compiled, tmp_path)


def _compiled(folder: Path) -> None:
    function = imported(folder, "attention_of")

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(q, k, v, slopes=slopes)  # type: ignore[no-any-return]

    (q, k, v), slopes = operands(torch.float32, learned=True)
    wanted = Layer()(q, k, v, slopes)
    got = torch.compile(Layer(), backend="aot_eager", fullgraph=True)(q, k, v, slopes)
    torch.testing.assert_close(got, wanted)
    for one, other in zip(
        *(torch.autograd.grad(x.sum(), (q, slopes)) for x in (got, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other)
    given = [x.detach() for x in (q, k, v, slopes)]
    exported = torch.export.export(Layer(), tuple(given)).module()
    torch.testing.assert_close(exported(*given), wanted.detach())

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return function(q, k, v, slopes=given[3])

    whole = torch.compile(plain, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(whole(*given[:3]), wanted.detach())


def test_norms_are_cast_too(tmp_path: Path) -> None:
    written(NORM.format(dtype="bf16"), tmp_path)
    interpreted(_norm, tmp_path)


def _norm(folder: Path) -> None:
    function = imported(folder, "norm_of")
    x, weight = torch.randn(3, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(x, weight)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"x must be a tensor of bfloat16, got torch\.float32"):
        function(x, weight)


def test_a_buffer_of_any_dtype_is_read_as_it_is(tmp_path: Path) -> None:
    """A model that is converted with `model.bfloat16()` still has its learned buffer, and its
    gradient.
    """
    written(LEARNED, tmp_path)
    interpreted(_any, tmp_path)


def _any(folder: Path) -> None:
    function = imported(folder, "learned")
    (q, k, v), _ = operands(torch.bfloat16)
    # Halves and quarters are the same in all dtypes.
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        t = torch.tensor([0.5, -0.25], dtype=dtype, requires_grad=True)
        out = function(q, k, v, t=t)
        (grad,) = torch.autograd.grad(out.float().square().sum(), t)
        assert grad.dtype == dtype
        results.append((out, grad.to(torch.bfloat16)))
        if len(results) > 1:
            for one, first in zip(results[-1], results[0], strict=True):
                torch.testing.assert_close(one, first)
    for wrong in (torch.float64, torch.int32):
        with pytest.raises(
            TypeError, match=f"must be a tensor of float32, bfloat16 or float16, got {wrong}"
        ):
            function(q, k, v, t=torch.zeros(2, dtype=wrong))
    with pytest.raises(
        TypeError, match="must be a tensor of float32, bfloat16 or float16, got list"
    ):
        function(q, k, v, t=[0.5, 0.5])


@pytest.mark.parametrize("text", [ATTENTION.format(dtype="fp32"), NORM.format(dtype="fp32")])
def test_without_a_gpu_the_error_names_the_interpreter(text: str, tmp_path: Path) -> None:
    written(text, tmp_path)
    call = "x = torch.zeros(1, 2, 16, 16)\n"
    call += (
        "attention_of(x, x, x, slopes=x[0, :, 0, 0])"
        if "attention_of" in text
        else "norm_of(x, x[0, 0, 0])"
    )
    name = "attention_of" if "attention_of" in text else "norm_of"
    script = f"import torch\nfrom {name} import {name}\n{call}"
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "got cpu. For the CPU, set TRITON_INTERPRET=1" in done.stderr
