"""A task arrives as it was sent, with its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.running.farm_tasks import Waiting, read

from kgen.verify.farm.packing import Refused, pack, package_digest, unpack
from kgen.verify.farm.tasks import Task


def sent(tmp_path: Path) -> Task:
    folder = tmp_path / "sent"
    (folder / "deeper").mkdir(parents=True)
    (folder / "__pycache__").mkdir()
    for name in ("a.py", "deeper/b.bin", "__pycache__/a.pyc"):
        (folder / name).write_bytes(name.encode() + b"\0\xff")
    return Task(("one",), read, Waiting("n", folder / "deeper/b.bin"), (folder,))


def test_paths_lead_to_what_came_along(tmp_path: Path) -> None:
    task = sent(tmp_path)
    there = unpack(pack(task), tmp_path / "there")
    assert there.job.folder.read_bytes() == b"deeper/b.bin\0\xff"
    assert there.job.folder.is_relative_to(tmp_path / "there")
    files = {
        path.relative_to(there.folders[0]).as_posix() for path in there.folders[0].rglob("*.*")
    }
    assert files == {"a.py", "deeper/b.bin"}
    assert (there.key, there.work, there.job.name) == (task.key, read, "n")


def test_other_paths_stay(tmp_path: Path) -> None:
    task = replace(sent(tmp_path), job=(tmp_path / "elsewhere", Path("a.py")))
    assert unpack(pack(task), tmp_path / "there").job == task.job


def test_what_came_otherwise_is_refused(tmp_path: Path) -> None:
    packed = pack(sent(tmp_path))
    (contents,) = packed.folders
    for other in (
        replace(packed, folders=({**contents, "a.py": b"x"},)),
        replace(packed, folders=({**contents, "c.py": b""},)),
        replace(packed, task=packed.task + b"x"),
    ):
        with pytest.raises(Refused, match="changed on its way"):
            unpack(other, tmp_path / "there")
    assert not (tmp_path / "there").exists()
    assert packed.package == package_digest()
