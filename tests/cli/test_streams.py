"""Streams that accept no data or lack characters; paths that the system cannot open; usage errors
as JSON.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from kgen.cli import app, terminal
from kgen.cli.terminal import Format

SPEC = "kernel: norm\nname: sample\nnorm: rms\nwidth: any\ndtype: bf16\nsummary: Größe ✓\n"
LONG = "a" * 5000


def run(folder: Path, shell: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell command in a folder. The word `kgen` stands for the command."""
    kgen = f'"{sys.executable}" -m kgen'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    line = ["bash", "-c", f"set -o pipefail; {shell.replace('kgen', kgen)}"]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, timeout=120)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "sample.yaml").write_text(SPEC, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("kgen list > /dev/full", 2, b"cannot write to stdout: No space left on device"),
        ("kgen --help > /dev/full", 2, b"cannot write to stdout: No space left on device"),
        ("kgen list nothing 2> /dev/full", 2, b""),
        ("kgen list >&-", 0, b""),
        ("kgen list nothing >&- 2>&-", 2, b""),
        ("kgen --help | true", 141, b""),
    ],
)
def test_a_stream_that_takes_nothing(folder: Path, shell: str, code: int, said: bytes) -> None:
    result = run(folder, shell, PYTHONUNBUFFERED="1" if "help" in shell else "")
    assert (result.returncode, result.stdout) == (code, b"")
    assert said in result.stderr
    assert bool(said) == bool(result.stderr)
    assert b"Traceback" not in result.stderr


def test_no_file_takes_the_place_of_a_closed_stdout(folder: Path) -> None:
    assert run(folder, "kgen render >&-").returncode == 0
    for path in (folder / "generated").rglob("*"):
        assert not path.is_file() or b"rendered" not in path.read_bytes().splitlines()[-1]
    assert run(folder, "kgen render --check").returncode == 0


def test_characters_that_stdout_lacks(folder: Path) -> None:
    """Output for people has escapes. The text of a file is UTF-8, like the file itself."""
    result = run(folder, "kgen list && kgen render --stdout", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    listed, _, source = result.stdout.partition(b"1 spec\n")
    assert rb"Gr\xf6\xdfe \u2713" in listed
    run(folder, "kgen render --single -o single")
    assert source == (folder / "single" / "sample.py").read_bytes()
    assert "Größe ✓".encode() in source


@pytest.mark.parametrize(
    "arguments",
    [
        ["render", LONG],
        ["explain", f"{LONG}.yaml"],
        ["import", LONG, "--score", "x"],
        ["import", f"folder/{LONG}.py", "--score", "x"],
        ["new", "sample", "--from", LONG],
        ["render", "-o", LONG],
        ["status", "--generated", "folder/" * 1000],
        ["status", "--why", LONG],
        ["ledger", "merge", LONG],
        ["adapt", LONG, "--for", "hub"],
    ],
    ids=lambda words: " ".join(words)[:24],
)
def test_a_path_that_is_too_long(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(arguments, prog_name="kgen")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("error[bad-path]: the path is longer than the system allows")
    assert "hint: " in err
    assert len(err) < 500


@pytest.mark.parametrize(
    "words",
    [
        *(
            "import loop --score x",
            "import loop/x.py --score x",
            "import loop.x --score x",
            "render loop",
        ),
        *("render loop/x.yaml", "render -o loop", "render -o loop/x", "explain sample -o loop/x"),
        *(
            "ledger merge loop",
            "status --generated loop",
            "status --why loop/x.py",
            "new one --from loop",
        ),
    ],
)
def test_a_loop_of_links(words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "loop").symlink_to("loop")
    with pytest.raises(SystemExit) as ended:
        app(words.split(), prog_name="kgen")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("error["), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [["render", "-o", ""], ["explain", ""], ["new", ""], ["render", ""]]
)
def test_an_empty_word(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty path means the working directory, and `render` would treat its files as its own."""
    with pytest.raises(SystemExit) as ended:
        app(arguments, prog_name="kgen")
    assert ended.value.code == 2
    assert "expected a value, got an empty argument" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["specs"]


@pytest.mark.parametrize(
    "arguments", ["rendr --format json", "--format=json render --no-such", "list --format json x"]
)
def test_every_error_is_json_where_that_is_asked_for(folder: Path, arguments: str) -> None:
    result = run(folder, f"kgen {arguments}")
    assert (result.returncode, result.stdout) == (2, b"")
    said = json.loads(result.stderr)
    assert {"code", "message", "hint"} <= said.keys()


def test_what_the_system_refuses_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "generated/x.py")

    def forget() -> int:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "templates/x.j2")

    assert terminal.guarded(refuse, Format.TEXT) == 2
    assert (
        "operating system error: Read-only file system\n --> generated/x.py"
        in capsys.readouterr().err
    )
    assert terminal.guarded(forget, Format.TEXT) == 70
