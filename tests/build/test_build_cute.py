"""`kgen build` of CuTe files, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kgen.build import compile_cute
from kgen.build.package import BuildOptions, build_specs
from kgen.build.runtime.cute import words
from kgen.build.stale import stale
from kgen.cli import app
from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify.packages import digest_of

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None,
    reason="nvidia-cutlass-dsl is not installed (the extra `cute`)",
)
OUTPUT = """kernel: chunk_output
name: small_output
dtype: bf16
head_dim: 128
chunk_size: 64
heads: {qk: 2, v: 4}
passes: [forward]
targets: {triton: {}, cute: {arch: [sm_90a]}}
"""


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a spec and its emitted files."""
    folder = tmp_path_factory.mktemp("rendered")
    (folder / "small_output.yaml").write_text(OUTPUT)
    for name, text in render_spec(load(folder / "small_output.yaml")).items():
        path = folder / "generated" / "small_output" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def built(rendered: Path) -> Path:
    """The folder with a package of the CuTe file."""
    loaded = load(rendered / "small_output.yaml")
    archs = ["sm_80", "sm_90a"]
    options = BuildOptions(archs, targets=["cute"])
    rows = build_specs([loaded], rendered / "generated", rendered / "out", options)
    assert [(row["arch"], row["kernels"], row["ok"], row["error"]) for row in rows] == [
        ("sm_90a", 1, True, None)
    ]
    return rendered


WITHOUT_COMPILER = """
import os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import torch
import small_output.cute_sm90
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from array import array
from cutlass import Float32, Int32, Int64
def compiler(*args, **more): raise AssertionError("CuTe DSL is asked")
cute.compile = compiler
launcher = sys.modules[small_output.cute_sm90.small_output.__module__]
print(launcher.__file__ == os.path.join(sys.argv[1], "small_output", "sources", "cute_sm90.py"))
kernels = launcher._compiled(Int32, 2, 2)
print(kernels is launcher._compiled(Int32, 2, 2))
for index, heads in (Int32, 3), (Int64, 2):
    try:
        launcher._compiled(index, heads, 2)
    except AssertionError as error:
        print(error)
os.environ["KGEN_NO_COMPILER"] = "1"
try:
    launcher._compiled(Int32, 4, 2)
except RuntimeError as error:
    print(error)
numbers = array("q", [0] * 64)
try:
    kernels(launcher._pointer(numbers), Float32(1.0), cuda.CUstream(0))
except Exception as error:
    print(type(error).__name__)
"""


