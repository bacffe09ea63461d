"""The CUDA target: what it emits compiles everywhere, for NVRTC and for nvcc, and spills nowhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import jinja2
import pytest
import torch
import triton
from cuda.core import Program, ProgramOptions

from kgen.expr.algebra import call
from kgen.expr.functions import TABLE, TypeRuleError
from kgen.expr.nodes import Type, Var
from kgen.kernels.attention.plan.delta import plan_delta
from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.targets.cuda.printer import Printer
from kgen.verify.compiling import compile_specs
from kgen.verify.families import problem_of
from kgen.verify.resources import usage, usage_of
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parents[1]


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


@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 128), ("fp16", 80), ("fp32", 192), ("bf16", 1000)])
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
    rows = compile_specs([load(spec)], tmp_path / "out", ["sm_90"])
    assert all(row["ok"] and row["spills"] == 0 and row["target"] == "cuda" for row in rows), rows
    assert {row["kernel"] for row in rows} == {"delta_kernel<8>", "delta_kernel<1>"}


NORMS = {
    "rms": ("norm: rms", "width: any", "dtype: bf16"),
    "layer": ("norm: layer", "width: any", "bias: true", "dtype: fp16"),
    "heads": ("norm: rms", "width: [64, 128]", "heads: any", "dtype: bf16"),
    "eight bits": (
        "norm: layer",
        "width: any",
        "dtype: fp16",
        "quantize: {dtype: fp8_e4m3, scale: per_row}",
        "passes: [forward]",
    ),
    "recomputed": ("norm: layer", "width: any", "dtype: bf16", "statistics: recompute"),
    "mods": (
        "norm: layer",
        "width: 4096",
        "residual: in_out",
        "weight_offset: 1",
        "dtype: {input: bf16, weight: fp32, residual: fp32}",
        "buffers:",
        "  z: {shape: [ROWS, WIDTH], dtype: bf16, grad: true}",
        "  t: {shape: [ROWS], dtype: fp32, grad: true}",
        "  c: {shape: [WIDTH], dtype: fp32, grad: true}",
        "  stage: {shape: [ROWS, WIDTH], dtype: bool}",
        "params: {cap: {type: float, runtime: true}, n: {type: int, runtime: true}, two: 2.0}",
        "input_mod: where(stage, (x + residual) * t, 0.0) + c",
        "output_mod: y * silu(z) * two + min(cap, n % 3)",
    ),
}
"""Layer and RMS, heads, and everything that expressions may do; `t`, `n` and `stage` are names of the kernels' own."""


def norm(folder: Path, *lines: str) -> Path:
    path = folder / "sample.yaml"
    path.write_text("\n".join(["kernel: norm", "name: sample", *lines, "targets: {cuda: {}}"]))
    return path


@pytest.mark.parametrize("which", sorted(NORMS.keys() - {"rms", "layer"}))
def test_norms_compile_and_do_not_spill(tmp_path, which, verdict):
    spec = norm(tmp_path, *NORMS[which])
    path = emitted(spec, tmp_path / "out") / "sample" / "cuda.py"
    verdict(problem_of(load(spec)), path.parent)
    module = import_file(path, f"emitted_{which}")
    first = 89 if which == "eight bits" else 80
    sums = ("columns", "finalize") if "backward" in module._SHAPES else ()
    names = {f"sample_kernels::{kernel}_kernel": first for kernel in sums}
    for kernel, shapes in module._SHAPES.items():
        assert [s["width"] for s in shapes] == sorted(s["width"] for s in shapes)
        # One shape for each way of sharing rows: several a block, one, a cluster for one; and of single elements.
        for single in (False, True):
            those = [s for s in shapes if s["single"] == single and (not single or s["cluster"] == 1)]
            for s in (those[0], those[-1]):
                names[module._name(kernel, s, single)] = 90 if s["cluster"] > 1 else first
        names[module._name(kernel, module._NARROW, True)] = first
    for name, least in names.items():
        for arch in (arch for arch in ("sm_80", "sm_90", "sm_100") if int(arch[3:]) >= least):
            registers, spills, _ = usage_of(module._compiled(name, arch), name)
            assert 16 <= registers <= 255
            # All gradients at once, in the widest shape, are more than a thread has registers for.
            assert spills == 0 or which == "mods", (name, arch, spills)


