"""Stock specs by name, outside of this repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT, Project

from kgen.diagnostics import KgenError
from kgen.render import builtin, manifest, project, writer

STOCK = builtin.root()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(name: str) -> str:
    """Render a spec into `generated/` and return its name in the manifest."""
    made = project.render_all(project.find_specs([Path(name)]), Path("generated"))
    outputs = [output for each in made for output in each.outputs]
    writer.apply(writer.compute_changes(outputs, Path("generated")))
    recorded: str = json.loads(Path(f"generated/{outputs[0].name}/manifest.json").read_text())[
        "spec"
    ]
    return recorded


def test_a_name_means_the_stock_spec(folder: Path) -> None:
    assert project.find_specs([Path("causal_alibi")]) == [STOCK / "causal_alibi.yaml"]
    assert project.find_specs([Path("causal"), Path("rms_norm")]) == [
        STOCK / "causal.yaml",
        STOCK / "rms_norm.yaml",
    ]


def test_a_name_means_the_project_s_own_spec_first(folder: Path) -> None:
    Path("pyproject.toml").write_text('[tool.kgen]\nspecs = "own"\n')
    Path("own").mkdir()
    Path("own/causal.yaml").write_text((STOCK / "causal.yaml").read_text())
    assert project.find_specs([Path("causal")]) == [Path("own/causal.yaml")]


def test_what_there_is_goes_before_a_name(folder: Path) -> None:
    Path("causal").mkdir()
    assert project.find_specs([Path("causal")]) == [STOCK / "causal.yaml"], (
        "a folder of kernels, as with `-o .`"
    )
    Path("causal/x.yaml").write_text("")
    assert project.find_specs([Path("causal")]) == [Path("causal/x.yaml")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("causal_aliby", "did you mean `causal_alibi`?"),
        ("zzzzzz", "`kgen list --builtin` lists stock specs"),
        ("specs/causal.yaml", None),
        ("causal.yaml", None),
    ],
)
def test_a_name_that_nothing_has(folder: Path, name: str, said: str | None) -> None:
    with pytest.raises(KgenError) as caught:
        project.find_specs([Path(name)])
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.hint) == ("no-specs", said)


def test_a_manifest_names_it_alike_on_every_machine(folder: Path) -> None:
    assert written("causal_alibi") == "builtin:causal_alibi"
    there = Path("generated/causal_alibi/triton.py").read_bytes()
    assert there == (ROOT / "generated/causal_alibi/triton.py").read_bytes()
    assert manifest.read(Path("generated/causal_alibi")) is not None
    assert written("rms_norm") == "builtin:rms_norm"
    assert Path("generated/causal_alibi/triton.py").is_file(), (
        "its spec is there, and it is no orphan"
    )


def test_one_that_is_gone_leaves_an_orphan(folder: Path) -> None:
    written("causal")
    path = Path("generated/causal/manifest.json")
    path.write_text(path.read_text().replace("builtin:causal", "builtin:of_another_version"))
    written("rms_norm")
    assert not Path("generated/causal").exists()


def test_in_this_repository_it_has_a_path() -> None:
    assert (
        manifest.relative_spec(STOCK / "causal.yaml", ROOT / "generated/causal")
        == "../../specs/causal.yaml"
    )


def test_list_builtin(project: Project) -> None:
    project.spec("a")
    assert project.kgen("list", "--builtin", "specs").code == 2
