"""`kgen build` of CUDA files, and the ledger's records of packages, without a GPU."""

from __future__ import annotations

import importlib
import io
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from kgen.build import compile_cuda
from kgen.build.package import BuildOptions, build_specs
from kgen.build.worker_job import BuildJob
from kgen.cli import app
from kgen.diagnostics import KgenError
from kgen.render.rendering import render_package, render_spec
from kgen.sizes import SHARED_LIMITS
from kgen.spec.load import load
from kgen.verify import ledger, processes
from kgen.verify.compiling import CompileJob, capability
from kgen.verify.emitted import require_emitted
from kgen.verify.families import problem_of
from kgen.verify.options import VerifyOptions
from kgen.verify.toolchain import import_file, versions
from kgen.verify.verifying import verify_specs

ROOT = Path(__file__).resolve().parents[2]
NORM = """kernel: norm
name: small_norm
norm: rms
width: 64
dtype: fp16
passes: [forward]
targets: {triton: {}, cuda: {}}
"""
GPU = {"device": "NVIDIA A100", "capability": "8.0"}


def here(module: str, build: BuildJob, *_: Any) -> Iterator[Any]:
    """Compile CUDA in this process, because another process would import torch again, which takes
    longer.
    """
    if build.job.emitted.target != "cuda":
        yield from processes.messages(module, build, *_)
        return
    lines = io.StringIO()
    importlib.import_module(module).main(build, lines)
    yield from map(json.loads, lines.getvalue().splitlines())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a spec, its emitted files, and a package for sm_80."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "small_norm.yaml").write_text(NORM)
    loaded = load(folder / "small_norm.yaml")
    for name, text in render_spec(loaded).items():
        path = folder / "generated" / "small_norm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with mock.patch("kgen.build.package.messages", here):
        rows = build_specs([loaded], folder / "generated", folder / "out", BuildOptions(["sm_80"]))
    assert [(row["ok"], row["error"]) for row in rows] == [(True, None)]
    return folder


def arguments(built: Path, verb: str, *more: object) -> list[str]:
    """Return the arguments of a command."""
    return [
        verb,
        str(built / "small_norm.yaml"),
        *("--generated", str(built / "generated")),
        *map(str, more),
    ]


# --- what is compiled ------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_whatever_a_launcher_plans_is_built(arch: str) -> None:
    """Includes every width, aligned or not, kernels that do not fit on a device, and the kernels
    that follow them.
    """
    loaded = load(ROOT / "specs" / "rms_norm.yaml")
    (file,) = (f for f in require_emitted(ROOT / "generated", loaded) if f.target == "cuda")
    build = BuildJob(CompileJob(problem_of(loaded, "cuda"), file, arch), {}, Path())
    rows: list[dict[str, Any]] = []

    def row(build: BuildJob, code: Any, name: str, shared: int) -> dict[str, Any]:
        return {"kernel": name, "shared": shared}

    with mock.patch.object(compile_cuda, "_row", row), mock.patch("cuda.core.Program"):
        compile_cuda.build_all(build, lambda said: rows.append(dict(said)))
    shared = {row["kernel"]: row["shared"] for row in rows}
    assert len(shared) == len(rows)

    chip = capability(arch)
    module: Any = import_file(file.path, "kgen_planning")
    module._arch = lambda device: f"sm_{chip}"
    module._shared_limit = lambda device: SHARED_LIMITS[chip]
    planned = {f"rms_norm_kernels::{name}_kernel": 0 for name in ("columns", "finalize")}
    chance = Random(0)
    module._resident = lambda *args: chance.randrange(2)
    device = torch.device("cuda", 0)
    for _ in range(10):
        module._plan.cache_clear()
        for kernel, shapes in module._SHAPES.items():
            for width, vector in product((1, *(shape.width for shape in shapes)), (1, 8)):
                name, shape, _ = module._plan(kernel, device, width, vector)
                planned[name] = shape.shared
    assert len(planned) > 40
    assert not {name for name, size in planned.items() if shared.get(name) != size}