@needs_dsl
def test_a_package_asks_no_compiler(built: Path) -> None:
    """A call of the loaded code reaches the driver, which is missing here."""
    command = [sys.executable, "-c", WITHOUT_COMPILER, str(built / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    place, kept, heads, index, refused, *called = done.stdout.splitlines()
    assert (place, kept) == ("True", "True")
    assert heads == index == "CuTe DSL is asked"
    assert refused == (
        "small_output: no machine code for index Int32, H 4, GROUP 2 (`kgen build` has `--heads` "
        "and `--gqa`), and KGEN_NO_COMPILER is set"
    )
    assert called[-1:] == ["DSLCudaRuntimeError"] or _has_a_driver(), done.stdout


def _has_a_driver() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.mark.thorough
@needs_dsl
def test_equal_inputs_give_equal_bytes_and_check_says_what_is_stale(
    built: Path, tmp_path: Path
) -> None:
    base = [
        str(built / "small_output.yaml"),
        "--generated",
        str(built / "generated"),
        "-o",
        str(tmp_path),
    ]
    # implies sm_90a
    made = CliRunner().invoke(app, ["build", *base, "--arch", "sm_90", "--target", "cute"])
    assert made.exit_code == 0, made.output
    again, package = tmp_path / "small_output", built / "out" / "small_output"
    (code,) = again.glob("cubins/*")
    assert code.read_bytes() == (package / "cubins" / code.name).read_bytes()
    assert CliRunner().invoke(app, ["build", *base, "--check"]).exit_code == 0
    code.write_bytes(code.read_bytes()[:-1])
    said = CliRunner().invoke(app, ["build", *base, "--check"])
    assert said.exit_code == 1
    assert f"cubins/{code.name} was edited after the build" in said.output


@needs_dsl
def test_a_package_is_not_stale_where_its_compiler_is_not(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package was built with CuTe DSL, and is checked without it."""
    shutil.copytree(built / "out", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "small_output" / "manifest.json"
    manifest = json.loads(path.read_text()) | {"targets": None}
    path.write_text(json.dumps(manifest | {"digest": digest_of(manifest)}))
    monkeypatch.setattr("kgen.build.files.TARGETS", ["cute"])
    hide(monkeypatch)
    loaded = load(built / "small_output.yaml")
    assert stale([loaded], built / "generated", tmp_path) == []


@needs_dsl
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"host": "aarch64"}, "no machine code for sm_90a on"),
        ({"arch": "sm_100a"}, "no machine code for sm_90a on"),
        (
            {"compilers": {"nvidia-cutlass-dsl": "4.8.0"}},
            "machine code of nvidia-cutlass-dsl 4.8.0, installed is",
        ),
    ],
)  # fmt: skip
def test_machine_code_of_another_place_is_not_loaded(
    built: Path, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    from kgen.build.runtime.cute import Package

    manifest = json.loads((built / "out" / "small_output" / "manifest.json").read_text())
    manifest["kernels"][0] |= change
    manifest |= {name: value for name, value in change.items() if name in manifest}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    asked: list[Any] = []

    def compiled(index: Any, H: int, GROUP: int) -> Any:
        asked.append((index, H, GROUP))

    module = SimpleNamespace(ARCHS=("sm_90a",))
    with pytest.warns(UserWarning, match=why):
        Package(tmp_path.name, tmp_path)._read(module, compiled, "Int32", 2, 2)
    assert asked == [("Int32", 2, 2)]


def test_constants_are_all_that_a_launcher_asks_for() -> None:
    """Packed sequences vary in optional chunk indices, the integer type of lengths, and open
    numbers of heads.
    """
    module = SimpleNamespace(Int32=int, Int64=float, _compiled=lambda: None)
    build: Any = SimpleNamespace(
        job=SimpleNamespace(problem=SimpleNamespace(heads=None, group=2)),
        sizes={"heads": (8, 16), "gqa": (1, 4)},
    )

    def packed(index: Any, given: Any, H: Any, GROUP: Any, options: str = "") -> None: ...

    def plain(index: Any, H: Any, GROUP: Any, options: str = "") -> None: ...

    def asked(function: Any) -> list[tuple[Any, ...]]:
        module._compiled = SimpleNamespace(__wrapped__=function)
        return [tuple(words(one).values()) for one in compile_cute._constants(module, build)]

    assert asked(plain) == [("int", 8, 2), ("int", 16, 2)]
    assert asked(packed) == [
        (index, given, heads, 2)
        for index in ("int", "float")
        for given in (False, True)
        for heads in (8, 16)
    ]


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide CuTe DSL, as if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "cutlass" else find(name, *a)
    )


def test_what_is_not_installed_is_left_out_and_said(
    rendered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch)
    monkeypatch.setattr("kgen.build.package._compiled", lambda *args: iter([{"error": "not now"}]))
    base = [
        str(rendered / "small_output.yaml"),
        "--generated",
        str(rendered / "generated"),
        "--arch",
        "sm_90a",
    ]
    done = CliRunner().invoke(app, ["build", *base, "-o", str(rendered / "nowhere")])
    assert "cute_sm90.py needs `cutlass`" in done.output
    named = CliRunner().invoke(
        app, ["build", *base, "-o", str(rendered / "nowhere"), "--target", "cute"]
    )
    assert named.exit_code == 3
    assert "kgen-kernels[cute]" in named.output
