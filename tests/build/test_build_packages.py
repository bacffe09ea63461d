"""Output folders of packages, the files that builds replace, and the messages of `--check`, with
fake machine code.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packages.c_calls import Case, attention_tensors
from support.packages.c_on_paper import Library, Paper, compiled, packages_of, python
from support.running.farm_tasks import until
from typer.testing import CliRunner

from kgen.build import native
from kgen.build.files import spelled
from kgen.build.stale import stale
from kgen.cli import app
from kgen.diagnostics import KgenError
from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify.packages import digest_of

ROOT = Path(__file__).resolve().parents[2]
WIDE = """kernel: attention
name: wide
dtype: fp16
head_dim: 128
gqa: any
lengths: {q: any, kv: any}
mask_mod: q_idx >= kv_idx
"""
"""Has Hopper kernels for both passes."""
ROWS = """kernel: norm
name: narrow
dtype: bf16
norm: rms
width: any
passes: [forward]
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with calls from C and fake machine code."""
    return packages_of({"narrow": ROWS}, tmp_path_factory.mktemp("rows"), ["sm_80"])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a rendered spec, in which builds make fake machine code."""
    (tmp_path / "narrow.yaml").write_text(ROWS)
    _rendered(tmp_path)
    monkeypatch.setattr("kgen.build.package.messages", _messages)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _rendered(folder: Path) -> None:
    for name, text in render_spec(load(folder / "narrow.yaml")).items():
        path = folder / "generated" / "narrow" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _messages(
    module: str, build: Any, timeout: float, environment: Mapping[str, Any]
) -> Iterator[Any]:
    code = json.dumps(sorted(environment.items())).encode()
    row = {
        "kernel": "_forward_kernel",
        "arch": build.job.arch,
        "capability": build.job.capability,
        "spills": 0,
    }
    yield {**row, **build.keep("_forward_kernel", code), "error": None}


def _build(*more: str) -> Any:
    return CliRunner().invoke(app, ["build", "narrow.yaml", "--target", "triton", *more])