def test_kgen_compile_takes_every_shape_of_a_norm(tmp_path, verdict):
    spec = norm(tmp_path, "norm: rms", "width: 64", "dtype: bf16", "passes: [forward]")
    path = emitted(spec, tmp_path / "out") / "sample" / "cuda.py"
    verdict(problem_of(load(spec)), tmp_path / "out")
    rows = compile_specs([load(spec)], tmp_path / "out", ["sm_80"])
    assert all(row["ok"] for row in rows), rows
    module = import_file(path, "emitted_shapes")
    names = {module._name("forward", s, s["single"]) for s in module._SHAPES["forward"]}
    assert {n.rpartition("::")[2] for n in names} <= {row["kernel"] for row in rows}


def test_chips_without_clusters_compile_none(tmp_path, verdict):
    spec = norm(tmp_path, "norm: rms", "width: 65536", "dtype: bf16", "passes: [forward]")
    emitted(spec, tmp_path / "out")
    verdict(problem_of(load(spec)), tmp_path / "out")
    clusters = {}
    for arch in ("sm_80", "sm_90"):
        rows = compile_specs([load(spec)], tmp_path / "out", [arch])
        shapes = [re.findall(r"\d+", row["kernel"]) for row in rows]
        clusters[arch] = sum(int(s[3]) > 1 for s in shapes)
    assert clusters["sm_80"] == 0 < clusters["sm_90"]


def test_hinted_copies_are_instructions(tmp_path, verdict):
    """Where ptxas takes the address of a copy with a hint apart, it names registers that it never filled."""
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not disassembler.exists():
        pytest.skip("this Triton has no disassembler")
    spec = norm(tmp_path, *NORMS["rms"])
    path = emitted(spec, tmp_path / "out") / "sample" / "cuda.cu"
    verdict(problem_of(load(spec)), path)
    kernel = "sample_kernels::forward_kernel<512, 1, 64, 1, 8, 1, 2>"
    program = Program(path.read_text(), "c++", ProgramOptions(arch="sm_90", std="c++17"))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(bytes(program.compile("cubin", name_expressions=(kernel,)).code))
    listing = subprocess.run(
        [disassembler, "-sass", cubin], capture_output=True, text=True, check=True
    ).stdout
    copies = re.findall(r"LDGSTS\S* \[[^]]*\], desc\[UR(\d+)\]", listing)
    assert len(copies) == 8
    # What describes memory is a pair of registers, the first of which is even.
    assert all(int(number) % 2 == 0 for number in copies), listing


@pytest.fixture(scope="module")
def module_of_layer_norm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("norm")
    path = emitted(norm(folder, *NORMS["layer"]), folder / "out") / "sample" / "cuda.py"
    module = import_file(path, "emitted_layouts")
    module._arch = lambda device: "sm_90"
    module._resident = lambda *args: 264
    module._shared_limit = lambda device: 220_000
    return module


def test_which_rows_are_whole_accesses(module_of_layer_norm):
    """Rows come 16 bytes at a time where all begin and end on as many; else singly."""
    single = module_of_layer_norm._single
    x, w = torch.empty(5, 264, dtype=torch.float16), torch.empty(264, dtype=torch.float16)
    assert not single((x,), (w,))
    assert not single((x[:, :256], x[:, 8:]), (w,))
    odd = torch.empty(5, 265, dtype=torch.float16)
    for rows in ((x[:, :257],), (x[:, 1:257],), (odd[:, :256],), (odd,), (x, odd)):
        assert single(rows, (w,))
    assert single((x,), (w[1:],))


