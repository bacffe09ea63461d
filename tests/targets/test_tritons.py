"""Emitted files under other Triton versions than the installed one: messages, compilation and
results.
"""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from support.interpreters.single_file import single

from kgen.targets.triton.tritons import GLUON, OLDEST, TORCH_OF_OLDEST
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(ROOT.glob("generated/*/triton.py"))
NEWEST = f"{GLUON[-1][0]}.{GLUON[-1][1]}.0"
FLOOR = f"{OLDEST[0]}.{OLDEST[1]}.0"


def _imported(monkeypatch: pytest.MonkeyPatch, version: str, *names: str) -> list[ModuleType]:
    monkeypatch.setattr(triton, "__version__", version)
    paths = [ROOT / "generated" / name / "triton.py" for name in names]
    return [import_file(path, f"kgen_test_tritons_{path.parent.name}") for path in paths]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_an_older_triton_gets_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.3.1")
    # Old versions lack this module.
    monkeypatch.setitem(sys.modules, "triton.tools.tensor_descriptor", None)
    with pytest.raises(ImportError) as error:
        import_file(path, "kgen_test_tritons")
    name = path.parent.name
    assert str(error.value) == (
        f"{name} needs Triton {OLDEST[0]}.{OLDEST[1]} (torch {TORCH_OF_OLDEST}) or newer, got 3.3.1"
    )


def test_the_oldest_triton_is_said_everywhere() -> None:
    oldest = ".".join(map(str, OLDEST))
    assert (
        f'"torch>={TORCH_OF_OLDEST}", "triton>={oldest};' in (ROOT / "pyproject.toml").read_text()
    )
    for page in (ROOT / "README.md", ROOT / "docs/support.md"):
        assert f"Triton {oldest} (torch {TORCH_OF_OLDEST})" in page.read_text()
        assert f"{GLUON[0][0]}.{GLUON[0][1]} to {GLUON[-1][0]}.{GLUON[-1][1]}" in page.read_text()
    for path in FILES:
        assert (
            f"\nNeeds Triton {oldest} (torch {TORCH_OF_OLDEST}) or newer.\n"
            in ast.get_docstring(ast.parse(path.read_text())) + "\n"
        )


def _on_chip(module: Any, capability: int) -> None:
    module._arch = lambda device: capability


def test_hopper_without_its_kernels_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = _imported(monkeypatch, "3.5.1", "causal", "causal_alibi")
    x = torch.zeros(1, 1, 16, 128, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for module in modules:
            _on_chip(module, 80)
            assert not module._on_hopper(x)
        assert not told
        for module in modules:
            module._portable_because.cache_clear()
            _on_chip(module, 90)
            for _ in range(2):
                assert not module._on_hopper(x)
            assert f"{module.__package__}.hopper" not in sys.modules
    assert len(told) == len(modules)  # each file once
    for version in (*GLUON, (3, 5, 1)):
        assert all(".".join(map(str, version)) in str(one.message) for one in told)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (module,) = _imported(monkeypatch, f"{GLUON[0][0]}.{GLUON[0][1]}.7", "causal")
        _on_chip(module, 90)
        assert module._on_hopper(x)


def test_which_kernels_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str, capability: int, q: Any, k: Any, *more: Any) -> dict[str, str]:
        (module,) = _imported(monkeypatch, triton.__version__, name)
        _on_chip(module, capability)
        return getattr(module, f"{name}_kernels")(q, k, k, *more)

    x = torch.zeros(1, 2, 96, 128, dtype=torch.bfloat16)
    odd = torch.zeros(1, 2, 96, 129, dtype=torch.bfloat16)[..., :128]
    assert asked("causal", 90, x, x) == {"forward": "hopper", "backward": "hopper"}
    assert asked("causal", 90, x, odd)["forward"].startswith(
        "portable: TMA cannot load k, v because"
    )
    assert (
        asked("causal", 80, x, x)["backward"]
        == "portable: the compute capability of the device is not 9.0"
    )
    assert asked("causal_fp32", 90, x, x)["forward"] == (
        "portable: no kernels for Hopper: the dtype is fp32, and Hopper kernels need bf16 or fp16"
    )
    assert asked("decode_gqa", 90, x[:, :, :1], x) == {"forward": "decode"}
    assert asked("decode_gqa", 90, x, x) == {"forward": "hopper"}
    bias = torch.zeros(2, 96, 97)[:, :, :96]
    assert asked("pair_bias", 90, x, x, bias)["forward"].startswith(
        "portable: TMA cannot load bias because"
    )
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.warns(UserWarning, match="portable kernels"):
        assert "3.5.1" in asked("causal", 90, x, x)["forward"]


