"""Files that anybody may have put there: pipes, devices, gigabytes, brackets without end, names
that are no text.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from conftest import Project

from kgen import files
from kgen.diagnostics import Diagnostic, KgenError
from kgen.render import cache, manifest, writer
from kgen.render.writer import Output
from kgen.verify import ledger

DEEP = "[" * 100_000 + "]" * 100_000


def refused(work: object, *arguments: object) -> Diagnostic:
    assert callable(work)
    with pytest.raises(KgenError) as caught:
        work(*arguments)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.hint
    return diagnostic


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(4 << 30)


def test_no_more_is_read_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "large"
    sparse(path)
    assert len(files.read(path, 1000)) == 1001


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(OSError, match="directory" if kind == "folder" else "not a regular file"):
        files.read(path)


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ('{"a":\n  x}', (2, 3), "this is not JSON"),
        (b'{\n"\xc3\xa9\xff"}', (2, 3), "byte 0xff is not UTF-8"),
        ('{"[[[": "\\"[",\n' + '"é": ' + DEEP, (2, 6 + 63), "nests more than 64 levels deep"),
        ("9" * 5000, (1, 1), "this is not JSON"),
        ("", (1, 1), "this is not JSON"),
    ],
)
def test_what_is_wrong_with_json_has_a_place(
    tmp_path: Path, text: str | bytes, place: tuple[int, int], message: str
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = refused(files.read_json, path, "bad-x", "remove it")
    assert (found.code, found.file, (found.line, found.column)) == ("bad-x", str(path), place)
    assert message in found.message


def test_the_error_of_a_folder_names_it(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        files.read(tmp_path)
    assert os.fspath(caught.value.filename) == str(tmp_path)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let the system refuse every file of more than 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("old", ["", "kept"])
def test_a_new_file_on_a_full_disk(tmp_path: Path, old: str) -> None:
    """A file is written as a whole, or stays as it was."""
    path = tmp_path / "new.yaml"
    if old:
        path.write_text(old)
    with full_disk():
        found = refused(partial(files.write_new, force=True), path, "x" * 2000, "rename it")
    assert (found.code, found.file) == ("cannot-write", path.as_posix())
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == (
        {"new.yaml": old} if old else {}
    )


def test_a_new_file_keeps_a_link_and_its_mode(tmp_path: Path) -> None:
    link, path = tmp_path / "link", tmp_path / "real"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to(path)
    files.write_new(link, "new", "", force=True)
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)


def test_a_new_file_may_be_a_device(tmp_path: Path) -> None:
    files.write_new(Path(os.devnull), "new", "", force=True)
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize(
    "text",
    [DEEP, '{"spec": "a\\u0000b", "files": {}}', '{"spec": "a", "files": {"\\ud800": ""}}', None],
)
def test_a_manifest_that_neither_kgen_nor_a_merge_writes(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / manifest.MANIFEST
    sparse(path) if text is None else path.write_text(text)
    found = refused(manifest.read, tmp_path)
    assert (found.code, found.file, found.line) == ("bad-manifest", str(path), 1)


def test_a_manifest_of_a_spec_of_any_name(tmp_path: Path) -> None:
    spec = "../a\nb\udcff.yaml"
    (tmp_path / manifest.MANIFEST).write_text(manifest.Manifest(spec, {}).text())
    found = manifest.read(tmp_path)
    assert found is not None
    assert found.spec == spec


@pytest.mark.parametrize(
    "text",
    [
        *(DEEP, "<<", "[]", "null", '{"files": {"x": 1}}', '{"files": {"x": {"records": [1]}}}'),
        *(
            '{"files": {"x": {"records": {"d": {"worst": 1}}}}}',
            '{"files": {"x": {"records": {"d": 1}}}}',
        ),
        *('{"files": {"x": {"records": {"d": {"worst": {"out": {}}}}}}}', b"\xff\xfe", None),
    ],
)
def test_a_ledger_that_is_none(tmp_path: Path, text: str | bytes | None) -> None:
    path = tmp_path / ledger.FILENAME
    path.mkdir() if text is None else path.write_bytes(
        text if isinstance(text, bytes) else text.encode()
    )
    found = refused(ledger.read, tmp_path)
    assert (found.code, found.file, found.line) == ("bad-ledger", str(path), 1)
    assert found.message.startswith("cannot read the ledger: ")


def entry(generated: Path) -> tuple[Path, Path]:
    """A spec, and the place of its entry in the cache."""
    spec = generated.parent / "a.yaml"
    spec.write_text("name: a\n")
    cache.store([Output(spec, "a", {})], "name: a\n", generated)
    (path,) = (generated.parent / ".kgen-cache").glob("*.json")
    assert cache.lookup(spec, generated) is not None
    return spec, path


def test_the_cache_is_deep_or_no_folder(tmp_path: Path) -> None:
    generated = tmp_path / "generated"
    spec, path = entry(generated)
    path.write_text("<<")
    assert cache.lookup(spec, generated) is None, "it can be deleted at any time"
    path.write_text(DEEP)
    assert refused(cache.lookup, spec, generated).code == "bad-cache"
    for inside in path.parent.iterdir():
        inside.unlink()
    path.parent.rmdir()
    path.parent.touch()
    assert refused(cache.lookup, spec, generated).code == "bad-cache"


def test_the_cache_of_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    entry(folder / "generated")


@pytest.mark.parametrize("kind", ["pipe", "gigabytes"])
def test_an_emitted_file_that_is_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "generated/a/k.py"
    path.parent.mkdir(parents=True)
    sparse(path) if kind == "gigabytes" else os.mkfifo(path)
    made = Output(tmp_path / "a.yaml", "a", {"k.py": "x = 1\n"})
    with pytest.raises(KgenError) as caught:
        writer.compute_changes([made], tmp_path / "generated")
    assert caught.value.diagnostics[0].file == str(path)


def test_as_a_command(project: Project) -> None:
    project.spec("a")
    cached = project.root / ".kgen-cache"
    cached.touch()
    run = project.kgen("render")
    assert (run.code, run.out) == (2, "")
    assert "error[bad-cache]" in run.err
    assert not (project.root / "generated").exists()
    cached.unlink()
    for arguments in (("render", "-o", os.fsdecode(b"\xff")), ("list", os.fsdecode(b"\xff.yaml"))):
        run = project.kgen(*arguments)
        assert (run.code, run.out) == (2, "")
        assert re.search(r"--> \\udcff(\.yaml)?:1:1\n", run.err)
    assert project.kgen("render").code == 0
    project.file("a/manifest.json").write_text(
        '{"spec": "\\u001b]0;\\ud800.yaml", "files": {"k.py": "0"}}'
    )
    assert project.kgen("render", "--check").code == 2
    project.file("a/manifest.json").write_text(DEEP)
    run = project.kgen("render", "--check")
    assert (run.code, run.out) == (2, "")
    assert "generated/a/manifest.json:1:65" in run.err


def test_a_killed_write_leaves_no_temporary_file_for_ever(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f".spec.yaml.{ended.pid}-01234567.tmp"
    left.write_text("half")
    files.write_new(tmp_path / "spec.yaml", "whole\n", "choose another name")
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


def test_temporary_files_in_the_cache_are_deleted(project: Project) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    cached = project.root / ".kgen-cache"
    project.spec("a")
    cached.mkdir()
    (cached / ".gitignore").touch()  # killed before it was written
    left = cached / f".a.json.{ended.pid}-01234567.tmp"
    left.write_text("half")
    assert project.kgen("render").code == 0
    assert not left.exists()
    assert (cached / ".gitignore").read_text() == "*\n"
