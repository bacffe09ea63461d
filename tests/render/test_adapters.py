"""Field `adapters` of a spec: `kgen render` writes the adapters of `kgen adapt` next to the
kernels.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kgen.cli import app
from kgen.diagnostics import KgenError
from kgen.render.project import adapt_all, find_specs, render_all
from kgen.verify.ledger import file_hash, kept, present

SPEC = "kernel: attention\nname: own\ndtype: fp16\nhead_dim: 16\nmask_mod: q_idx >= kv_idx\n"
BOTH = f"{SPEC}adapters: [transformers, hub]\n"


class Folder:
    """A project with one spec."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys
        (root / "specs").mkdir()

    def kgen(self, *arguments: str, spec: str | None = None) -> tuple[int, list[str]]:
        """Run the command. Return its exit code and its output lines."""
        if spec is not None:
            (self.root / "specs/own.yaml").write_text(spec)
        with pytest.raises(SystemExit) as caught:
            app(list(arguments), prog_name="kgen")
        out, err = self.capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, (err + out).splitlines()

    def tree(self, folder: str) -> dict[str, str]:
        base = self.root / folder
        there = (path for path in sorted(base.rglob("*")) if path.is_file())
        return {path.relative_to(base).as_posix(): path.read_text() for path in there}


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path, capsys)


def test_they_are_the_files_of_adapt_beside_the_same_kernels(folder: Folder) -> None:
    assert folder.kgen("render", "-o", "plain", spec=SPEC)[0] == 0
    assert folder.kgen("render", spec=BOTH)[0] == 0
    assert folder.kgen("adapt", "--for", "transformers", "--for", "hub", "-o", "apart")[0] == 0
    plain, apart = folder.tree("plain"), folder.tree("apart")
    assert "own/triton.py" in plain
    assert {"own_transformers/own_cached/triton.py", "own_hub/build.toml"} <= {*apart}
    assert folder.tree("generated") == plain | apart


def test_check_and_the_cache_see_what_is_missing(folder: Folder) -> None:
    folder.kgen("render", spec=BOTH)
    code, lines = folder.kgen("render", "--check")
    assert (code, len(lines)) == (0, 1)
    assert [
        one.spec_text for one in render_all(find_specs([]), Path("generated"), cached=True)
    ] == [None]
    for lost in ("own_transformers/own/triton.py", "own_hub/build.toml"):
        (folder.root / "generated" / lost).unlink()
        code, lines = folder.kgen("render", "--check")
        assert (code, lines[0]) == (1, f"new: generated/{lost}")
        assert f"+++ b/generated/{lost}" in folder.kgen("render", "--diff")[1]
        assert folder.kgen("render")[1][0] == f"new: generated/{lost}"
        assert folder.kgen("render", "--check")[0] == 0


def test_what_a_repository_starts_with_is_the_users(folder: Folder) -> None:
    folder.kgen("render", spec=BOTH)
    card = folder.root / "generated/own_hub/CARD.md"
    card.write_text("mine\n")
    assert folder.kgen("render", "--check")[0] == 0
    package = folder.root / "generated/own_hub/torch-ext/own/_kernels/triton.py"
    package.write_text(package.read_text() + "# mine\n")
    assert "error[edited]" in folder.kgen("render", spec=BOTH.replace("fp16", "bf16"))[1][0]
    assert folder.kgen("render", "--force")[0] == 0
    assert card.read_text() == "mine\n"


def test_what_is_listed_no_more_is_pruned(folder: Folder) -> None:
    folder.kgen("render", spec=BOTH)
    code, lines = folder.kgen("render", spec=BOTH.replace(", hub", ""))
    deleted = (
        "deleted: generated/own_hub/torch-ext/own/__init__.py (its spec makes `own`, "
        "`own_transformers`)"
    )
    assert deleted in lines
    assert code == 0
    left = {name for name in folder.tree("generated") if name.startswith("own_hub")}
    (adapted,) = adapt_all([folder.root / "specs/own.yaml"], ["hub"])
    assert left == {*adapted.started}


def test_where_some_targets_are_asked_for_they_stay(folder: Folder) -> None:
    folder.kgen("render", spec=BOTH)
    before = folder.tree("generated")
    code, lines = folder.kgen("render", "--target", "triton", spec=BOTH.replace("fp16", "bf16"))
    assert (code, lines[-1][-10:]) == (0, " 0 deleted")
    after = folder.tree("generated")
    assert {name.partition("/")[0] for name in before if after.get(name) != before[name]} == {"own"}
    assert folder.kgen("render", "--single", "-o", "single")[0] == 0
    assert [*folder.tree("single")] == ["own.py"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (f"{BOTH}varlen: true\n", [("its sequences are packed", 6, 12)]),
        (BOTH.replace("[", "\n  - ").replace(", ", "\n  - ").replace("]\n", "\npasses: [decode]\n"),
         [("it has no pass `forward`", 7, 5)]),
        (f"{SPEC}passes: [forward]\npaged_kv: {{page_size: 16}}\n"
         "adapters: [context_parallel, hub]\n",
         [("its keys are in pages", 8, 12),
          ("`--for hub` does not support specs of caches", 8, 30)]),
    ],
)  # fmt: skip
def test_one_that_does_not_fit_is_said_where_it_is_listed(
    spec: str, said: list[tuple[str, int, int]], folder: Folder
) -> None:
    code, _ = folder.kgen("render", spec=spec)
    assert code == 2
    assert not (folder.root / "generated").exists()
    with pytest.raises(KgenError) as caught:
        render_all([Path("specs/own.yaml")], Path("generated"))
    found = caught.value.diagnostics
    assert [(d.line, d.column) for d in found] == [(line, column) for _, line, column in said]
    assert all(words in d.message and d.hint for d, (words, *_) in zip(found, said, strict=True))


def test_one_that_is_only_asked_for_is_said_of_the_file(folder: Folder) -> None:
    path = folder.root / "specs/own.yaml"
    path.write_text(f"{SPEC}varlen: true\nadapters: [hub]\n")
    with pytest.raises(KgenError) as caught:
        adapt_all([path], ["hub", "transformers"])
    assert [(d.line, d.column) for d in caught.value.diagnostics] == [(1, 1)]


def test_the_ledger_names_the_kernels_and_not_their_copies(folder: Folder) -> None:
    folder.kgen("render", spec=BOTH)
    generated = folder.root / "generated"
    own, copy = generated / "own/triton.py", generated / "own_transformers/own/triton.py"
    assert file_hash(own) == file_hash(copy)
    records = {file_hash(own): {"file": "own/triton.py", "records": {"cpu": {}}}}
    assert kept(records, present(generated)) == records
    shutil.rmtree(own.parent)
    assert (
        kept(records, present(generated))[file_hash(copy)]["file"]
        == "own_transformers/own/triton.py"
    )
