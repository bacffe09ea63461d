"""Norms in CUDA: the emitted code compiles for all chips, with NVRTC and nvcc, without spills."""

from __future__ import annotations

import ctypes
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
from cuda.core import Program, ProgramOptions
from support.packages import nvcc

from kgen.kernels.norm.plan.planning import plan_norm
from kgen.kernels.norm.plan.shapes import backward_shapes, forward_shapes
from kgen.render.rendering import render_spec
from kgen.sizes import SHARED_LIMITS
from kgen.spec.load import load
from kgen.verify.compiling import CompileOptions, compile_specs
from kgen.verify.families import problem_of
from kgen.verify.resources import usage_of
from kgen.verify.toolchain import import_file

GENERATED = Path(__file__).resolve().parents[3] / "generated"
LAUNCHER = "cuda_launch.cu"


def emitted(spec: Path, folder: Path) -> Path:
    for name, text in render_spec(load(spec)).items():
        path = folder / "sample" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


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
    "bare": ("norm: rms", "width: 64", "dtype: bf16", "weight: false", "statistics: recompute"),
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
"""RMS and layer norms, heads, and all features of expressions. `t`, `n` and `stage` are names that
the kernels use.
"""


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
    sums = [kernel for kernel in ("columns", "finalize") if f"{kernel}_kernel" in path.read_text()]
    names = {f"sample_kernels::{kernel}_kernel": first for kernel in sums}
    for kernel, shapes in module._SHAPES.items():
        held = tuple(s for s in shapes if s.elements)
        assert [s.width for s in held] == sorted(s.width for s in held)
        assert held == shapes[: len(held)]
        # One shape per way to share rows: several rows per block, one per block, one per cluster.
        # Also shapes that load single elements.
        for single in (False, True):
            those = [
                s for s in held if (s.vector == 1) == single and (not single or s.cluster == 1)
            ]
            for s in (those[0], those[-1], shapes[-1]):
                names[module._name(kernel, s)] = 90 if s.cluster > 1 else first
    for name, least in names.items():
        for arch in (arch for arch in ("sm_80", "sm_90", "sm_100") if int(arch[3:]) >= least):
            registers, spills, _ = usage_of(module._compiled(name, arch), name)
            assert 16 <= registers <= 255
            # With all gradients, the widest shape needs more registers than a thread has.
            assert spills == 0 or which == "mods", (name, arch, spills)


def test_kgen_compile_takes_every_shape_of_a_norm(tmp_path, verdict):
    spec = norm(tmp_path, "norm: rms", "width: 64", "dtype: bf16", "passes: [forward]")
    path = emitted(spec, tmp_path / "out") / "sample" / "cuda.py"
    verdict(problem_of(load(spec)), tmp_path / "out")
    rows = compile_specs([load(spec)], tmp_path / "out", CompileOptions(["sm_80"]))
    assert all(row["ok"] for row in rows), rows
    module = import_file(path, "emitted_shapes")
    names = {module._name("forward", s) for s in module._SHAPES["forward"]}
    assert {n.rpartition("::")[2] for n in names} <= {row["kernel"] for row in rows}


def test_chips_without_clusters_compile_none(tmp_path, verdict):
    spec = norm(tmp_path, "norm: rms", "width: 65536", "dtype: bf16", "passes: [forward]")
    emitted(spec, tmp_path / "out")
    verdict(problem_of(load(spec)), tmp_path / "out")
    clusters = {}
    for arch in ("sm_80", "sm_90"):
        rows = compile_specs([load(spec)], tmp_path / "out", CompileOptions([arch]))
        shapes = [re.findall(r"\d+", row["kernel"]) for row in rows]
        clusters[arch] = sum(int(s[3]) > 1 for s in shapes)
    assert clusters["sm_80"] == 0 < clusters["sm_90"]