def test_statistics_are_stored_for_backward_alone(module_of_layer_norm, monkeypatch):
    launched = []
    monkeypatch.setattr(module_of_layer_norm, "_launch", lambda *args: launched.append(args[4]))
    x, w = torch.ones(5, 256, dtype=torch.float16), torch.ones(256, dtype=torch.float16)
    module_of_layer_norm.sample(x, w, w)
    w.requires_grad_()
    module_of_layer_norm.sample(x, w, w)
    with torch.no_grad():
        module_of_layer_norm.sample(x, w, w)
    # x and its stride, weight, bias, out, mean, rstd.
    stored = [[pointer != 0 for pointer in args[4:7]] for args in launched]
    assert stored == [[True, False, False], [True, True, True], [True, False, False]]


@pytest.mark.parametrize("width", [1, 257, 600, 1000, 1021, 4095, 12_001, 100_003, 245_753, 262_143])
def test_shapes_are_wide_enough(module_of_layer_norm, width):
    plan, cuda = module_of_layer_norm._plan, torch.device("cuda", 0)
    for kernel, single in product(("forward", "backward"), (False, True)):
        name, shape, shared, _ = plan(kernel, cuda, width, single, 4, 2)
        assert name.split(", ")[4] == ("1" if single else "8")
        assert shape["elements"] == 0 or shape["width"] >= width
        assert shared <= 220_000
        # A slot of single elements is whole accesses, whatever is stored.
        assert not single or shape["threads"] * shape["elements"] % 16 == 0


