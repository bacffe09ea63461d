"""`kgen render` and `kgen adapt` prove kernels before they write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kgen.cli import app
from kgen.kernels.attention.prove import obligations, points
from kgen.kernels.attention.prove.claims import SKIPPED
from kgen.prove import writing
from kgen.prove.obligations import Obligation
from kgen.spec.load import loads

SPEC = """\
kernel: attention
name: own
dtype: bf16
head_dim: 64
mask_mod: q_idx >= kv_idx
passes: [forward]
"""


class Project:
    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys

    def kgen(self, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            app(list(arguments), prog_name="kgen")
        assert isinstance(caught.value.code, int)
        return (caught.value.code, *self.capsys.readouterr())

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / "generated/own/manifest.json").read_text())
        return found


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Project:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/own.yaml").write_text(SPEC)
    return Project(tmp_path, capsys)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One obligation of every spec does not hold."""

    def refuted(*_: Any) -> Iterator[Obligation]:
        import z3

        q = z3.Int("q_idx")
        yield Obligation("forward 64x64", SKIPPED, q < 7, [q >= 0], {"q_idx": q})

    monkeypatch.setattr(obligations, "of_pairs", refuted)


PATHS = [("render",), ("render", "--stdout"), ("render", "--single"), ("adapt", "--for", "hub")]


@pytest.mark.parametrize("path", PATHS)
def test_what_is_refuted_is_not_written(
    project: Project, wrong: None, path: tuple[str, ...]
) -> None:
    before = {*project.root.rglob("*")}
    code, out, err = project.kgen(*path)
    assert (code, out) == (70, "")
    assert err.count("error[refuted]") == 1
    assert (
        "Refuted: forward 64x64: a skipped tile holds no pair that the mask allows: q_idx = " in err
    )
    assert {*project.root.rglob("*")} == before


def test_specs_of_adapters_are_proved(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (project.root / "specs/own.yaml").write_text(SPEC.replace("name: own", "name: mine"))
    proved: list[str] = []
    differences = points.differences
    monkeypatch.setattr(
        points, "differences", lambda one: proved.append(one.folder) or differences(one)
    )
    assert project.kgen("adapt", "--for", "context_parallel")[0] == 0
    assert proved == ["mine_part"]


def test_points_are_compared_without_z3(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "has_z3", lambda: False)
    monkeypatch.setattr(obligations, "of_pairs", lambda one: pytest.fail("z3 is not there"))
    assert project.kgen("render")[0] == 0
    (project.root / "specs/own.yaml").write_text(SPEC.replace(">=", ">"))
    monkeypatch.setattr(points, "_alike", lambda a, b: False)
    code, out, err = project.kgen("render")
    assert (code, out) == (70, "")
    assert "forward: the computed score equals the score of the spec: SQ = " in err


def test_a_plan_that_is_not_the_spec_is_seen_at_points() -> None:
    loaded, other = (loads(SPEC.replace("q_idx >=", f"q_idx + {n} >="), "own.yaml") for n in (3, 4))
    assert [*points.differences(loaded)] == []
    plan = points.plan_attention
    try:
        points.plan_attention = lambda _: plan(other)  # type: ignore[assignment]
        (found,) = points.differences(loaded)
    finally:
        points.plan_attention = plan
    assert "the computed mask equals the mask of the spec" in found


def test_without_a_proof_the_manifest_says_so(project: Project, wrong: None) -> None:
    assert project.kgen("render", "--no-prove")[0] == 0
    assert project.manifest()["proved"] is False
    assert project.kgen("render", "--check")[0] == 0
    assert project.kgen("render")[0] == 70
    assert project.manifest()["proved"] is False


def test_a_proof_takes_that_away(project: Project) -> None:
    project.kgen("render", "--no-prove")
    assert project.manifest()["proved"] is False
    assert project.kgen("render")[0] == 0
    assert "proved" not in project.manifest()


def test_a_result_is_kept_by_what_decides_it(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    differences = points.differences
    monkeypatch.setattr(
        points, "differences", lambda one: asked.append(one.folder) or differences(one)
    )
    for arguments in (
        ("render",),
        ("render",),
        ("render", "--single", "-o", "generated"),
        ("render", "--check"),
    ):
        project.kgen(*arguments)
    assert asked == ["own"]
    (project.root / "specs/own.yaml").write_text(SPEC.replace("64", "128"))
    project.kgen("render")
    assert asked == ["own", "own"]
    for kept in (project.root / ".kgen-cache").glob("*.json"):
        kept.write_text("[]")
    project.kgen("render")
    assert asked == ["own"] * 3


def test_what_is_unknown_is_said(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: Any) -> Iterator[Obligation]:
        yield Obligation("forward 64x64", SKIPPED, beyond="a ring")

    monkeypatch.setattr(obligations, "of_pairs", unknown)
    code, _, err = project.kgen("render")
    assert code == 0
    assert (
        f"not all proved: own: 1 of 1 obligations are unknown, first: forward 64x64: {SKIPPED}"
        in err
    )


def test_families_without_obligations_are_written(project: Project) -> None:
    (project.root / "specs/own.yaml").write_text(
        "kernel: norm\nname: own\nnorm: rms\ndtype: bf16\nwidth: any\n"
    )
    assert project.kgen("render", "--no-prove")[0] == 0
    assert "proved" not in project.manifest()


def test_a_name_of_a_proof_may_be_that_of_a_spec(project: Project) -> None:
    text = SPEC.replace("q_idx >= kv_idx", "q_idx - kv_idx < row and q_idx >= kv_idx")
    (project.root / "specs/own.yaml").write_text(
        text + "params: {row: {type: int, runtime: true}}\n"
    )
    assert project.kgen("render")[0] == 0


@pytest.mark.parametrize("place", ["of_pairs", "differences"])
def test_a_crash_names_the_way_around_it(
    project: Project, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(obligations if place == "of_pairs" else points, place, broken)
    code, _, err = project.kgen("render")
    assert code == 70
    assert (
        "while proving spec `own` (own.yaml): ZeroDivisionError: planted; `--no-prove` writes"
        in err
    )
    assert project.kgen("render", "--no-prove")[0] == 0


def test_a_proof_ends_with_its_time(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Obligations that are left are not looked at, and one line says so."""

    def endless(_: Any) -> Iterator[Obligation]:
        import z3

        while True:
            yield Obligation("forward 64x64", SKIPPED, z3.BoolVal(True))

    monkeypatch.setattr(obligations, "of_pairs", endless)
    monkeypatch.setattr(writing, "BUDGET", 0.25)
    code, _, err = project.kgen("render")
    assert code == 0
    assert err.count("not all proved: own: time is up after 0.25 seconds") == 1
