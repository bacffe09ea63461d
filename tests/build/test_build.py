"""`kgen build`: packages of machine code, built and called without a GPU."""

from __future__ import annotations

import ctypes
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.packages.loading import package_of
from typer.testing import CliRunner

from kgen.build.package import BuildOptions, build_specs
from kgen.build.runtime import triton as runtime
from kgen.build.stale import stale
from kgen.cli import app
from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify.families import family_of, problem_of
from kgen.verify.packages import altered

SIZES = {"gqa": (1, 2, 3, 4)}
"""The sizes that the cases use."""
FP16 = """kernel: attention
name: small
dtype: fp16
head_dim: 32
gqa: any
mask_mod: q_idx >= kv_idx
buffers: {slopes: {shape: [HQ], dtype: fp32}}
score_mod: score + slopes[h] * (kv_idx - q_idx)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a spec, its emitted files, and a package for sm_80."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "small.yaml").write_text(FP16)
    loaded = load(folder / "small.yaml")
    for name, text in render_spec(loaded).items():
        path = folder / "generated" / "small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rows = build_specs(
        [loaded], folder / "generated", folder / "out", BuildOptions(["sm_80"], SIZES)
    )
    assert [(row["ok"], row["error"]) for row in rows] == [(True, None)]
    return folder


def test_every_case_is_right_through_the_machine_codes_arguments(built: Path) -> None:
    wrong, used, there = interpreted(
        _verified, built, ["tile", "off-tile", "mixed", "guarded", "stepped", "scale"]
    )
    assert wrong == []
    assert used == there


def _verified(folder: Path, names: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the failed cases, the kernels that they used, and the kernels of the package."""
    from support.packages.driver_on_paper import Driver

    from kgen.verify import interpreter
    from kgen.verify.families import Subject

    interpreter.mend()
    package = package_of("small_built", folder / "out" / "small")
    launcher = package.load("triton")
    driver = Driver(runtime, package)
    problem = problem_of(load(folder / "small.yaml"))
    family = family_of(problem)
    subject = Subject(problem, "triton", package.folder / "triton.py", launcher, "cpu")
    wrong = []
    with (
        driver.installed(launcher, 80),
        mock.patch.object(runtime.Package, "by_triton", side_effect=AssertionError),
    ):
        for group in family.groups(problem):
            for name in set(names) & set(family.case_names(problem, group, True)):
                wrong += [
                    f"{group} {name}: {c.message}"
                    for c in family.run_case(subject, group, name)
                    if not c.ok
                ]
    used, there = (
        {row["kernel"] for row in rows} for rows in (driver.launched, package.manifest["kernels"])
    )
    return wrong, sorted(used), sorted(there)


def _group(row: dict[str, Any]) -> int:
    return next((value for name, _, value in row["arguments"] if name == "GQA"), 1)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
sys.path.insert(0, sys.argv[1])
import torch
from small import small
x = torch.zeros(1, 3, 8, 32, dtype=torch.float16)
try:
    small(x, x, x, slopes=torch.zeros(3))
except ValueError as error:
    print(error)
try:
    small(x, x[..., 1:], x, slopes=torch.zeros(3))
except ValueError as error:
    print(error)
from contextlib import ExitStack
from unittest import mock
runtime, launcher = sys.modules["small._runtime.triton"], sys.modules[small.__module__]
launched = []
def launch(config, cubin, parameters, extra):
    launched.append(cubin.row["kernel"])
    return 0
driver = mock.Mock(cuLaunchKernelEx=launch)
instead = {
    "_driver": lambda: driver,
    "_function": lambda d, c: c,
    "_stream": lambda d: 0,
    "_arch": lambda a: 80,
}
with ExitStack() as stack:
    for name, value in instead.items():
        stack.enter_context(mock.patch.object(runtime, name, value))
    stack.enter_context(mock.patch("torch.cuda.current_device", return_value=0))
    stack.enter_context(mock.patch.object(launcher, "_arch", return_value=80))
    x.requires_grad_()
    small(x, x, x, slopes=torch.zeros(3)).sum().backward()