def test_rows_of_a_thread_are_of_one_head(module_of_layer_norm):
    groups = module_of_layer_norm._groups
    for rows, shape_rows, resident, turns in product((1, 7, 133, 5000), (1, 4, 16), (1, 33, 264), (0, 2)):
        s = {"rows": shape_rows, "stay": True, "turns": turns}
        for multiple in (1, 8, 24):
            n = groups(rows, s, resident, multiple)
            assert n > 0
            assert n * shape_rows % multiple == 0
            assert n <= max(resident, -(-rows // shape_rows) // 2 * (turns > 0), multiple)
    assert groups(5000, {"rows": 4, "stay": False, "turns": 0}, 0, 1) == 1250


def nvcc(path: Path, folder: Path, *options: str) -> str:
    """Compile for C++ repositories, warnings being errors; the symbols that there are then."""
    if (compiler := shutil.which("nvcc")) is None:
        pytest.skip("nvcc is not installed")
    options = options or ("-arch=sm_90", "-Xptxas", "-O0", "-c")
    command = [compiler, "-std=c++17", "-Werror", "all-warnings", *options]
    done = subprocess.run([*command, str(path), "-o", str(folder / "x.o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return subprocess.run(["nm", str(folder / "x.o")], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("which", ["heads", "mods", "eight bits"])
def test_norms_are_for_nvcc_too(tmp_path, which):
    path = emitted(norm(tmp_path, *NORMS[which]), tmp_path / "out") / "sample" / "cuda.cu"
    symbols = nvcc(path, tmp_path)
    assert " T sample_forward\n" in symbols
    assert (" T sample_backward\n" in symbols) == (which != "eight bits")


@pytest.mark.parametrize("width", [1024, 1023])
def test_norms_run_from_c(tmp_path, width):
    """The C launchers, called on device memory as a program in C++ would call them."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    spec = norm(tmp_path, "norm: layer", f"width: {width}", "bias: true", "dtype: bf16")
    nvcc(
        emitted(spec, tmp_path / "out") / "sample" / "cuda.cu",
        tmp_path,
        "-arch=native",
        "-shared",
        "-Xcompiler",
        "-fPIC",
    )
    library = ctypes.CDLL(str(tmp_path / "x.o"))
    rows, long = 1001, ctypes.c_longlong
    x, dout = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, bias = (torch.randn(width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    dweight, dbias = torch.full_like(weight, torch.nan), torch.full_like(bias, torch.nan)
    mean, rstd = (torch.full((rows,), torch.nan, device="cuda") for _ in range(2))

    def at(*tensors):
        return [ctypes.c_void_p(t.data_ptr()) for t in tensors]

    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    size, stride = (long(rows), long(width)), long(width)
    outputs = at(weight, bias, out, mean, rstd)
    assert library.sample_forward(*at(x), stride, *outputs, *size, ctypes.c_float(1e-5), stream) == 0
    saved = at(weight, mean, rstd, dx)
    assert (
        library.sample_backward(*at(dout), stride, *at(x), stride, *saved, *size, *at(dweight, dbias), stream)
        == 0
    )
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    want = torch.nn.functional.layer_norm(leaves[0], (width,), leaves[1], leaves[2], 1e-5)
    for got, right in zip(
        (out, dx, dweight, dbias), (want, *torch.autograd.grad(want, leaves, dout.double())), strict=True
    ):
        assert float((got.double() - right).norm() / right.norm()) < 4e-3
    assert (
        library.sample_forward(*at(x), stride, *outputs, long(-1), long(width), ctypes.c_float(1e-5), stream)
        != 0
    )


def test_deltas_are_for_nvcc_too(tmp_path):
    assert " T causal_delta\n" in nvcc(ROOT / "generated" / "causal" / "cuda.cu", tmp_path)


def test_device_code_includes_nothing():
    for path in (ROOT / "generated").glob("*/cuda.cu"):
        device, _, host = path.read_text().partition("#ifndef __CUDACC_RTC__")
        assert "#include" not in device
        assert "#include <cuda_runtime.h>" in host


def test_every_function_is_one_of_cuda(verdict):
    """Each row of the table compiles in a kernel: NVRTC knows the names, and none is ambiguous."""
    lines = []
    names = {Type.FLOAT: "xyz", Type.INT: "ijk", Type.LONG: "lmn", Type.BOOL: "pqr"}
    for name, row in TABLE.items():
        for types in product(Type, repeat=row.arity[0]):
            arguments = [Var(names[t][i], t) for i, t in enumerate(types)]
            with contextlib.suppress(TypeRuleError):
                lines.append(f"    total += float({Printer().print(call(name, *arguments))});")
    helpers = dict.fromkeys(("floor_mod", "floor_div", "tanh_approx", "sigmoid", "silu"), True)
    functions = (ROOT / "templates/cuda/_functions.j2").read_text()
    source = (
        jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        .from_string(functions)
        .render(helpers=helpers)
    )
    body = "\n".join(lines)
    kernel = (
        "__global__ void every(float* out, float x, float y, float z, int i, int j, int k, "
        "long long l, long long m, long long n, bool p, bool q, bool r) {\n"
    )
    verdict(None, source, kernel, body)
    program = Program(
        f"{source}\n{kernel}    float total = 0.0f;\n{body}\n    *out = total;\n}}",
        "c++",
        ProgramOptions(arch="sm_90", std="c++17"),
    )
    assert program.compile("cubin", name_expressions=("every",)).code


def test_a_cheaper_tanh_is_asked_for():
    tanh = call("tanh", Var("x", Type.FLOAT))
    assert Printer().print(tanh) == "tanhf(x)"
    assert Printer(fast_math=True).print(tanh) == "_tanh_approx(x)"


def test_threads_share_wide_rows(tmp_path):
    def plan(dtype: str, head_dim: int):
        return plan_delta(load(attention(tmp_path, f"dtype: {dtype}", f"head_dim: {head_dim}")).spec)

    assert [plan("bf16", d).threads_per_row for d in (1, 64, 128, 192, 1024)] == [8, 8, 8, 16, 32]
    assert [plan("bf16", d).rows for d in (64, 128)] == [32, 16]
    assert plan("fp32", 128).vector == 4


def test_backward_takes_delta_from_outside(tmp_path, verdict):
    """In Triton's interpreter: with a delta that is given, gradients are those of the kernel's own."""
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
"""
    verdict(problem_of(load(spec)), path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