def test_hinted_copies_are_instructions(tmp_path, verdict):
    """If ptxas splits the address of a copy with a cache hint, it uses registers that it never
    sets.
    """
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
    # A memory descriptor is a pair of registers, of which the first is even.
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
    """Rows are loaded 16 bytes at a time if all are aligned to 16 bytes, else element by
    element.
    """
    vector = module_of_layer_norm._vector
    x, w = torch.empty(5, 264, dtype=torch.float16), torch.empty(264, dtype=torch.float16)
    assert vector((x,), (w,)) == 8
    assert vector((x[:, :256], x[:, 8:]), (w,)) == 8
    odd = torch.empty(5, 265, dtype=torch.float16)
    for rows in ((x[:, :257],), (x[:, 1:257],), (odd[:, :256],), (odd,), (x, odd)):
        assert vector(rows, (w,)) == 1
    assert vector((x,), (w[1:],)) == 1


def test_statistics_are_stored_for_backward_alone(module_of_layer_norm, monkeypatch):
    launched = []
    monkeypatch.setattr(module_of_layer_norm, "_launch", lambda *args: launched.append(args[4]))
    x, w = torch.ones(5, 256, dtype=torch.float16), torch.ones(256, dtype=torch.float16)
    module_of_layer_norm.sample(x, w, w)
    w.requires_grad_()
    module_of_layer_norm.sample(x, w, w)
    with torch.no_grad():
        module_of_layer_norm.sample(x, w, w)
    # The arguments: x and its stride, weight, bias, out, mean, rstd.
    stored = [[pointer != 0 for pointer in args[4:7]] for args in launched]
    assert stored == [[True, False, False], [True, True, True], [True, False, False]]


@pytest.mark.parametrize(
    "width", [1, 257, 600, 1000, 1021, 4095, 12_001, 100_003, 245_753, 262_143]
)
def test_shapes_are_wide_enough(module_of_layer_norm, width):
    plan, cuda = module_of_layer_norm._plan, torch.device("cuda", 0)
    for kernel, vector in product(("forward", "backward"), (8, 1)):
        name, shape, _ = plan(kernel, cuda, width, vector)
        assert name.split(", ")[4] == str(vector)
        assert shape.width >= width
        assert shape.shared <= 220_000
        # A slot of single elements is a multiple of 16 bytes in every dtype.
        assert vector > 1 or shape.threads * shape.elements % 16 == 0