print(*launched)
print(sys.modules["triton"], [name for name in sys.modules if name.startswith("triton.")])
"""


def test_a_package_needs_no_triton(built: Path) -> None:
    """Without Triton, imports, error messages and launches work. The driver here does nothing."""
    command = [sys.executable, "-c", WITHOUT_TRITON, str(built / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    on_cpu, shapes, launched, modules = done.stdout.splitlines()
    assert launched == "_forward_kernel _delta_kernel _dq_kernel _dkdv_kernel"
    assert on_cpu.startswith("small: tensors must be on a CUDA device, got cpu. For the CPU")
    assert shapes.startswith("small: expected q [B, HQ, SQ, 32]")
    assert modules == "None []"


def test_what_no_machine_code_fits_goes_to_triton_with_a_word(built: Path) -> None:
    said, why = interpreted(_another_chip, built)
    assert said == [
        (
            "small_other: no machine code for sm_86. Triton compiles it; `kgen build --arch sm_86` "
            "builds it"
        )
    ]
    assert why == (
        "small_other: no machine code of _forward_kernel for these arguments, and Triton is not "
        "installed: "
        "make tensors contiguous, or pass the sizes of the call to `kgen build` (--gqa, --batch, "
        "--width, --heads)"
    )


def _another_chip(folder: Path) -> tuple[list[str], str]:
    import warnings

    import torch
    from support.packages.driver_on_paper import Driver

    from kgen.verify import interpreter

    interpreter.mend()
    package = package_of("small_other", folder / "out" / "small")
    launcher: Any = package.load("triton")
    q, k = torch.randn(1, 10, 8, 32).half(), torch.randn(1, 2, 8, 32).half()
    with (
        warnings.catch_warnings(record=True) as said,
        Driver(runtime, package).installed(launcher, 86),
    ):
        warnings.simplefilter("always")
        a = launcher.small(q[:, :2], k, k, slopes=torch.zeros(2))
        launcher.small(q[:, :2], k, k, slopes=torch.zeros(2))
    want = torch.nn.functional.scaled_dot_product_attention(
        q[:, :2].float(), k.float(), k.float(), is_causal=True
    )
    torch.testing.assert_close(a.float(), want, atol=2e-3, rtol=2e-3)
    with (
        Driver(runtime, package).installed(launcher, 80),
        mock.patch("importlib.util.find_spec", return_value=None),
    ):
        try:
            launcher.small(q, k, k, slopes=torch.zeros(10))
        except RuntimeError as error:
            return [str(one.message) for one in said], str(error)
    return [], ""


def test_a_thread_that_has_done_nothing_on_a_gpu_gets_a_context(built: Path) -> None:
    """A thread of autograd may have no context, if PyTorch's allocator serves all its memory.

    The driver then returns 201, an invalid context.
    """
    assert interpreted(_without_a_context, built) == ["launch", "retain", "set", "launch", "launch"]


def _without_a_context(folder: Path) -> list[str]:
    import torch
    from support.packages.driver_on_paper import Driver

    from kgen.verify import interpreter

    interpreter.mend()
    asked: list[str] = []

    class Forgetful(Driver):
        def cuLaunchKernelEx(self, *args: Any) -> int:
            asked.append("launch")
            return super().cuLaunchKernelEx(*args) if "set" in asked else 201

        def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
            asked.append("retain")
            return 0

        def cuCtxSetCurrent(self, context: Any) -> int:
            asked.append("set")
            return 0

    package = package_of("small_thread", folder / "out" / "small")
    launcher: Any = package.load("triton")
    x = torch.randn(1, 2, 8, 32).half()
    with Forgetful(runtime, package).installed(launcher, 80):
        for _ in range(2):
            launcher.small(x, x, x, slopes=torch.zeros(2))
    return asked


@pytest.mark.thorough
def test_verify_runs_a_package(built: Path, tmp_path: Path) -> None:
    """On the CPU, `kgen verify` runs the sources of a package and says so.

    It refuses a package that was changed.
    """
    arguments = [
        "verify",
        str(built / "small.yaml"),
        "--generated",
        str(built / "generated"),
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(
        app, [*arguments, "--built", str(built / "out"), "--case", "off-tile", "--case", "opcheck"]
    )
    assert done.exit_code == 0, done.output
    assert "3 right, 0 failed" in done.stdout
    assert "as machine code, which needs a GPU: Triton's interpreter runs" in done.stderr
    broken = tmp_path / "broken"
    shutil.copytree(built / "out", broken)
    cubin = next((broken / "small" / "cubins").iterdir())
    cubin.write_bytes(b"")
    said = CliRunner().invoke(app, [*arguments, "--built", str(broken), "--case", "off-tile"])
    assert said.exit_code == 2
    assert f"cubins/{cubin.name} of the package `small` changed after the build" in said.output
    missing = CliRunner().invoke(app, [*arguments, "--built", str(built / "nowhere")])
    assert missing.exit_code == 2
    assert "small/manifest.json` does not exist" in missing.output


@pytest.mark.thorough
def test_equal_inputs_give_equal_bytes(built: Path, tmp_path: Path) -> None:
    loaded = load(built / "small.yaml")
    build_specs([loaded], built / "generated", tmp_path, BuildOptions(["sm_80"], SIZES))
    names = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert names == sorted(
        p.relative_to(built / "out") for p in (built / "out").rglob("*") if p.is_file()
    )
    assert all(
        (tmp_path / name).read_bytes() == (built / "out" / name).read_bytes() for name in names
    )


def test_check_says_what_is_stale(built: Path, tmp_path: Path) -> None:
    loaded = load(built / "small.yaml")
    shutil.copytree(built / "out", tmp_path / "out")
    arguments = [
        "build",
        str(built / "small.yaml"),
        "--generated",
        str(built / "generated"),
        "-o",
        str(tmp_path / "out"),
    ]
    assert CliRunner().invoke(app, [*arguments, "--check"]).exit_code == 0
    cubin = next((tmp_path / "out" / "small" / "cubins").iterdir())
    cubin.write_bytes(cubin.read_bytes()[:-1])
    said = CliRunner().invoke(app, [*arguments, "--check"])
    assert said.exit_code == 1
    assert f"stale: small: cubins/{cubin.name} was edited after the build" in said.stdout
    emitted = built / "generated" / "small" / "triton.py"
    text = emitted.read_text()
    try:
        emitted.write_text(text.replace("tl.exp2(", "tl.exp2(0.0 + "))
        assert "small: built from other files" in stale(
            [loaded], built / "generated", built / "out"
        )
    finally:
        emitted.write_text(text)
    assert stale([loaded], built / "generated", tmp_path / "nowhere") == ["small: not built"]


def test_what_does_not_compile_leaves_the_package_that_was_there(
    built: Path, tmp_path: Path
) -> None:
    loaded = load(built / "small.yaml")
    generated = tmp_path / "generated" / "small"
    generated.mkdir(parents=True)
    for path in (built / "generated" / "small").glob("*.*"):
        (generated / path.name).write_text(
            path.read_text().replace("tl.exp2(", "tl.no_such_function(")
        )
    shutil.copytree(built / "out", tmp_path / "out")
    options = BuildOptions(["sm_80"], {"gqa": (1,)})
    (row,) = build_specs([loaded], generated.parent, tmp_path / "out", options)
    assert not row["ok"]
    assert "_forward_kernel, aligned: CompilationError" in row["error"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["small"]
    assert altered(tmp_path / "out", "small") == []


def test_machine_code_is_for_what_it_was_compiled_for(built: Path) -> None:
    """The arguments, sizes and files in a manifest match."""
    folder = built / "out" / "small"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["sizes"] == {"gqa": [1, 2, 3, 4]}
    assert {row["arch"] for row in manifest["kernels"]} == {"sm_80"}
    assert {_group(row) for row in manifest["kernels"]} == {1, 2, 3, 4}
    for row in manifest["kernels"]:
        assert len(runtime.Cubin(folder, row).forms) == len(row["parameters"])


def test_a_descriptor_is_what_tma_is_told_then_sizes_then_strides() -> None:
    """Triton's kernels take each part of a descriptor as a separate parameter."""
    map_of = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": [1, 1, 64, 64]}
    arguments = [
        ["n", "i32", None],
        ["x_desc", "tensordesc<bf16[1, 1, 64, 64],#layout>", None],
        ["BLOCK", "constexpr", 64],
        ["lse", "*fp32", True],
        ["y_desc", "tensordesc<bf16[1, 1, 64, 64],#layout>", None],
    ]
    options = {"warps": 4, "shared": 0, "programmatic": False, "cooperative": False}
    cubin = runtime.Cubin(Path(), {"arguments": arguments, "maps": [map_of, map_of], **options})
    launched: list[list[int]] = []

    class Recorded:
        def cuTensorMapEncodeTiled(
            self, memory: Any, kind: int, rank: int, address: Any, *rest: Any
        ) -> int:
            assert memory.value % 64 == 0
            ctypes.memmove(memory, struct.pack("<Q120x", address.value), 128)
            return 0

        def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
            launched.append([*parameters])
            return 0

    x, y = (torch.zeros(2, 3, rows, 64, dtype=torch.bfloat16) for rows in (5, 7))
    lse = torch.zeros(6)
    x_desc, y_desc = (runtime.Descriptor(t, t.shape, t.stride(), [1, 1, 64, 64]) for t in (x, y))
    with (
        mock.patch.object(runtime, "_driver", return_value=Recorded()),
        mock.patch.object(runtime, "_function"),
        mock.patch.object(runtime, "_stream", return_value=0),
        mock.patch("torch.cuda.current_device", return_value=0),
    ):
        cubin[1, 1, 1](11, x_desc, 64, lse, y_desc)
        cubin[1, 1, 1](12, y_desc, 64, lse, x_desc)
    # All calls of a thread share one buffer, because the driver has read it when the launch
    # returns.
    assert launched[0] == launched[1]
    sizes = [4, *[8, *[4] * 4, *[8] * 4], 8, *[8, *[4] * 4, *[8] * 4], 8, 8]
    found = [
        int.from_bytes(ctypes.string_at(at, size), "little")
        for at, size in zip(launched[1], sizes, strict=True)
    ]
    told = ([t.data_ptr(), *t.shape, *t.stride()] for t in (y, x))
    assert found == [12, *next(told), lse.data_ptr(), *next(told), 0, 0]


def test_what_a_package_lacks_is_known_behind_what_wraps_it() -> None:
    """torch.compile and opcheck raise their own errors, with the package's error as the cause."""
    from kgen.build.runtime.folder import NoMachineCode
    from kgen.verify import worker

    try:
        try:
            raise NoMachineCode("none")
        except RuntimeError as inner:
            raise ValueError("wrapped") from inner
    except ValueError as error:
        names = [type(cause).__name__ for cause in worker._causes(error)]
    assert names == ["ValueError", worker.NO_MACHINE_CODE]
