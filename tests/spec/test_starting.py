"""A new spec renders unchanged, keeps the text of its source, and overwrites no file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT

from kgen.cli import app
from kgen.diagnostics import KgenError
from kgen.family import NAMES
from kgen.spec import schema, starting
from kgen.spec.load import load, loads


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kgen(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app([*arguments], prog_name="kgen")
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("kernel", NAMES)
def test_a_family_s_spec_is_right_and_says_what_its_lines_mean(kernel: str) -> None:
    text = starting.starter(kernel, "mine")
    spec = loads(text, "mine.yaml").spec
    assert (spec.kernel, spec.name) == (kernel, "mine")
    assert starting.PLACEHOLDER not in text
    assert text.count("#") > 8
    assert all(len(line) <= 140 for line in text.splitlines())


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", NAMES)
def test_what_is_written_verifies(folder: Path, kernel: str) -> None:
    assert kgen("new", "mine", "--kernel", kernel) == 0
    assert kgen("render", "mine") == 0
    assert kgen("verify", "mine", "--device", "cpu", "--quick", "--no-record") == 0


def test_it_is_written_with_the_schema_that_it_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kgen("new", "mine") == 0
    assert capsys.readouterr().out == "specs/mine.yaml written; next: kgen explain mine\n"
    first = Path("specs/mine.yaml").read_text().splitlines()[0]
    named = Path("specs") / first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads(named.read_text()) == schema.json_schema()
    assert kgen("explain", "mine") == 0
    assert kgen("render", "--check", "mine") == 1, "it renders, and is not there yet"


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("mine: own\n", schema.shipped().replace("causal_alibi", "older")):
        Path("specs").mkdir(exist_ok=True)
        Path("specs/mine.yaml").write_text("own")
        Path("specs/kgen.schema.json").write_text(text)
        assert kgen("new", "mine") == 2
        assert "the file exists" in capsys.readouterr().err
        assert Path("specs/mine.yaml").read_text() == "own"
        assert Path("specs/kgen.schema.json").read_text() == text


def test_a_schema_of_another_s_is_left_and_ours_is_renewed(folder: Path) -> None:
    path = Path("kgen.schema.json")
    for text, there in (
        ('{"title": "mine"}', '{"title": "mine"}'),
        (schema.shipped().replace("causal_alibi", "older"), schema.shipped()),
    ):
        path.write_text(text)
        Path("a.yaml").unlink(missing_ok=True)
        assert kgen("new", "a", "-o", ".") == 0
        assert path.read_text() == there


def test_a_copy_has_its_comments_and_another_name(tmp_path: Path) -> None:
    source = tmp_path / "source.yaml"
    text = starting.starter("norm", "before").replace("name: before", 'name:   "before"')
    source.write_text(text.replace("\n", "\r\n"))
    copy = starting.copied(source, "after")
    assert copy == text.replace('name:   "before"', "name:   after")
    again = starting.copied(ROOT / "specs/causal.yaml", "mine")
    assert again == f"{starting.LINE}{starting.SCHEMA}\n" + load(
        ROOT / "specs/causal.yaml"
    ).text.replace("name: causal\n", "name: mine\n")
    flow = tmp_path / "flow.yaml"
    flow.write_text("{kernel: norm, name: x_name, norm: rms, width: any, dtype: bf16}\n")
    assert "name: other, norm" in starting.copied(flow, "other")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["3x"], "not a lower_snake_case name"),
        (["../up"], "not a lower_snake_case name"),
        (["lambda"], "is a name of Python"),
        (["q"], "already has a meaning in kernels"),
        (["mine", "--from", "causal", "--kernel", "norm"], "cannot be combined with"),
        (["mine", "--from", "causal_aliby"], "did you mean `causal_alibi`?"),
        (["mine", "--from", "wrong.yaml"], "wrong.yaml:1:9"),
        (["mine", "--kernel", "nonsense"], "nonsense"),
    ],
)
def test_what_is_wrong_writes_nothing(
    folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.yaml").write_text("kernel: nothing\n")
    assert kgen("new", *arguments) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["wrong.yaml"]


def test_a_schema_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "kgen.schema.json").mkdir()
    with pytest.raises(KgenError, match="cannot read"):
        starting.schema_beside(tmp_path)