def _files(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_what_kgen_build_did_not_make_stays(project: Path) -> None:
    """A folder of the user, a user's file in a package, and an edited file stay."""
    place = project / "built" / "narrow"
    place.mkdir(parents=True)
    (place / "notes.txt").write_text("mine")
    said = _build()
    assert said.exit_code == 2
    assert "error[not-a-package]: `kgen build` did not write this" in said.output
    assert "`--force` to replace it" in said.output
    assert _files(project / "built") == {"narrow/notes.txt": b"mine"}
    assert _build("--force").exit_code == 0
    assert not (place / "notes.txt").exists()
    (place / "mine.txt").write_text("mine")
    before = _files(project / "built")
    said = _build()
    assert said.exit_code == 2
    assert "error[not-a-package]: `kgen build` did not write this file" in said.output
    assert "mine.txt" in said.output
    (place / "mine.txt").unlink()
    (place / "triton.py").write_text("edited")
    assert "error[edited]" in _build().output
    del before["narrow/mine.txt"]
    assert _files(project / "built") == {**before, "narrow/triton.py": b"edited"}


def test_emitted_files_are_not_replaced_by_a_package(project: Path) -> None:
    before = _files(project / "generated")
    assert "error[not-a-package]" in _build("-o", "generated").output
    assert _files(project / "generated") == before


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_place_that_is_no_folder_is_said(project: Path, kind: str) -> None:
    place = project / "built" / "narrow"
    place.parent.mkdir()
    place.write_text("mine") if kind == "file" else place.symlink_to(project / "generated")
    said = _build()
    assert said.exit_code == 2
    assert f"error[{'not-a-package' if kind == 'file' else 'link'}]" in said.output
    assert [p.name for p in place.parent.iterdir()] == ["narrow"]


def test_a_package_that_cannot_be_replaced_stays_whole(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the last step of the build fails, the earlier package is restored, without extra files."""
    assert _build().exit_code == 0
    before = _files(project / "built")
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self.name.endswith(".unfinished"):
            raise PermissionError(13, "Permission denied", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    said = _build("--arch", "sm_80")
    assert said.exit_code == 2
    assert "error[io]: Permission denied" in said.output
    assert _files(project / "built") == before
    assert os.listdir(project / "built") == ["narrow"]


def test_two_builds_of_one_package_do_not_meet(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process builds the same package while this one compiles."""

    def meanwhile(*asked: Any) -> Iterator[Any]:
        monkeypatch.setattr("kgen.build.package.messages", _messages)
        assert _build("--arch", "sm_80").exit_code == 0
        yield from _messages(*asked)

    monkeypatch.setattr("kgen.build.package.messages", meanwhile)
    assert _build("--arch", "sm_90").exit_code == 0
    assert json.loads((project / "built" / "narrow" / "manifest.json").read_text())["archs"] == [
        "sm_90a"
    ]
    assert os.listdir(project / "built") == ["narrow"]


def test_a_spec_that_was_edited_since_is_not_built(project: Path) -> None:
    assert _build().exit_code == 0
    before = _files(project / "built")
    (project / "narrow.yaml").write_text(ROWS + "eps: 0.5\n")
    said = _build()
    assert said.exit_code == 2
    assert (
        "error[not-rendered]: `generated/narrow/triton.py` is out of date: the spec or kgen changed"
        in said.output
    )
    assert "kgen render narrow.yaml" in said.output
    assert _files(project / "built") == before
    checked = _build("--check")
    assert checked.exit_code == 1
    assert (
        "stale: narrow: `generated/narrow/triton.py` is out of date: the spec or kgen changed"
        in checked.output
    )
    _rendered(project)
    assert _build().exit_code == 0


def test_a_chip_without_the_dtype_is_left_out(project: Path) -> None:
    spec = project / "narrow.yaml"
    spec.write_text(ROWS + "quantize: {dtype: fp8_e4m3, scale: per_row}\n")
    _rendered(project)
    found = _build("--arch", "sm_80", "--arch", "sm_90a")
    assert found.exit_code == 0, found.output
    assert "for sm_80: its kernels need sm_89 or newer" in found.output
    manifest = json.loads((project / "built" / "narrow" / "manifest.json").read_text())
    assert manifest["archs"] == ["sm_90a"]
    assert {kernel["arch"] for kernel in manifest["kernels"]} == {"sm_90a"}
    assert stale([load(spec)], project / "generated", project / "built") == []
    alone = _build("--arch", "sm_80")
    assert alone.exit_code == 2
    assert "has no file to build for" in alone.output


def test_two_specs_of_one_name_are_refused(project: Path) -> None:
    (project / "other").mkdir()
    (project / "other" / "narrow.yaml").write_text(ROWS + "eps: 0.5\n")
    said = CliRunner().invoke(app, ["build", "narrow.yaml", "other/narrow.yaml"])
    assert said.exit_code == 2
    assert "error[name-taken]: narrow.yaml also has the name `narrow`" in said.output
    assert not (project / "built").exists()


def test_settings_of_compilers_are_no_part_of_what_is_built(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Mapping[str, Any]] = []

    def kept(
        module: str, build: Any, timeout: float, environment: Mapping[str, Any]
    ) -> Iterator[Any]:
        heard.append(environment)
        return _messages(module, build, timeout, environment)

    monkeypatch.setattr("kgen.build.package.messages", kept)
    settings = {"DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "CUTE_DSL_LINEINFO"}
    settings |= {"TRITON_DEBUG", "TRITON_INTERPRET", "TRITON_PTXAS_PATH"}
    for name in settings:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(project / "cache"))
    assert _build("--arch", "sm_80").exit_code == 0
    (told,) = heard
    assert {name for name, value in told.items() if value is None} >= settings
    assert "TRITON_CACHE_DIR" not in told


@pytest.mark.parametrize("seconds", ["0", "-1"])
def test_no_time_is_refused(project: Path, seconds: str) -> None:
    assert _build("--timeout", seconds).exit_code == 2
    assert not (project / "built").exists()


# --- architectures ------------------------


def test_an_architecture_has_one_spelling() -> None:
    assert spelled(["sm_90", "sm_80", "sm_90a"]) == ["sm_90a", "sm_80"]
    assert spelled(["sm_100f", "sm_86"]) == ["sm_100a", "sm_86"]
    with pytest.raises(KgenError, match="unknown architecture"):
        spelled(["sm_1"])


@pytest.mark.parametrize(
    "arch",
    ["sm_80", *(pytest.param(arch, marks=pytest.mark.thorough) for arch in ("sm_90", "sm_100"))],
)
def test_calls_from_c_are_of_the_chips_that_there_is_machine_code_for(
    tmp_path: Path, arch: str
) -> None:
    """Calls name a Hopper kernel only if it was built. The other passes run."""
    folder = packages_of({"wide": WIDE}, tmp_path, [arch])
    package = folder / "wide"
    source = (package / "c" / "wide.c").read_text()
    assert ("_hopper_kernel" in source) == (arch == "sm_90")
    for compiler in (["gcc", "-std=c11"], ["g++", "-std=c++17", "-x", "c++"]):
        compiled(
            [*compiler, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", package / "c" / "wide.c"]
        )
    compiled(
        [
            "g++",
            "-std=c++17",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsyntax-only",
            package / "c" / "example.cpp",
        ]
    )
    paper, library = Paper(package), Library(package, "wide")
    paper.device(int(arch.removeprefix("sm_")), 4)
    given = attention_tensors(load(folder / "wide.yaml"), Case(group=1))
    given |= {f"d{n}": given[n].clone() for n in "qkv"} | {"out": given["q"].clone()}
    given["lse"] = torch.zeros(given["q"].shape[:-1])
    assert library.call("forward", given) == 0, library.error()
    assert library.call("backward", given) == 0, library.error()
    assert any("hopper" in row["kernel"] for row in paper.launched) == (arch == "sm_90")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arch", "what", "built"),
    [("sm_90a", "for these arguments", "['_delta_kernel']"), ("sm_80", "for sm_90", "[]")],
)
def test_a_call_on_hopper_that_no_machine_code_fits_goes_to_triton(
    tmp_path: Path, arch: str, what: str, built: str
) -> None:
    """The Gluon kernels and their descriptors, too.

    The package was built for another group size or chip.
    """
    package = packages_of({"wide": WIDE}, tmp_path, [arch]) / "wide"
    command = ["tests/support/packages/falls_to_triton.py", str(package)]
    done = python([*command, "3"], {"TRITON_INTERPRET": None})
    assert done.returncode == 0, done.stderr
    *triton, launched = done.stdout.splitlines()
    gluon = [one for one in triton if "Gluon" in one]
    assert gluon == [
        "_forward_hopper_kernel GluonJITFunction True",
        "_backward_hopper_kernel GluonJITFunction True",
        "_dq_hopper_kernel GluonJITFunction True",
    ]
    assert launched == built, "delta has no group"
    assert {*triton} - {*gluon} == ({"_delta_kernel JITFunction True"} if built == "[]" else set())
    assert f"no machine code {what}. Triton compiles it" in done.stderr
    assert "portable kernels" not in done.stderr
    refused = python([*command, "3"], {"TRITON_INTERPRET": None, "KGEN_NO_COMPILER": "1"})
    assert "NoMachineCode" in refused.stderr


def test_calls_from_c_belong_in_a_project_in_c(rows: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "main.c").write_text(
        '#include "narrow.h"\nint main(void) { return narrow_load != 0 ? 0 : 1; }\n'
    )
    (project / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(mine LANGUAGES C)\n"
        f"add_subdirectory({rows}/narrow/c narrow)\nadd_executable(mine main.c)\n"
        "target_link_libraries(mine narrow)\n"
    )
    compiled(["cmake", "-S", project, "-B", tmp_path / "cmake"])
    compiled(["cmake", "--build", tmp_path / "cmake"])


# --- what is stale ------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--arch", "sm_90"], ""),
        (["--arch", "sm_86"], "not built for sm_86"),
        (["--width", "100"], "not built with `--width 100`"),
        (["--target", "cuda"], "not built with `--target cuda`"),
        (["--c"], "not built with `--c`"),
    ],
)
def test_check_holds_a_package_to_what_is_named(project: Path, asked: list[str], said: str) -> None:
    assert _build("--arch", "sm_90a").exit_code == 0
    command = ["build", "narrow.yaml", "--check", *asked]
    heard = CliRunner().invoke(app, command)
    assert heard.exit_code == (1 if said else 0), heard.output
    assert (f"stale: narrow: {said}" in heard.output) == bool(said)
    data = json.loads(CliRunner().invoke(app, [*command, "--format", "json"]).stdout)
    assert data == ([{"spec": "narrow", "stale": said}] if said else [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "its manifest.json is not a manifest of this version of kgen"),
        ("[]", "its manifest.json is not a manifest of this version of kgen"),
        ("{", "its manifest.json is not a manifest of this version of kgen"),
        (
            '{"sources": {}, "kernels": [{}]}',
            "its manifest.json is not a manifest of this version of kgen",
        ),
        ('"spills": NaN', "its manifest.json is not a manifest of this version of kgen"),
        ('"spills": 1', "manifest.json was edited after the build"),
    ],
)
def test_check_reads_whatever_a_manifest_says(project: Path, text: str, said: str) -> None:
    assert _build().exit_code == 0
    path = project / "built" / "narrow" / "manifest.json"
    path.write_text(path.read_text().replace('"spills": 0', text) if text[0] == '"' else text)
    heard = _build("--check")
    assert heard.exit_code == 1
    assert f"stale: narrow: {said}" in heard.output