def test_rows_of_a_thread_are_of_one_head(tmp_path):
    path = emitted(norm(tmp_path, *NORMS["heads"]), tmp_path / "out") / "sample" / "cuda.py"
    module = import_file(path, "emitted_heads_apart")
    # The C side also refuses widths that no shape supports.
    widest = {s[-1].width for s in module._SHAPES.values()}
    assert (
        set(map(int, re.findall(r"width_ > (\d+)", path.with_name(LAUNCHER).read_text()))) == widest
    )
    for rows, shape_rows, resident, turns in product(
        (1, 7, 133, 5000), (1, 4, 16), (1, 33, 264), (0, 2)
    ):
        s = module._SHAPES["backward"][0]._replace(rows=shape_rows, turns=turns)
        for multiple in (1, 8, 24):
            n = module._groups(rows, s, resident, multiple)
            assert n > 0
            assert n * shape_rows % multiple == 0
            assert n <= max(resident, -(-rows // shape_rows) // 2 * (turns > 0), multiple)
    assert module._groups(5000, s._replace(rows=4), 0, 1) == 1250


def test_a_file_has_the_shapes_of_its_plan(tmp_path):
    """The tables of both launchers have the same rows. `cuda.py` does not parse the C++ file."""
    spec = load(norm(tmp_path, *NORMS["layer"]))
    path = emitted(Path(spec.path), tmp_path / "out") / "sample" / "cuda.py"
    plan = plan_norm(spec)
    wanted = {"forward": forward_shapes(plan), "backward": backward_shapes(plan)}
    text = path.with_name(LAUNCHER).read_text()
    path.with_name(LAUNCHER).unlink()
    path.with_suffix(".cu").unlink()
    shapes = import_file(path, "emitted_tables")._SHAPES
    assert [*shapes] == [*wanted]
    for kernel, of_plan in wanted.items():
        fields = ("width", "threads", "rows", "elements", "cluster", "stages", "blocks", "turns")
        assert [[getattr(s, f) for f in fields] for s in shapes[kernel]] == [
            [getattr(s, f) for f in fields] for s in of_plan
        ]
        assert [s.vector == 1 for s in shapes[kernel]] == [s.single for s in of_plan]
    stated = re.findall(r"\{([\d, ]+)\},", text)
    assert stated == [", ".join(map(str, s)) for of_kernel in shapes.values() for s in of_kernel]


@pytest.mark.parametrize(
    ("width", "clusters", "any_width"),
    [
        ("[64, 128]", False, False),
        ("4096", False, False),
        ("65536", True, True),
        ("any", True, True),
    ],
)
def test_a_file_has_what_its_widths_need(tmp_path, width, clusters, any_width):
    """The file omits kernels that no chip uses for these widths, and their helpers."""
    path = (
        emitted(norm(tmp_path, "norm: rms", f"width: {width}", "dtype: bf16"), tmp_path / "out")
        / "sample"
    )
    text = (path / "cuda.cu").read_text()
    shapes = import_file(path / "cuda.py", f"emitted_needed_{len(text)}")._SHAPES
    every = [s for of_kernel in shapes.values() for s in of_kernel]
    assert any(s.cluster > 1 for s in every) == ("cluster_rank()" in text) == clusters
    assert any(s.elements == 0 for s in every) == ("columns_kernel(" in text) == any_width
    # Without these kernels, the smallest chip can run a shape of each kind for the widest row.
    widest = 65536 if width == "65536" else 4096 if width == "4096" else 128
    limit = min(SHARED_LIMITS.values()) - 8192
    for of_kernel in shapes.values():
        fits = {
            s.vector
            for s in of_kernel
            if s.width >= widest and s.cluster == 1 and s.shared <= limit
        }
        assert fits == {1, 8}


@pytest.mark.parametrize("which", sorted(NORMS))
def test_lines_of_cuda_have_at_most_120_columns(tmp_path, which):
    path = emitted(norm(tmp_path, *NORMS[which]), tmp_path / "out") / "sample"
    for name in ("cuda.cu", LAUNCHER):
        text = (path / name).read_text()
        assert [line for line in text.splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("which", ["heads", "mods", "eight bits", "bare"])
def test_norms_are_for_nvcc_too(tmp_path, which, verdict):
    spec = norm(tmp_path, *NORMS[which])
    path = emitted(spec, tmp_path / "out") / "sample" / LAUNCHER
    verdict(problem_of(load(spec)), nvcc.versions(), path, path.with_name("cuda.cu"))
    symbols = nvcc.symbols(path, tmp_path)
    assert " T sample_forward\n" in symbols
    assert (" T sample_backward\n" in symbols) == (which != "eight bits")


def test_clusters_need_code_that_has_cluster_instructions(tmp_path):
    """The driver compiles PTX of an older chip for any chip, but without these instructions."""
    texts = {
        which: (emitted(norm(tmp_path, *NORMS[which]), tmp_path / which) / "sample" / LAUNCHER)
        for which in sorted(NORMS)
    }
    for which, path in texts.items():
        text = path.read_text()
        assert ("cudaLaunchAttributeClusterDimension" in text) == (
            "if (attributes.ptxVersion < 90) return cudaErrorNotSupported;" in text
        ), which
    assert any("ptxVersion" in path.read_text() for path in texts.values())


@pytest.mark.parametrize(
    ("width", "code"),
    [
        (1024, "-arch=native"),
        (1023, "-arch=native"),
        (131072, "-gencode=arch=compute_80,code=compute_80"),
    ],
)
def test_norms_run_from_c(tmp_path, width, code):
    """Call the C launchers on device memory, as a C++ program does.

    The widest rows take clusters if the code has cluster instructions.
    """
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    spec = norm(tmp_path, "norm: layer", f"width: {width}", "bias: true", "dtype: bf16")
    nvcc.symbols(
        emitted(spec, tmp_path / "out") / "sample" / LAUNCHER,
        tmp_path,
        code,
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
    assert (
        library.sample_forward(*at(x), stride, *outputs, *size, ctypes.c_float(1e-5), stream) == 0
    )
    saved = at(weight, mean, rstd, dx)
    assert (
        library.sample_backward(
            *at(dout), stride, *at(x), stride, *saved, *size, *at(dweight, dbias), stream
        )
        == 0
    )
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    want = torch.nn.functional.layer_norm(leaves[0], (width,), leaves[1], leaves[2], 1e-5)
    for got, right in zip(
        (out, dx, dweight, dbias),
        (want, *torch.autograd.grad(want, leaves, dout.double())),
        strict=True,
    ):
        assert float((got.double() - right).norm() / right.norm()) < 4e-3
    assert (
        library.sample_forward(
            *at(x), stride, *outputs, long(-1), long(width), ctypes.c_float(1e-5), stream
        )
        != 0
    )


def test_the_kernels_of_a_norm_are_short():
    """People read `cuda.cu` from top to bottom."""
    text = (GENERATED / "rms_norm" / "cuda.cu").read_text()
    assert len(text.splitlines()) <= 700


@pytest.mark.parametrize("which", sorted(NORMS))
def test_nothing_is_emitted_that_is_not_used(tmp_path, which):
    path = emitted(norm(tmp_path, *NORMS[which]), tmp_path / "out") / "sample" / "cuda.cu"
    text = re.sub(r"//.*", "", path.read_text())
    names = re.findall(r"DEVICE [^;{}()]*?(\w+)\(", text) + re.findall(r"struct (\w+) {", text)
    names += re.findall(r"^constexpr \w+ (\w+)", text, re.MULTILINE)
    names += re.findall(r"^#define (\w+)", text, re.MULTILINE)
    assert {"store", "Row", "SIDE_BY_SIDE", "KEEPS_ROWS"} < set(names)
    # A macro has one definition for chips that support it, and one for other chips.
    defined = {n: max(1, len(re.findall(rf"^#define {n}\b", text, re.MULTILINE))) for n in names}
    assert {n for n in names if len(re.findall(rf"\b{n}\b", text)) <= defined[n]} == set()
    for name in ("forward", "backward", "columns", "finalize"):
        for params, body in re.findall(
            rf"{name}_kernel\((const [^)]*)\) {{\n(.*?)\n}}\n", text, re.DOTALL
        ):
            given = re.findall(r"(\w+)(?:,|$)", params)
            assert len(given) > 3
            assert {p for p in given if not re.search(rf"\b{p}\b", body)} == set(), name
    host = re.sub(r"//.*", "", path.with_name(LAUNCHER).read_text())
    named = re.findall(
        r"^(?:inline |auto |cudaError_t |struct )+(?:int )?(\w+)", host, re.MULTILINE
    )
    assert {"Shape", "forward_kernels", "configure", "launch", "vector_of", "run_first"} <= {*named}
    assert {n for n in named if len(re.findall(rf"\b{n}\b", host)) < 2} == set()
    # An RMS norm does not subtract the mean.
    assert ("mean" in re.sub(r"means?\[|means\b", "", text)) == (
        which not in ("rms", "heads", "bare")
    )


def test_a_device_that_holds_no_shape_is_named(monkeypatch):
    module = import_file(GENERATED / "rms_norm" / "cuda.py", "kgen_test_no_shape")
    monkeypatch.setattr(module, "_arch", lambda device: "sm_90")
    monkeypatch.setattr(module, "_shared_limit", lambda device: -1)
    words = (
        "rms_norm: no launch shape of the forward kernel for rows of 1024 elements fits on cuda:0"
    )
    with pytest.raises(RuntimeError, match=words):
        module._plan("forward", torch.device("cuda", 0), 1024, 8)
