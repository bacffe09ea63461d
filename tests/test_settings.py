"""`[tool.kgen]` of a pyproject.toml: its location, its meaning, and the errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Project
from typer.testing import CliRunner

from kgen.cli import app
from kgen.diagnostics import KgenError, show
from kgen.settings import Settings, settings


def put(folder: Path, text: str | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_without_any_it_is_specs_and_generated(tmp_path: Path) -> None:
    assert settings(tmp_path) == Settings(Path("specs"), Path("generated"))
    put(tmp_path, "[tool.other]\nspecs = 1\n")
    assert settings(tmp_path) == Settings()


def test_the_nearest_with_a_table_counts(tmp_path: Path) -> None:
    put(tmp_path, '[tool.kgen]\nspecs = "far"\n')
    put(tmp_path / "a", '[tool.kgen]\nspecs = "s"\ngenerated = "../out"\n')
    here = put(tmp_path / "a/b/c", "[project]\n")
    assert settings(here) == Settings(Path("../../s"), Path("../../../out"))
    assert settings(tmp_path) == Settings(Path("far"), Path("generated"))


def test_a_folder_left_out_is_beside_the_file(tmp_path: Path) -> None:
    put(tmp_path, '[tool.kgen]\nspecs = "s"\n')
    (tmp_path / "deep").mkdir()
    assert settings(tmp_path / "deep") == Settings(Path("../s"), Path("../generated"))


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("[tool.kgen\n", "1:11", "this is not TOML"),
        ("a = 1\n[tool.kgen]\nspecs = 'x", "3:11", "this is not TOML"),
        ("[tool.kgen]\n\nspec = 'x'\n", "3:1", "did you mean `specs`?"),
        ("[tool.kgen]\nother = 'x'\n", "2:1", "the settings are `specs` and `generated`"),
        (
            "specs = 1\n[tool.kgen]\n  specs = 1\n",
            "3:3",
            "`specs`: expected the name of a folder, got `1`",
        ),
        (
            "[tool.kgen]\ngenerated = ''\n",
            "2:1",
            'write the name of a folder, such as `generated = "generated"`',
        ),
        ('[tool.kgen]\ngenerated = "a\\u0000b"\n', "2:1", "expected the name of a folder"),
        ("[tool]\nkgen = 'x'\n", "2:1", "`tool.kgen`: expected a table"),
        (
            "tool = {kgen = {specs = []}}\n",
            "1:17",
            "`specs`: expected the name of a folder, got a list",
        ),
        (b"\n# \xff\n", "2:3", "byte 0xff is not UTF-8"),
        ("a = " + "[" * 5000, "1:", "this is not TOML"),
    ],
)
def test_what_is_wrong_has_a_place(
    tmp_path: Path, text: str | bytes, place: str, said: str
) -> None:
    put(tmp_path, text)
    with pytest.raises(KgenError) as caught:
        settings(tmp_path)
    (diagnostic,) = caught.value.diagnostics
    shown = show(diagnostic)
    assert f"pyproject.toml:{place}" in shown
    assert said in shown
    assert "hint: " in shown


def test_every_mistake_is_told(tmp_path: Path) -> None:
    put(tmp_path, "[tool.kgen]\nspecs = 1\ngenerated = 2\n")
    with pytest.raises(KgenError) as caught:
        settings(tmp_path)
    assert [diagnostic.line for diagnostic in caught.value.diagnostics] == [2, 3]


def test_verbs_take_them(project: Project) -> None:
    project.spec("a")
    (project.root / "specs").rename(project.root / "kernels")
    put(project.root, '[tool.kgen]\nspecs = "kernels"\ngenerated = "src/made"\n')
    (project.root / "src").mkdir()
    assert project.kgen("list").last == "1 spec"
    assert project.kgen("render").last == "1 file rendered, 1 changed, 0 deleted"
    assert (project.root / "src/made/a/fake.py").is_file()
    assert project.kgen("render", "--check").code == 0
    assert project.kgen("render", "-o", "elsewhere").last == "1 file rendered, 1 changed, 0 deleted"
    assert (project.root / "elsewhere/a/fake.py").is_file()
    put(project.root, "[tool.kgen]\nspecs = 1\n")
    wrong = project.kgen("render")
    assert (wrong.code, wrong.out) == (2, "")
    assert "pyproject.toml:2:1" in wrong.err
    assert project.kgen("render", "kernels", "-o", "elsewhere").code == 0, (
        "nothing of it is asked for"
    )


def test_status_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, '[tool.kgen]\nspecs = "kernels"\ngenerated = "src/made"\n')
    (tmp_path / "kernels").mkdir()
    lines = "kernel: norm\nname: small\nnorm: rms\nwidth: 16\ndtype: fp32\n"
    (tmp_path / "kernels/small.yaml").write_text(lines)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["render"]).exit_code == 0
    found = CliRunner().invoke(app, ["status"])
    assert (found.exit_code, "src/made/small/triton.py" in found.stdout) == (1, True)


def test_where_nothing_is_found_it_says_where_it_looked(project: Project) -> None:
    put(project.root, '[tool.kgen]\nspecs = "nowhere"\n')
    result = project.kgen("list")
    assert result.code == 2
    assert "run kgen where `nowhere/` is" in result.err
