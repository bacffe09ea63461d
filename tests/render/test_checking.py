"""`--check` reads all files in a folder. Verbs that read kernels compare them with their specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kgen.cli import app

SPEC = "kernel: norm\nname: own\nnorm: rms\ndtype: bf16\nwidth: 256\ntargets: {triton: {}}\n"
ATTENTION = "kernel: attention\nname: own\ndtype: fp16\nhead_dim: 16\nmask_mod: q_idx >= kv_idx\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/own.yaml").write_text(SPEC)
    return tmp_path


def kgen(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments])


def edit(path: str) -> None:
    """Edit a kernel by hand."""
    text = Path(path).read_text()
    Path(path).write_text(text + "\n# edited\n")


@pytest.mark.parametrize("given", [(), ("specs",)], ids=["no spec", "a folder of specs"])
def test_kernels_of_stock_specs_are_checked_wherever_they_lie(given: tuple[str, ...]) -> None:
    assert kgen("render", "rms_norm", "specs/own.yaml", "-o", "src").exit_code == 0
    right = kgen("render", "--check", *given, "-o", "src")
    assert (right.exit_code, right.output.count("0 differ, 0 orphaned, 0 edited")) == (0, 1)
    edit("src/rms_norm/triton.py")
    for flag in ("--check", "--diff"):
        found = kgen("render", flag, *given, "-o", "src")
        assert found.exit_code == 1
        assert "0 differ, 0 orphaned, 1 edited" in found.output
        assert "src/rms_norm/triton.py" in found.output


def test_specs_that_are_named_are_checked_alone() -> None:
    kgen("render", "rms_norm", "specs/own.yaml", "-o", "src")
    edit("src/rms_norm/triton.py")
    assert kgen("render", "--check", "specs/own.yaml", "-o", "src").exit_code == 0
    assert kgen("render", "--check", "rms_norm", "-o", "src").exit_code == 1


def test_a_folder_is_checked_in_a_project_without_specs(project: Path) -> None:
    kgen("render", "rms_norm", "-o", "src")
    (project / "specs/own.yaml").unlink()
    (project / "specs").rmdir()
    assert kgen("render", "--check", "-o", "src").exit_code == 0
    edit("src/rms_norm/triton.py")
    assert "1 edited" in kgen("render", "--check", "-o", "src").output
    assert kgen("render", "--check", "-o", "nowhere").exit_code == 2


def test_one_file_of_a_stock_spec_is_checked() -> None:
    kgen("render", "--single", "rms_norm", "-o", "src")
    assert kgen("render", "--single", "specs/own.yaml", "-o", "src").exit_code == 0
    assert "2 files checked, 0 differ" in kgen("render", "--single", "--check", "-o", "src").output
    edit("src/rms_norm.py")
    assert "1 edited" in kgen("render", "--single", "--check", "-o", "src").output


@pytest.mark.parametrize("flags", [(), ("--check",)], ids=["written", "checked"])
def test_one_file_that_a_folder_hides_is_warned_of(flags: tuple[str, ...]) -> None:
    """Python imports the package `own` before the module `own.py`.

    A folder without `__init__.py` hides nothing.
    """
    Path("src/own").mkdir(parents=True)
    assert "hidden" not in kgen("render", "--single", "specs/own.yaml", "-o", "src").output
    kgen("render", "specs/own.yaml", "-o", "src")
    found = kgen("render", "--single", "specs/own.yaml", "-o", "src", *flags)
    assert found.exit_code == 0
    said = "`src/own.py` is hidden by the folder `src/own/`, which Python imports instead: "
    assert (
        said + "write the file to another folder with `--output`, or remove that one"
        in found.output
    )
    assert "hidden" not in kgen("render", "specs/own.yaml", "-o", "src", *flags).output


def test_what_only_adapters_made_is_no_rendered_folder() -> None:
    """A folder of `kgen adapt` names a spec whose kernels were never rendered into it."""
    assert kgen("adapt", "causal_fp32", "--for", "hub", "-o", "adapters").exit_code == 0
    found = kgen("render", "--check", "-o", "adapters")
    assert "new: adapters/own/" in found.output
    assert "adapters/causal_fp32" not in found.output


def test_specs_without_an_adapter_do_not_keep_others_from_being_checked(project: Path) -> None:
    (project / "specs/causal.yaml").write_text(ATTENTION.replace("own", "mine"))
    assert kgen("adapt", "--for", "transformers", "specs/causal.yaml").exit_code == 0
    assert kgen("adapt", "--check", "--for", "transformers").exit_code == 0
    edit("adapters/mine_transformers/__init__.py")
    found = kgen("adapt", "--check", "--for", "transformers")
    assert (found.exit_code, found.output.count("1 edited")) == (1, 1)
    assert kgen("adapt", "--check", "--for", "transformers", "specs/own.yaml").exit_code == 2


def test_adapters_of_stock_specs_are_checked() -> None:
    made = ("adapt", "--for", "hub", "-o", "src")
    Path("specs/own.yaml").write_text(ATTENTION)
    assert kgen(*made).exit_code == 0
    assert kgen("adapt", "causal_fp32", "--for", "hub", "-o", "src").exit_code == 0
    right = kgen(*made, "--check")
    assert right.exit_code == 0, right.output
    assert "0 differ, 0 edited" in right.output
    kernel = next(
        path for path in Path("src").glob("**/triton.py") if "causal_fp32" in path.as_posix()
    )
    edit(kernel.as_posix())
    found = kgen(*made, "--check")
    assert (found.exit_code, found.output.count("0 differ, 1 edited")) == (1, 1)


# --- verbs that read kernels ------------------------

READING = [
    ("status",),
    ("verify", "--device", "cpu"),
    ("verify", "--device", "cpu", "--sanitizer", "memcheck"),
    ("compile",),
    ("bench",),
    ("build",),
    ("tune",),
]


@pytest.mark.parametrize("verb", READING, ids=" ".join)
def test_files_that_differ_are_said_first(verb: tuple[str, ...]) -> None:
    kgen("render")
    edit("generated/own/triton.py")
    found = kgen(*verb)
    assert found.exit_code == 1
    said = "generated/own/triton.py does not match specs/own.yaml (edited by hand); "
    first, *more = found.stderr.splitlines()
    assert first.startswith(f"error[differs]: {said}")
    assert "--as-is" in first
    assert bool(more or found.stdout) == (verb == ("status",))


@pytest.mark.parametrize("verb", [("verify", "--device", "cpu"), ("compile",)], ids=" ".join)
def test_files_that_differ_are_not_recorded(verb: tuple[str, ...]) -> None:
    kgen("render")
    edit("generated/own/triton.py")
    found = kgen(*verb, "--as-is", "--record")
    assert (found.exit_code, found.output.count("\n")) == (1, 1)
    assert "does not match specs/own.yaml (edited by hand); leave out `--record`" in found.output
    assert not Path("generated/verified.json").exists()


def test_a_spec_that_was_edited_is_said_and_accepted() -> None:
    kgen("render")
    Path("specs/own.yaml").write_text(SPEC.replace("256", "512"))
    found = kgen("verify", "--device", "cpu")
    assert (found.exit_code, found.output.count("\n")) == (1, 1)
    assert "generated/own/triton.py does not match specs/own.yaml" in found.output
    accepted = kgen("status", "--as-is")
    assert accepted.stderr.startswith("note: generated/own/triton.py does not match ")
    assert "own   generated/own/triton.py" in accepted.stdout


def test_kernels_of_a_spec_without_rendered_files_do_not_differ() -> None:
    found = kgen("status")
    assert "differs" not in found.output
    assert "missing" in found.output


def test_a_file_that_is_gone_differs() -> None:
    kgen("render", "causal")
    Path("generated/causal/hopper.py").unlink()
    assert "hopper.py does not match" in (said := kgen("verify", "causal").output)
    assert "(missing)" in said


def test_status_of_files_that_were_never_verified() -> None:
    kgen("render")
    found = kgen("status")
    assert found.exit_code == 1
    assert "`kgen verify --record`" in found.output
    assert "0 verified, 0 interpreted, 0 compiled, 1 unrecorded, 0 stale, 0 missing" in found.output
