"""Changes on disk: drift, edits, orphans, and never a partial result."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
from conftest import Project

from kgen import __version__
from kgen.diagnostics import KgenError
from kgen.render import header, manifest, writer
from kgen.render.writer import Output
from kgen.spec.user_text import UserText


def stamped(body: str, name: str = "a", mark: str = "#") -> str:
    return header.stamp(
        body, mark, spec=name, spec_file=UserText(f"{name}.yaml"), inputs="0" * 16, spdx=None
    )


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    (tmp_path / "specs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "specs" / f"{name}.yaml").write_text(f"name: {name}\n")
    return tmp_path / "generated"


def output(generated: Path, name: str = "a", *, spec: str | None = None, **bodies: str) -> Output:
    files = {
        f"{stem}.py": stamped(body, name) for stem, body in (bodies or {"k": "x = 1\n"}).items()
    }
    return Output(generated.parent / "specs" / f"{spec or name}.yaml", name, files)


def write(generated: Path, *outputs: Output, force: bool = False) -> dict[str, str]:
    """Apply the changes and return the state of each path."""
    changes = writer.compute_changes(outputs, generated)
    writer.apply(changes, force=force)
    return {change.path.relative_to(generated).as_posix(): change.state for change in changes}


def test_header_is_read_back() -> None:
    text = header.stamp(
        "x = 1\n",
        "#",
        spec="a",
        spec_file=UserText("a.yaml"),
        inputs="0" * 16,
        spdx=UserText("MIT"),
    )
    assert text.splitlines()[1] == "# SPDX-License-Identifier: MIT"
    assert header.body_hash(text) == header.digest("x = 1\n")
    assert header.is_untouched(text)
    assert header.is_untouched(text.replace("\n", "\r\n"))
    assert not header.is_untouched(text + " ")
    assert header.body_hash("x = 1\n") is None


@pytest.mark.parametrize(
    ("mark", "said"), [("#", ["fmt: off", "ruff: noqa"]), ("//", ["clang-format off"])]
)
def test_tools_are_asked_to_leave_it_as_it_is(mark: str, said: list[str]) -> None:
    text = stamped("x = 1\n", mark=mark)
    asked = [f"{mark} {line}" for line in said]
    assert text.splitlines()[1:-3] == asked
    older = "".join(line for line in text.splitlines(keepends=True) if line.rstrip() not in asked)
    assert header.is_untouched(older), "what an older version wrote is not an edit"


def test_headers_of_older_versions_are_read() -> None:
    for text in (stamped("x = 1\n"), header.stamp_shared("x = 1\n", "#", inputs="0", spdx=None)):
        older = re.sub(r"^# (inputs|body) \([^)]*\):", r"# \1:", text, flags=re.MULTILINE)
        assert older.splitlines()[-3].startswith("# inputs: ")
        assert older.splitlines()[-2] == f"# body: {header.digest('x = 1' + chr(10))}"
        assert header.is_untouched(older)
        assert header.inputs_hash(older) == header.inputs_hash(text)


def test_new_then_unchanged_then_changed(generated: Path) -> None:
    assert write(generated, output(generated)) == {"a/k.py": "new", "a/manifest.json": "new"}
    assert json.loads((generated / "a/manifest.json").read_text())["spec"] == "../../specs/a.yaml"
    assert write(generated, output(generated)) == {
        "a/k.py": "unchanged",
        "a/manifest.json": "unchanged",
    }
    assert write(generated, output(generated, k="x = 2\n"))["a/k.py"] == "changed"
    assert (generated / "a/k.py").read_text().endswith("x = 2\n")


def test_a_file_that_the_spec_no_longer_makes_is_pruned(generated: Path) -> None:
    write(generated, output(generated, k="x = 1\n", old="y = 1\n"))
    assert write(generated, output(generated))["a/old.py"] == "pruned"
    assert not (generated / "a/old.py").exists()
    assert "old.py" not in (generated / "a/manifest.json").read_text()


@pytest.mark.parametrize("broken", ["", "<<<<<<< ours\n", "[]", '{"spec": 1, "files": 2}'])
def test_without_a_readable_manifest_headers_tell_what_is_ours(
    generated: Path, broken: str
) -> None:
    write(generated, output(generated, k="x = 1\n", old="y = 1\n"))
    (generated / "a/manifest.json").write_text(broken)
    (generated / "a/mine.py").write_text("mine = 1\n")
    states = write(generated, output(generated))
    assert states["a/old.py"] == "pruned"
    assert states["a/manifest.json"] == "changed"
    assert (generated / "a/mine.py").exists()


def test_what_another_process_is_writing_is_not_pruned(generated: Path) -> None:
    (generated / "a").mkdir(parents=True)
    halfway = generated / f"a/.k.py.{os.getpid()}-01234567.tmp"
    halfway.write_text(stamped("x = 1\n"))
    write(generated, output(generated))
    assert halfway.exists()


def dead_process() -> int:
    """Return the number of a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_temporary_files_of_a_killed_process_are_deleted(generated: Path) -> None:
    write(generated, output(generated))
    dead, alive = (generated / f"a/.k.py.{n}-01234567.tmp" for n in (dead_process(), os.getpid()))
    old, foreign = generated / f"a/.old.py.{os.getpid()}-89abcdef.tmp", generated / "a/.mine.1.tmp"
    for path in (dead, alive, old, foreign):
        path.write_text("x")
    os.utime(old, (0, 0))
    write(generated, output(generated))
    assert [p.exists() for p in (dead, alive, old, foreign)] == [False, True, False, True]


