"""The CUDA kernel for delta: it compiles for all chips without spills, and backward accepts its
result.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.packages import nvcc

from kgen.kernels.attention.plan.delta import plan_delta
from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify.compiling import CompileOptions, compile_specs
from kgen.verify.families import problem_of
from kgen.verify.resources import usage
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parents[3]


def attention(folder: Path, *lines: str) -> Path:
    path = folder / "sample.yaml"
    path.write_text("\n".join(["kernel: attention", "name: sample", *lines]))
    return path


def emitted(spec: Path, folder: Path) -> Path:
    for name, text in render_spec(load(spec)).items():
        path = folder / "sample" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bf16", 128), ("fp16", 80), ("fp32", 192), ("bf16", 1000)]
)
def test_delta_compiles_and_does_not_spill(tmp_path, dtype, head_dim, verdict):
    spec = attention(
        tmp_path, f"dtype: {dtype}", f"head_dim: {head_dim}", "targets: {cuda: {passes: [delta]}}"
    )
    path = emitted(spec, tmp_path / "out") / "sample" / "cuda.py"
    verdict(problem_of(load(spec), "cuda"), path.parent)
    module = import_file(path, f"emitted_{dtype}_{head_dim}")
    for vector in (4 if dtype == "fp32" else 8, 1):
        for arch in ("sm_80", "sm_90", "sm_100"):
            code = module._compiled(f"sample_delta_kernels::delta_kernel<{vector}>", arch).code
            registers, spills, shared = usage(bytes(code))
            assert 16 <= registers <= 255
            assert (spills, shared) == (0, 0)


def test_kgen_compile_reports_what_the_launcher_launches(tmp_path, verdict):
    spec = attention(tmp_path, "dtype: bf16", "head_dim: 64", "targets: {cuda: {passes: [delta]}}")
    emitted(spec, tmp_path / "out")
    verdict(problem_of(load(spec), "cuda"), tmp_path / "out")
    rows = compile_specs([load(spec)], tmp_path / "out", CompileOptions(["sm_90"]))
    assert all(row["ok"] and row["spills"] == 0 and row["target"] == "cuda" for row in rows), rows
    assert {row["kernel"] for row in rows} == {"delta_kernel<8>", "delta_kernel<1>"}


def test_deltas_are_for_nvcc_too(tmp_path, verdict):
    path = ROOT / "generated" / "causal" / "cuda_launch.cu"
    verdict(None, nvcc.versions(), path, path.with_name("cuda.cu"))
    assert " T causal_delta\n" in nvcc.symbols(path, tmp_path)


def test_threads_share_wide_rows(tmp_path):
    def plan(dtype: str, head_dim: int):
        return plan_delta(
            load(attention(tmp_path, f"dtype: {dtype}", f"head_dim: {head_dim}")).spec
        )

    assert [plan("bf16", d).threads_per_row for d in (1, 64, 128, 192, 1024)] == [8, 8, 8, 16, 32]
    assert [plan("bf16", d).rows for d in (64, 128)] == [32, 16]
    assert plan("fp32", 128).vector == 4


def test_backward_takes_delta_from_outside(tmp_path, verdict):
    """In Triton's interpreter, gradients are the same with a passed delta and with the kernel's
    own.
    """
    spec = attention(
        tmp_path,
        "dtype: fp32",
        "head_dim: 16",
        "mask_mod: q_idx >= kv_idx",
        "targets: {triton: {}, cuda: {passes: [delta]}}",
    )
    path = emitted(spec, tmp_path / "out") / "sample" / "triton.py"
    code = f"""
from pathlib import Path

import torch

from kgen.verify import interpreter
from kgen.verify.toolchain import import_file

interpreter.mend()
module = import_file(Path({str(path)!r}), "sample_triton")
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
asked = []

def delta(out, dout, dlse):
    asked.append(dlse is not None)
    return (out * dout).sum(-1) - (0 if dlse is None else dlse)

def gradients(with_lse):
    out, lse = module.sample(q, k, v, return_lse=True)
    total = (out * out.detach()).sum() + ((lse * lse.detach()).sum() if with_lse else 0)
    return torch.autograd.grad(total, (q, k, v))

for with_lse in (False, True):
    module.use_delta(None)
    own = gradients(with_lse)
    module.use_delta(delta)
    for one, other in zip(own, gradients(with_lse), strict=True):
        torch.testing.assert_close(one, other)
assert asked == [False, True], asked
expected = "delta must be torch.float32 [1, 2, 40] on cpu, got"
for wrong, words in (
    (lambda *args: delta(*args).double(), expected + " torch.float64"),
    (lambda *args: delta(*args)[..., 0], expected + " torch.float32 [1, 2]"),
    (lambda *args: delta(*args).mT.contiguous().mT, "delta must be contiguous"),
):
    module.use_delta(wrong)
    try:
        gradients(False)
        raise AssertionError(words)
    except ValueError as error:
        assert str(error).startswith("sample: " + words), error
"""
    verdict(problem_of(load(spec)), path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