def test_check_goes_on_after_a_package_of_nothing(project: Path) -> None:
    """One package has a target that the spec lacks, one is for a chip that this kgen does not
    know.
    """
    assert _build().exit_code == 0
    for key, value, said in (
        ("targets", ["cuda"], "narrow: built from other files"),
        (
            "archs",
            ["sm_999"],
            "narrow: built for sm_999, which this version of kgen does not support",
        ),
        ("sizes", {}, "narrow: not built with `--width 512`"),
    ):
        path = project / "built" / "narrow" / "manifest.json"
        whole = path.read_text()
        manifest = json.loads(whole) | {key: value}
        path.write_text(json.dumps(manifest | {"digest": digest_of(manifest)}))
        heard = _build("--check", "--width", "512")
        assert (heard.exit_code, heard.output.count("error[")) == (1, 0), heard.output
        assert said in heard.output
        path.write_text(whole)


def test_a_spec_with_variants_is_one_function(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that chooses the variant is next to their packages, unless a file of another author
    is there.
    """
    text = ROWS.replace("name: narrow", "name: both").replace("bf16", "[bf16, fp16]")
    (project / "both.yaml").write_text(text)
    assert CliRunner().invoke(app, ["render", "both.yaml"]).exit_code == 0
    command = ["build", "both.yaml", "--target", "triton", "--arch", "sm_80"]
    place = project / "built" / "both" / "__init__.py"
    with monkeypatch.context() as failing:
        failing.setattr("kgen.build.package.messages", lambda *_: iter([{"error": "no luck"}]))
        assert CliRunner().invoke(app, command).exit_code == 1
        assert not place.exists(), "there is nothing to choose from"
    assert CliRunner().invoke(app, command).exit_code == 0
    assert place.read_text() == (project / "generated" / "both" / "__init__.py").read_text()
    code = "import sys; sys.path.insert(0, 'built'); from both import both; print(both.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "both\n", done.stderr
    assert "2 specs checked, 0 stale" in CliRunner().invoke(app, [*command, "--check"]).output
    place.write_text("mine")
    assert (
        "stale: both: __init__.py was edited after the build"
        in CliRunner().invoke(app, [*command, "--check"]).output
    )
    refused = CliRunner().invoke(app, command)
    assert "error[edited]" in refused.output
    assert place.read_text() == "mine"
    place.unlink()
    assert (
        "stale: both: __init__.py is missing"
        in CliRunner().invoke(app, [*command, "--check"]).output
    )
    place.symlink_to(project / "both.yaml")
    assert "error[link]" in CliRunner().invoke(app, [*command, "--force"]).output
    place.unlink()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert place.is_file()


@pytest.mark.parametrize("name", ["gqa", "batch", "width", "heads"])
@pytest.mark.parametrize("number", ["0", "4000000000"])
def test_sizes_that_no_kernel_has_are_refused(project: Path, name: str, number: str) -> None:
    said = _build(f"--{name}", number)
    assert said.exit_code == 2
    assert "Invalid value" in said.output


@pytest.mark.skipif(
    sys.platform != "linux", reason="workers end with whoever started them on Linux alone"
)
def test_who_is_ended_leaves_nothing_half_built(tmp_path: Path) -> None:
    (tmp_path / "narrow.yaml").write_text(ROWS)
    _rendered(tmp_path)
    command = [sys.executable, "-m", "kgen", "build", "narrow.yaml", "--target", "triton"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as build:
        until(lambda: [*(tmp_path / "built").glob(".narrow.*.unfinished")])
        build.send_signal(signal.SIGTERM)
        assert build.wait(30) == 130
    assert [*(tmp_path / "built").iterdir()] == []


@pytest.mark.parametrize("text", ["[]", "{}", "{", "null", '{"sources": {}, "kernels": [{}]}'])
def test_what_is_no_manifest_is_not_verified(project: Path, text: str) -> None:
    assert _build().exit_code == 0
    (project / "built" / "narrow" / "manifest.json").write_text(text)
    heard = CliRunner().invoke(
        app, ["verify", "narrow.yaml", "--built", "built", "--device", "cpu", "--target", "triton"]
    )
    assert heard.exit_code == 2, heard.output
    assert heard.output.count("error[bad-package]") == 1
    assert "kgen build narrow -o built" in heard.output


def test_check_knows_the_templates_of_c(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = [load(rows / "narrow.yaml")]
    assert stale(loaded, rows / "generated", rows) == []
    templates = tmp_path / "templates"
    shutil.copytree(native.template_root(), templates)
    runtime = templates / "c" / "kgen_runtime.h"
    runtime.write_text(runtime.read_text() + "\n")
    monkeypatch.setattr(native, "template_root", lambda: templates)
    assert stale(loaded, rows / "generated", rows) == ["narrow: built by another version of kgen"]
