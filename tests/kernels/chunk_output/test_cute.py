"""The CuTe DSL target: its emitted code, and compilation of both kernels without a GPU.

The compiling tests need nvidia-cutlass-dsl (extra `cute`), and are skipped without it.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kgen.diagnostics import KgenError, MissingError
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, loads
from kgen.targets.cute import RUNTIME
from kgen.verify import compiling, emitted, ledger, toolchain
from kgen.verify.compiling import CompileOptions, compile_specs
from kgen.verify.families import problem_of

HEAD = (
    "kernel: chunk_output\nname: sample\ndtype: bf16\nhead_dim: 128\npasses: [forward]\n"
    "targets: {cute: {}}\n"
)
SPECS = {
    "gated": "heads: {qk: 16, v: 32}\ndecay: g[i]\nstate_layout: vk\n",
    "packed": "decay: g[i]\ngate_base: 2\nvarlen: true\nv_layout: chunk_padded\n",
    "retention": "heads: {group: 1}\ndecay: (i + 1) * log(1 - exp2(-5 - h)) + g_gamma[h]\n",
    "plain": "varlen: true\n",
}
HAS_DSL = importlib.util.find_spec("cutlass") is not None
needs_dsl = pytest.mark.skipif(
    not HAS_DSL, reason="nvidia-cutlass-dsl is not installed (the extra `cute`)"
)


def spec(name: str) -> Loaded:
    return loads(HEAD + SPECS[name], "sample.yaml")


def render(name: str, folder: Path) -> Loaded:
    one = spec(name)
    (folder / "sample").mkdir()
    for filename, text in render_spec(one).items():
        (folder / "sample" / filename).write_text(text)
    return one


@pytest.mark.parametrize("name", SPECS)
def test_each_architecture_has_a_file(name):
    files = render_spec(spec(name))
    assert set(files) == {"cute_sm90.py", "cute_sm100.py", "_launch.py", "__init__.py"}
    assert "triton" not in files.pop("__init__.py")
    for text in files.values():
        tree = ast.parse(text)
        roots = {
            node.names[0].name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
        }
        roots |= {
            str(n.module).split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)
        }
        assert roots <= {
            "array",
            "cuda",
            "cutlass",
            "functools",
            "hashlib",
            "itertools",
            "math",
            "numbers",
            "os",
            "tempfile",
            "threading",
            "torch",
            "typing",
            "_launch",
        }
        assert max(map(len, text.splitlines())) <= 120
    assert "Compiled, but not verified" in files["cute_sm100.py"]
    assert "Compiled, but not verified" not in files["cute_sm90.py"]


def test_one_architecture_alone():
    text = (HEAD + SPECS["gated"]).replace("cute: {}", "cute: {arch: [sm_90a]}")
    assert set(render_spec(loads(text, "sample.yaml"))) == {
        "__init__.py",
        "_launch.py",
        "cute_sm90.py",
    }


def test_a_gate_that_nobody_reads_is_not_loaded():
    for text in render_spec(spec("plain")).values():
        assert "sg" not in text
        assert "exp2" not in text
        assert "LOG2E" not in text


@needs_dsl
@pytest.mark.parametrize("name", SPECS)
def test_kernels_compile_without_a_gpu(tmp_path, name, verdict):
    one = render(name, tmp_path)
    verdict(problem_of(one), tmp_path)
    rows = compile_specs([one], tmp_path, CompileOptions(["sm_90", "sm_100"], jobs=2, record=True))
    # CuTe DSL writes cubin and PTX files, which must not be in the current folder.
    assert not [path for path in Path.cwd().iterdir() if path.suffix in (".cubin", ".ptx")]
    kernels = ["_chunk_indices_kernel"] * one.spec.varlen + ["_kernel"]
    for target, arch in (("cute_sm90", "sm_90a"), ("cute_sm100", "sm_100a")):
        own = [row for row in rows if (row["target"], row["arch"]) == (target, arch)]
        assert sorted(row["kernel"] for row in own) == kernels
    for row in rows:
        assert row["error"] is None
        assert row["spills"] == 0
        if row["kernel"] == "_kernel":
            assert 32 <= row["registers"] <= 200
            assert 100 * 1024 < row["shared"] < row["limit"]
    # A file that was only compiled has this state.
    assert [row["state"] for row in ledger.status([one], tmp_path)] == ["compiled", "compiled"]
    (versions,) = {record["versions"]["nvidia-cutlass-dsl"] for record in _records(tmp_path)}
    assert versions == toolchain.versions(RUNTIME.tools)["nvidia-cutlass-dsl"]


def _records(folder: Path):
    return [
        record for entry in ledger.read(folder).values() for record in entry["records"].values()
    ]


@needs_dsl
def test_a_kernel_without_tensor_cores_is_refused(tmp_path, verdict):
    one = render("plain", tmp_path)
    path = tmp_path / "sample" / "cute_sm100.py"
    gone = "\n".join(
        line for line in path.read_text().splitlines() if not line.strip().startswith("_gemm(")
    )
    path.write_text(gone + "\n")
    verdict(problem_of(one), tmp_path)
    found = compile_specs([one], tmp_path, CompileOptions(["sm_100a"]))
    (row,) = (row for row in found if row["kernel"] == "_kernel")
    assert not row["ok"]
    assert "tcgen05.mma" in row["error"]


@needs_dsl
@pytest.mark.parametrize("stem", ["cute_sm90", "cute_sm100"])
def test_the_launcher_says_what_does_not_fit(tmp_path, stem):
    render("packed", tmp_path)
    module = toolchain.import_file(tmp_path / "sample" / f"{stem}.py", f"sample_{stem}")
    q, v, h = (
        torch.zeros(1, 70, 2, 128),
        torch.zeros(1, 128, 4, 128),
        torch.zeros(1, 2, 4, 128, 128),
    )
    q, v, h = (x.bfloat16() for x in (q, v, h))
    g, cu = torch.zeros(1, 70, 4), torch.tensor([0, 70])
    with pytest.raises(ValueError, match="got tensors on cpu"):
        module.sample(q, q, v, h, g, cu_seqlens=cu)
    with pytest.raises(ValueError, match=r"v must be \[1, 128, 4, 128\], got \[1, 70, 4, 128\]"):
        module.sample(q, q, v[:, :70], h, g, cu_seqlens=cu)
    with pytest.raises(TypeError, match=r"g must be torch\.float32"):
        module.sample(q, q, v, h, g.double(), cu_seqlens=cu)
    with pytest.raises(ValueError, match="cu_seqlens must be"):
        module.sample(q, q, v, h, g, cu_seqlens=cu.float())
    with pytest.raises(ValueError, match=r"chunk_indices must be \[2, 2\] on cpu, got \[3, 2\]"):
        module.sample(q, q, v, h, g, cu_seqlens=cu, chunk_indices=torch.zeros(3, 2))


@needs_dsl
def test_addresses_and_strides_are_where_the_kernel_looks(tmp_path):
    render("packed", tmp_path)
    path = tmp_path / "sample" / "cute_sm90.py"
    module = toolchain.import_file(path, "sample_numbers")
    q, h, g = torch.zeros(2, 3, 4, 8)[..., :5], torch.zeros(2, 3, 4, 5, 6), torch.zeros(2, 3, 4)
    tensors = [q, q.clone(), q.clone(), h, q.clone(), g, torch.zeros(5), torch.zeros(6, 2)]
    numbers = module._numbers(1, 2, 3, 4, 5, tensors=tensors)
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_tensor"
    ]
    assert len(calls) == len(tensors)
    for call, x in zip(calls, tensors, strict=True):
        at, behind = ast.literal_eval(call.args[1]), ast.literal_eval(call.args[5])
        assert numbers[at] == x.data_ptr()
        # Every stride of a tensor is used once. The last dim, and dims without a stride, have
        # adjacent elements.
        assert sorted(numbers[at + b] for b in behind if b) == sorted(x.stride()[: max(behind)])
    assert (
        f"numbers = cute.make_tensor(numbers, cute.make_layout({len(numbers)}))" in path.read_text()
    )


def test_an_architecture_that_no_file_is_for(tmp_path):
    one = render("plain", tmp_path)
    with pytest.raises(KgenError, match="no file has these targets") as caught:
        compile_specs([one], tmp_path, CompileOptions(["sm_80"]))
    assert (
        caught.value.diagnostics[0].hint
        == "`cute_sm90.py` is for sm_90a, `cute_sm100.py` is for sm_100a"
    )
    with pytest.raises(KgenError, match="no file has these targets"):
        compile_specs([one], tmp_path, CompileOptions(targets=["triton"]))


def test_without_the_extra(tmp_path, monkeypatch):
    one = render("plain", tmp_path)
    find = importlib.util.find_spec
    hidden = lambda name, *args: None if name == "cutlass" else find(name, *args)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(MissingError) as caught:
        compile_specs([one], tmp_path, CompileOptions(["sm_90"]))
    (found,) = caught.value.diagnostics
    assert "`cutlass` is not installed" in found.message
    assert found.hint == "pip install 'kgen-kernels[cute]'"


def test_where_a_file_can_run(tmp_path, monkeypatch):
    files = emitted.emitted_files(tmp_path, spec("plain"))
    assert [file.unable("cpu") for file in files] == ["needs a GPU", "needs a GPU"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(emitted.Emitted, "missing_package", lambda self: None)
    assert [file.unable("cuda") for file in files] == [
        None,
        "is for sm_100a, and this device is sm_90a",
    ]


def test_rendering_needs_no_dsl():
    program = (
        "import sys; sys.modules['cutlass'] = sys.modules['torch'] = None\n"
        "from kgen.render.rendering import render_spec; from kgen.spec.load import loads\n"
        f"print(*render_spec(loads({HEAD!r}, 'sample.yaml')))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.split() == ["cute_sm90.py", "cute_sm100.py", "_launch.py", "__init__.py"], (
        run.stderr
    )


def test_workers_know_the_instructions_of_their_architectures():
    from kgen.kernels.chunk_output.targets.cute.sources import FILES
    from kgen.verify.compile_cute import TENSOR_CORES

    assert set(TENSOR_CORES) == set(FILES)
    assert all(compiling.capability(arch) in compiling.SHARED_LIMITS for arch in FILES)