def test_a_folder_with_only_temporary_files_is_deleted(generated: Path) -> None:
    write(generated, output(generated), output(generated, "b"))
    (generated / f"b/.k.py.{dead_process()}-01234567.tmp").write_text("x")
    (generated.parent / "specs/b.yaml").unlink()
    write(generated, output(generated))
    assert not (generated / "b").exists()


def test_a_single_file_keeps_temporary_files_of_others(tmp_path: Path) -> None:
    """The folder is the user's."""
    made = output(tmp_path)
    own, other = (tmp_path / f".{name}.{dead_process()}-01234567.tmp" for name in ("k.py", "b.py"))
    for path in (own, other):
        path.write_text("x")
    writer.apply(writer.compute_single_changes([made], tmp_path))
    assert [path.exists() for path in (own, other)] == [False, True]


def test_an_edited_file_stops_everything(generated: Path) -> None:
    write(generated, output(generated), output(generated, "b"))
    edited = generated / "a/k.py"
    edited.write_text(edited.read_text() + "# mine\n")
    with pytest.raises(KgenError) as caught:
        write(generated, output(generated, k="x = 2\n"), output(generated, "b", k="x = 2\n"))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.file == str(edited)
    assert caught.value.exit_code == 1
    assert "# mine" in edited.read_text()
    assert "x = 1" in (generated / "b/k.py").read_text()
    write(generated, output(generated), output(generated, "b"), force=True)
    assert "# mine" not in edited.read_text()


def test_an_edited_orphan_is_kept(generated: Path) -> None:
    write(generated, output(generated), output(generated, "b"))
    orphan = generated / "b/k.py"
    orphan.write_text(orphan.read_text().replace("x", "y"))
    (generated.parent / "specs/b.yaml").unlink()
    with pytest.raises(KgenError, match="edited by hand"):
        write(generated, output(generated))
    assert orphan.exists()
    write(generated, output(generated), force=True)
    assert not orphan.parent.exists()


def test_a_file_without_our_header_is_never_taken(generated: Path) -> None:
    (generated / "a").mkdir(parents=True)
    (generated / "a/k.py").write_text("x = 1\n")
    with pytest.raises(KgenError, match="no header"):
        write(generated, output(generated))
    assert (generated / "a/k.py").read_text() == "x = 1\n"


def test_a_link_is_not_written_through(generated: Path) -> None:
    elsewhere = generated.parent / "elsewhere.py"
    elsewhere.write_text(stamped("x = 0\n"))
    (generated / "a").mkdir(parents=True)
    (generated / "a/k.py").symlink_to(elsewhere)
    with pytest.raises(KgenError, match="symbolic link"):
        write(generated, output(generated))
    write(generated, output(generated), force=True)
    assert elsewhere.read_text() == stamped("x = 0\n")
    assert not (generated / "a/k.py").is_symlink()


def test_a_linked_directory_is_refused(generated: Path) -> None:
    (generated.parent / "elsewhere").mkdir()
    generated.mkdir()
    (generated / "a").symlink_to(generated.parent / "elsewhere")
    with pytest.raises(KgenError, match="symbolic link"):
        write(generated, output(generated), force=True)