def test_every_launch_says_that_it_fuses() -> None:
    """Triton 3.9 warns without the argument, and 3.10 changes the default."""
    launches = 0
    for path in FILES:
        tree = ast.parse(path.read_text())
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                called = ast.unparse(call.func.value)
                if called == "kernel" or called.endswith("_kernel"):
                    launches += 1
                    given = {k.arg: ast.unparse(k.value) for k in call.keywords}
                    # Attention in fp32 needs the same bits of a score in all of its kernels.
                    exact = path.parent.name == "causal_fp32"
                    assert given.get("enable_fp_fusion") == str(not exact), f"{path}:{call.lineno}"
    by_launch = [path for path in FILES if re.search(r"\b_launch\(", path.read_text())]
    assert launches >= len(FILES) - len(by_launch)


@pytest.fixture(scope="session")
def another_triton() -> Callable[[str], str]:
    """Return a function from a version to a folder with that Triton, which is installed once per
    environment.
    """

    def folder(version: str) -> str:
        if version == triton.__version__:
            return os.fspath(Path(triton.__file__).parents[1])
        place = Path(sys.prefix) / "tritons" / version
        place.parent.mkdir(exist_ok=True)
        with open(place.parent / f"{version}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                fresh = place.with_suffix(".new")
                shutil.rmtree(fresh, ignore_errors=True)
                command = [
                    sys.executable,
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--no-deps",
                    "--target",
                    str(fresh),
                ]
                subprocess.run([*command, f"triton=={version}"], check=True)
                fresh.rename(place)
        return str(place)

    return folder


def _run(folder: str, *command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


IMPORTS = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("error")
import triton
assert triton.__version__ == sys.argv[1], triton.__file__
from kgen.verify.toolchain import import_file
hopper = 0
for path in sorted(Path("generated").glob("*/triton.py")):
    module = import_file(path, f"m_{path.parent.name}")
    if module.TRITON in getattr(module, "GLUON_TRITONS", ()):
        beside = module._hopper()
        hopper += beside is not None
        assert beside.async_load and beside.async_store and beside.barrier
single = import_file(Path(sys.argv[2]), "m_single")
assert (single.gluon is triton) == (single.TRITON not in single.GLUON_TRITONS)
print(hopper)
"""


@pytest.mark.parametrize("version", [NEWEST, pytest.param(FLOOR, marks=pytest.mark.thorough)])
def test_files_import(version: str, another_triton: Callable[[str], str], tmp_path: Path) -> None:
    """Files import without a warning, the newest Triton also imports Gluon, and a single file works
    too.
    """
    (tmp_path / "causal.py").write_text(single(ROOT / "specs/causal.yaml"))
    there = int(_run(another_triton(version), "-c", IMPORTS, version, str(tmp_path / "causal.py")))
    assert (there > 20) is (version == NEWEST)


INTERPRETED = [
    pytest.param(NEWEST, "causal_alibi"),
    *(
        pytest.param(FLOOR, name, marks=pytest.mark.thorough)
        for name in ("causal_alibi", "varlen_alibi")
    ),
    *(
        pytest.param(NEWEST, name, marks=pytest.mark.thorough)
        for name in ("rms_norm", "gated_delta_output")
    ),
]


@pytest.mark.parametrize(("version", "name"), INTERPRETED)
def test_interpreted(version: str, name: str, another_triton: Callable[[str], str]) -> None:
    cases = ["--case", "tile"] if version == NEWEST and name == "causal_alibi" else []
    options = ("--device", "cpu", "--no-record", "--target", "triton", *cases)
    said = _run(another_triton(version), "-m", "kgen", "verify", f"specs/{name}.yaml", *options)
    assert said.splitlines()[-1].endswith(" right, 0 failed")


WITH_HOPPER = [path.parent.name for path in FILES if "_hopper_kernel" in path.read_text()]
COMPILED = [
    *(
        pytest.param(
            NEWEST, name, "sm_90", marks=[] if name == "sliding_window" else pytest.mark.thorough
        )
        for name in WITH_HOPPER
    ),
    *(
        pytest.param(triton.__version__, name, "sm_90", marks=pytest.mark.thorough)
        for name in WITH_HOPPER
    ),
    # fp8 needs sm_90.
    *(
        pytest.param(
            FLOOR, name, "sm_90" if name == "rms_norm_fp8" else "sm_80", marks=pytest.mark.thorough
        )
        for name in (path.parent.name for path in FILES)
    ),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("version", "name", "arch"), COMPILED)
def test_compiled(version: str, name: str, arch: str, another_triton: Callable[[str], str]) -> None:
    """Compile every kernel. The Hopper kernels compile only with their own Triton versions."""
    options = ("--arch", arch, "--target", "triton")
    said = _run(another_triton(version), "-m", "kgen", "compile", f"specs/{name}.yaml", *options)
    assert " compiled, 0 failed" in said.splitlines()[-1]
    assert ("_hopper_kernel" in said) is (arch == "sm_90")