def test_a_kernel_that_does_not_compile_is_named(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small_norm"
    folder.mkdir()
    for path in (built / "generated" / "small_norm").glob("*.*"):
        (folder / path.name).write_text(
            path.read_text().replace("__shfl_xor_sync(", "no_such_function(")
        )
    loaded = load(built / "small_norm.yaml")
    with mock.patch("kgen.build.package.messages", here):
        options = BuildOptions(["sm_80"], targets=["cuda"])
        (row,) = build_specs([loaded], tmp_path, tmp_path / "out", options)
    assert not row["ok"]
    assert re.match(r"small_norm_kernels::forward_kernel<[\d, ]+>: NVRTCError", row["error"])
    assert list(tmp_path.glob("out/*")) == []


# --- the package ------------------------

WITHOUT_COMPILERS = """
import sys
sys.modules["triton"] = None
sys.path.insert(0, sys.argv[1])
import torch
import cuda.core
def no_compiler(*args): raise AssertionError("NVRTC is asked")
cuda.core.Program = no_compiler
import small_norm
x = torch.zeros(2, 64, dtype=torch.float16)
small_norm._runs_cuda = lambda device: True
for weight in x[0], x[0, 1:]:
    try:
        small_norm.small_norm(x, weight)
    except ValueError as error:
        print(error)
loaded = sys.modules[sys.modules["small_norm.cuda"].small_norm.__module__]
name = "small_norm_kernels::forward_kernel<8, 16, 8, 1, 8, 1, 1>"
rows = __import__("json").load(open(sys.argv[1] + "/small_norm/manifest.json"))["kernels"]
row = next(r for r in rows if r["kernel"] == name)
code = loaded._compiled(name, "sm_80")
same = code.code == open(f"{sys.argv[1]}/small_norm/{row['file']}", "rb").read()
print(same, *code.symbol_mapping)
try:
    loaded._compiled(name, "sm_90")
except RuntimeError as error:
    print(error)
"""


def test_a_package_asks_no_compiler(built: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_COMPILERS, str(built / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    on_cpu, shapes, read, without = done.stdout.splitlines()
    name = "small_norm_kernels::forward_kernel<8, 16, 8, 1, 8, 1, 1>"
    assert on_cpu == "small_norm: tensors must be on a CUDA device, got cpu"
    assert shapes == "small_norm: weight must be [64] on cpu, got [63] on cpu"
    assert read == f"True {name}"
    assert without == (
        f"small_norm: no machine code of {name} for sm_90, and NVRTC cannot compile it: "
        "`kgen build --arch sm_90` builds it"
    )


def test_another_chip_goes_to_nvrtc_with_a_word(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = import_file(built / "out" / "small_norm" / "cuda.py", "small_norm_elsewhere")
    module: Any = sys.modules[stub.small_norm.__module__]
    assert Path(module.__file__).parent.name == "sources"
    names = [f"small_norm_kernels::{one}" for one in ("a", "b")]
    monkeypatch.setattr(module, "Program", mock.MagicMock())
    said = (
        "small_norm_elsewhere: no machine code of its CUDA kernels for sm_86. NVRTC compiles them; "
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for name in names:
            module._compiled(name, "sm_86")
    assert [str(one.message) for one in heard] == [f"{said}`kgen build --arch sm_86` builds it"]
    assert module.Program.call_count == 2
    monkeypatch.setenv("KGEN_NO_COMPILER", "1")
    with pytest.raises(
        RuntimeError, match="KGEN_NO_COMPILER is set: `kgen build --arch sm_89` builds it"
    ):
        module._compiled(names[0], "sm_89")


def test_a_package_mirrors_its_folder(built: Path) -> None:
    package, folder = built / "out" / "small_norm", built / "generated" / "small_norm"
    texts = {
        path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".py", ".cu")
    }
    for name in ("triton.py", "cuda.py", "cuda.cu"):
        assert (package / "sources" / name).read_text() == texts[name]
    # The launcher for C is for nvcc. A package has `c/` instead.
    assert "cuda_launch.cu" in texts
    assert not (package / "sources" / "cuda_launch.cu").exists()
    assert "from .cuda import small_norm as function" in texts["__init__.py"]
    assert (package / "__init__.py").read_text() == texts["__init__.py"]
    # Without the CuTe files, the package takes its function from the other files.
    text = render_package(load(ROOT / "specs" / "linear_attention_output.yaml"), ["triton.py"])
    assert text is not None
    assert "from .triton import linear_attention_output" in text
    assert "cute" not in text


@pytest.mark.thorough
def test_equal_inputs_give_equal_bytes(built: Path, tmp_path: Path) -> None:
    """Also if another process compiles."""
    done = CliRunner().invoke(
        app, arguments(built, "build", "-o", tmp_path, "--arch", "sm_80", "--target", "cuda")
    )
    assert done.exit_code == 0, done.output
    again, package = tmp_path / "small_norm", built / "out" / "small_norm"
    cubins = sorted(path.name for path in again.glob("cubins/*"))
    rows = json.loads((package / "manifest.json").read_text())["kernels"]
    assert cubins == sorted(Path(row["file"]).name for row in rows if row["target"] == "cuda")
    assert len(cubins) == 2
    assert all(
        (again / "cubins" / n).read_bytes() == (package / "cubins" / n).read_bytes() for n in cubins
    )
    assert sorted(p.name for p in again.glob("*.py")) == ["__init__.py", "cuda.py"]
    assert (
        CliRunner().invoke(app, arguments(built, "build", "-o", tmp_path, "--check")).exit_code == 0
    )


def test_check_says_what_is_stale(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built / "out", tmp_path, dirs_exist_ok=True)
    check = arguments(built, "build", "-o", tmp_path, "--check")
    assert CliRunner().invoke(app, check).exit_code == 0
    with mock.patch(
        "kgen.build.files.versions", lambda tools: versions(tools) | {"cuda-core": "0"}
    ):
        said = CliRunner().invoke(app, check)
    assert said.exit_code == 1
    assert (
        f"built with cuda-core {versions(['cuda-core'])['cuda-core']}, installed is 0"
        in said.stdout
    )
    source = tmp_path / "small_norm" / "sources" / "cuda.cu"
    source.write_text(source.read_text() + "//\n")
    said = CliRunner().invoke(app, check)
    assert [line for line in said.stdout.splitlines() if line.startswith("stale")] == [
        "stale: small_norm: sources/cuda.cu was edited after the build"
    ]


# --- the ledger ------------------------


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Simulate a GPU. All cases pass, except the ones that a test appends to the returned list."""
    jobs: list[Any] = []

    def messages(
        module: str, job: Any, timeout: float, environment: Mapping[str, Any]
    ) -> Iterator[Any]:
        jobs.append((job, environment.get("KGEN_NO_COMPILER")))
        for group, name in job.cases:
            yield {"start": [group, name]}
            lacks = {"unbuilt": True} if name in jobs else {}
            yield {
                "pass": group, "case": name, "ok": "wrong" not in jobs and not lacks,
                "error": 1e-3, "message": "", "outputs": {"out": [1e-3, 0.5]}, **lacks,
            }  # fmt: skip

    monkeypatch.setattr("kgen.verify.verifying.messages", messages)
    monkeypatch.setattr("kgen.verify.verifying.describe", lambda device: GPU)
    monkeypatch.setattr("kgen.verify.farm.tasks.pick_device", lambda device: "cuda")
    return jobs


def places(generated: Path, stem: str) -> list[str]:
    return sorted(ledger.records_of(generated / "small_norm" / f"{stem}.py", generated))


@pytest.fixture
def rendered(built: Path) -> Iterator[Path]:
    """Yield the folder of the emitted files, and delete its ledger at the end."""
    yield built / "generated"
    (built / "generated" / ledger.FILENAME).unlink(missing_ok=True)


def test_a_package_has_a_record_of_its_own(
    built: Path, rendered: Path, on_paper: list[Any]
) -> None:
    run = arguments(built, "verify", "--built", built / "out", "--record")
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    assert {(job.emitted.path, strict) for job, strict in on_paper} == {
        ((built / "out" / "small_norm" / f"{stem}.py").resolve(), "1")
        for stem in ("triton", "cuda")
    }
    (in_cuda,), (in_triton,) = places(rendered, "cuda"), places(rendered, "triton")
    assert re.fullmatch(
        (
            r"package sm_80 by cuda-core [\d.]+ and nvidia-cuda-nvrtc [\d.]+, NVIDIA A100, torch "
            r"[\d.+a-z]+"
        ),
        in_cuda,
    )
    assert re.fullmatch(r"package sm_80 by triton [\d.]+, NVIDIA A100, torch [\d.+a-z]+", in_triton)
    why = arguments(built, "status", "--why", rendered / "small_norm" / "cuda.py")
    said = CliRunner().invoke(app, [why[0], *why[2:]]).stdout
    assert f"{in_cuda}: " in said
    assert "cases of forward, all passed" in said
    # The emitted file itself has not run.
    assert {row["state"] for row in ledger.status([load(built / "small_norm.yaml")], rendered)} == {
        "unrecorded"
    }

    on_paper.append("wrong")
    assert CliRunner().invoke(app, [*run, "--target", "cuda"]).exit_code == 1
    assert (places(rendered, "cuda"), places(rendered, "triton")) == ([], [in_triton])


def test_cases_without_machine_code_are_left_out_and_said(
    built: Path, rendered: Path, on_paper: list[Any]
) -> None:
    on_paper.append("odd")
    run = arguments(built, "verify", "--built", built / "out", "--record", "--target", "cuda")
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    assert "cuda.py in cases without machine code in its package: forward odd" in done.output
    (record,) = ledger.records_of(rendered / "small_norm" / "cuda.py", rendered).values()
    assert record["package"]["unbuilt"] == ["forward odd"]
    assert "odd" not in str(record["worst"])


def test_a_record_speaks_for_no_other_text(
    built: Path, rendered: Path, on_paper: list[Any]
) -> None:
    loaded, out = load(built / "small_norm.yaml"), built / "out"
    verify_specs([loaded], rendered, VerifyOptions("cuda", built=out))
    assert places(rendered, "cuda") == []
    assert {strict for _, strict in on_paper} == {None}
    verify_specs(
        [loaded], rendered, VerifyOptions("cuda", built=out, record=True, targets=["cuda"])
    )
    assert len(places(rendered, "cuda")) == 1
    path = rendered / "small_norm" / "cuda.cu"
    text = path.read_text()
    try:
        path.write_text(f"{text}#define ANOTHER\n")
        assert places(rendered, "cuda") == []
        with pytest.raises(
            KgenError, match=r"the package `small_norm` was not built from the current .*"
        ):
            verify_specs([loaded], rendered, VerifyOptions("cuda", built=out, record=True))
    finally:
        path.write_text(text)
    assert len(places(rendered, "cuda")) == 1
    cubin = next((out / "small_norm" / "cubins").iterdir())
    code = cubin.read_bytes()
    try:
        cubin.write_bytes(code[:-1])
        with pytest.raises(
            KgenError, match=f"cubins/{cubin.name} of the package .* changed after the build"
        ):
            verify_specs([loaded], rendered, VerifyOptions("cuda", built=out, record=True))
    finally:
        cubin.write_bytes(code)


def test_machine_code_for_another_chip_is_not_recorded(
    built: Path, rendered: Path, on_paper: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"device": "NVIDIA H200", "capability": "9.0"}
    monkeypatch.setattr("kgen.verify.verifying.describe", lambda device: where)
    on_paper.append("odd")
    rows = verify_specs(
        [load(built / "small_norm.yaml")],
        rendered,
        VerifyOptions("cuda", built=built / "out", record=True),
    )
    # the case failed, and is not skipped
    assert {row["case"] for row in rows if not row["ok"]} == {"odd"}
    assert places(rendered, "cuda") == places(rendered, "triton") == []


def test_a_package_is_recorded_on_a_gpu_alone(built: Path) -> None:
    run = arguments(built, "verify", "--built", built / "out", "--device", "cpu", "--record")
    said = CliRunner().invoke(app, run)
    assert said.exit_code == 2
    assert "a package has no machine code for the CPU" in said.output