@pytest.mark.parametrize("name", ["../a", "a/b/c/d/e/f", "a/b.c", "a/..", "a/", "", ".."])
def test_a_name_never_leads_out(generated: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        writer.compute_changes([Output(generated.parent / "specs/a.yaml", name, {})], generated)


def test_a_manifest_never_leads_out(generated: Path) -> None:
    write(generated, output(generated))
    victim = generated / "victim.py"
    victim.write_text(stamped("x = 1\n"))
    (generated / "a/manifest.json").write_text(
        json.dumps({"spec": "../../specs/gone.yaml", "files": {"../victim.py": "", "k.py": ""}})
    )
    write(generated)
    assert victim.exists()
    assert not (generated / "a").exists()


def test_foreign_files_and_the_ledger_stay(generated: Path) -> None:
    write(generated, output(generated), output(generated, "b"))
    (generated / "verified.json").write_text("{}")
    (generated / "b/notes.md").write_text("mine")
    (generated.parent / "specs/b.yaml").unlink()
    assert write(generated, output(generated))["b/k.py"] == "pruned"
    assert sorted(p.name for p in (generated / "b").iterdir()) == ["notes.md"]
    assert (generated / "verified.json").exists()


def test_two_specs_of_one_name(generated: Path) -> None:
    both = [output(generated), output(generated, "a", spec="b")]
    with pytest.raises(KgenError, match="belongs to"):
        writer.compute_changes(both, generated)
    write(generated, both[0])
    with pytest.raises(KgenError, match="belongs to") as caught:
        writer.compute_changes(both[1:], generated)
    assert caught.value.exit_code == 2


def test_a_spec_file_that_moved_takes_its_directory_along(generated: Path) -> None:
    write(generated, output(generated))
    (generated.parent / "specs/a.yaml").unlink()
    assert write(generated, output(generated, "a", spec="b"))["a/k.py"] == "unchanged"
    assert "b.yaml" in (generated / "a/manifest.json").read_text()


def test_a_spec_that_was_renamed_leaves_nothing_behind(generated: Path) -> None:
    write(generated, output(generated))
    states = write(generated, output(generated, "c", spec="a"))
    assert states == {
        "c/k.py": "new",
        "c/manifest.json": "new",
        "a/k.py": "pruned",
        "a/manifest.json": "pruned",
    }


def test_some_targets_leave_the_rest_alone(generated: Path) -> None:
    write(generated, output(generated, k="x = 1\n", other="y = 1\n"))
    part = output(generated, k="x = 2\n")
    write(generated, Output(part.spec, part.name, part.files, whole=False))
    recorded = manifest.read(generated / "a")
    assert recorded is not None
    assert sorted(recorded.files) == ["k.py", "other.py"]
    assert (generated / "a/other.py").exists()


def test_a_write_that_fails_leaves_everything_as_it_was(
    generated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(generated, output(generated))
    before = (generated / "a/k.py").read_bytes()
    real, calls = Path.write_bytes, []

    def full(path: Path, data: bytes) -> int:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(path))
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(KgenError, match="No space"):
        write(generated, output(generated, k="x = 2\n", more="y = 1\n"))
    assert (generated / "a/k.py").read_bytes() == before
    assert sorted(p.name for p in (generated / "a").iterdir()) == ["k.py", "manifest.json"]


def test_the_error_of_a_full_disk_names_a_file(generated: Path) -> None:
    """The system's error of a write has no path."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(KgenError) as caught:
            write(generated, output(generated, k="x" * 2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.diagnostics[0].file == str(generated / "a/k.py")
    assert not list(generated.rglob("*.*"))


def test_files_get_the_ordinary_mode(generated: Path) -> None:
    write(generated, output(generated))
    umask = os.umask(0)
    os.umask(umask)
    assert (generated / "a/k.py").stat().st_mode & 0o777 == 0o666 & ~umask


def test_concurrent_renders_leave_whole_files(project: Project) -> None:
    for name in "abcd":
        project.spec(name, "cuda: yes\n")
    runs = [project.start("render", "--force") for _ in range(3)]
    runs += [project.start("render", "specs/a.yaml"), project.start("render", "specs/d.yaml")]
    for run in runs:
        _, err = run.communicate(timeout=60)
        assert run.returncode == 0, err
    assert project.kgen("render", "--check").code == 0
    assert not [path for path in project.tree() if path.endswith(".tmp")]


def test_concurrent_prunes(project: Project) -> None:
    specs = [project.spec(f"s{i}") for i in range(30)]
    project.spec("kept")
    project.kgen("render")
    for spec in specs:
        spec.unlink()
    runs = [project.start("render") for _ in range(3)]
    for run in runs:
        _, err = run.communicate(timeout=60)
        assert run.returncode == 0, err
    assert sorted(project.tree()) == ["kept/fake.py", "kept/manifest.json"]


@pytest.mark.parametrize("line", ['  "kgen": "0.0.1",\n', ""], ids=["another", "none"])
def test_a_manifest_of_another_version_is_no_change(generated: Path, line: str) -> None:
    write(generated, output(generated))
    path = generated / "a/manifest.json"
    text = path.read_text().replace(f'  "kgen": "{__version__}",\n', line)
    path.write_text(text)
    assert set(write(generated, output(generated)).values()) == {"unchanged"}
    assert path.read_text() == text
    write(generated, output(generated, k="x = 2\n"))
    assert f'"kgen": "{__version__}"' in path.read_text()
