"""Repositories of norms for the kernel hub: their own tests, and their layers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.packages import hub

from kgen.diagnostics import KgenError
from kgen.kernels.norm.adapt.hub import adapter
from kgen.spec.load import loads_variants

MODS = {
    "plain": "norm: rms\ndtype: bf16\ntargets: {triton: {}, cuda: {}}",
    "mods": "norm: layer\ndtype: fp32\nbias: true\nweight_offset: 1\n"
    "buffers: {g: {shape: [ROWS], dtype: fp32, grad: true}, s: {shape: [WIDTH], dtype: fp32, "
    "grad: true}, b: {shape: [ROWS, WIDTH], dtype: bool}, n: {shape: [ROWS], dtype: int32}}\n"
    "params: {a: {type: float, runtime: true}, c: {type: float, value: 2.0}}\n"
    "input_mod: x * c + g\noutput_mod: where(b, max(y * s, -1.0), y * a + n)",
    "residual": "norm: rms\ndtype: bf16\nresidual: in_out",
    "heads": "norm: rms\ndtype: [bf16, fp16]\nheads: any",
    "weightless": "norm: layer\ndtype: fp32\nweight: false\npasses: [forward]",
    "per_row": "norm: rms\ndtype: bf16\nquantize: {dtype: fp8_e4m3, scale: per_row}\n"
    "passes: [forward]",
    "per_tensor": "norm: rms\ndtype: bf16\nquantize: {dtype: fp8_e4m3, scale: per_tensor}\n"
    "passes: [forward]",
}


def written(mods: str, folder: Path) -> Path:
    """Write a repository, and return its folder."""
    made = adapter(
        loads_variants(f"kernel: norm\nname: own_norm\nwidth: 128\n{mods}\n", "own.yaml")
    )
    files = {
        f"{at}/{name}": text for at, texts in made.folders.items() for name, text in texts.items()
    }
    for name, text in {**files, **made.started}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "own_norm_hub"


@pytest.mark.parametrize(
    "name", [n if n == "plain" else pytest.param(n, marks=pytest.mark.thorough) for n in MODS]
)
def test_the_tests_of_a_repository_pass(name: str, tmp_path: Path) -> None:
    root = written(MODS[name], tmp_path)
    assert [*hub.layout_errors(root), *hub.registration_errors(root)] == []
    hub.built(root)
    run = hub.tested(root, dict(os.environ))
    assert run.returncode == 0, run.stdout
    compile((root / "benchmarks" / "benchmark.py").read_text(), "benchmark.py", "exec")
    if name == "mods":  # the tests must detect an error
        path = root / "build" / "torch-cpu" / "_kernels" / "triton.py"
        right = "x_hat * (weight[None, :] + 1)"
        assert right in path.read_text()
        path.write_text(path.read_text().replace(right, "x_hat * (weight[None, :] + 1.01)"))
        run = hub.tested(root, dict(os.environ))
        assert run.returncode == 1, run.stdout


def test_cuda_files_are_left_out(tmp_path: Path) -> None:
    root = written(MODS["plain"], tmp_path)
    assert not [*root.rglob("*cuda*")]
    package = (root / "torch-ext/own_norm/__init__.py").read_text()
    files = "cuda.cu, cuda_launch.cu and cuda.py, which are left out"
    assert files in " ".join(package.split())
    assert "`cuda.cu`, `cuda_launch.cu` and `cuda.py`" in (root / "CARD.md").read_text()
    made = adapter(
        loads_variants(f"kernel: norm\nname: a_b\nwidth: 8\n{MODS['plain']}\n", "own.yaml")
    )
    assert made.remarks == (
        "a_b_hub: cuda.cu, cuda_launch.cu and cuda.py left out, because the kernel hub does not "
        "allow the package cuda-core",
    )


def test_a_spec_with_only_cuda_files_has_no_repository() -> None:
    text = "kernel: norm\nname: own_norm\nwidth: 128\nnorm: rms\ndtype: bf16\ntargets: {cuda: {}}\n"
    with pytest.raises(KgenError, match="they need the package cuda") as raised:
        adapter(loads_variants(text, "own.yaml"))
    (problem,) = raised.value.diagnostics
    assert (problem.file, problem.line, problem.hint) == ("own.yaml", 6, "add the target `triton`")


def test_a_layer_reads_the_module_that_it_replaces(tmp_path: Path) -> None:
    """`forward` gets the weight and the epsilon of a norm of transformers and of PyTorch."""
    root = written("norm: rms\ndtype: fp32\npasses: [forward]", tmp_path)
    hub.built(root)
    for error in interpreted(_layers, root / "build"):
        assert error < 1e-5


def _layers(build: Path) -> list[float]:
    import kernels
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def replaced(norm: torch.nn.Module, name: str) -> torch.nn.Module:
        kernels.replace_kernel_forward_from_hub(type(norm), name)
        repository = kernels.LocalLayerRepository(build, layer_name="OwnNorm")
        with kernels.use_kernel_mapping({name: {"cpu": repository}}):
            mode = kernels.Mode.INFERENCE
            return kernels.kernelize(norm, mode=mode, device="cpu", use_fallback=False)

    class Norm(torch.nn.RMSNorm):
        pass

    errors = []
    for number, norm in enumerate((LlamaRMSNorm(128, eps=0.5), Norm(128, eps=0.5))):
        torch.nn.init.normal_(norm.weight)
        x = torch.randn(3, 128)
        with torch.no_grad():
            exact = norm(x)
            errors.append(float((replaced(norm, f"Norm{number}")(x) - exact).abs().max()))
        assert type(norm).forward is not norm.forward.__func__
    return errors
