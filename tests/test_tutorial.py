"""The commands of the tutorial run in an empty repository, and print the outputs on the page.

KGEN_UPDATE_GOLDEN=1 writes the outputs of the page anew, if more than figures and versions differ.
With `--all` the blocks that the page marks as slow run as well.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PAGE = ROOT / "docs/tutorial.md"
FILE = re.compile(r"^```python\n(?=# (\w+\.py)\n)(.*?)^```", re.DOTALL | re.MULTILINE)
EXCERPT = re.compile(r"^<!-- from: (\S+) -->\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
STEP = re.compile(
    r"(?P<slow><!-- slow -->\n)?```sh\n(?P<commands>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?",
    re.DOTALL,
)
ELISION = re.compile(r"^\.\.\.\n", re.MULTILINE)


def comparable(text: str) -> str:
    """The text without figures, versions and alignment, which differ between machines."""
    return re.sub(r"[ \t]+", " ", re.sub(r"\d+\.\d[\d.]*(e[-+]\d+)?(\+\w+)?", "#", text))


def without_numbers(line: str) -> str:
    """The line as it is searched for, so that an update finds it although a count has changed."""
    return re.sub(r"\d+", "0", comparable(line))


def shown(page: str, output: str) -> str:
    """The part of an output that a block of the page shows: the page's own text if they agree."""
    if comparable(page) == comparable(output):
        return page
    if not ELISION.search(page):
        return output
    lines, at, parts = output.splitlines(keepends=True), 0, []
    for part in ELISION.split(page):
        if part:
            known = [without_numbers(line) for line in lines[at:]]
            first = without_numbers(part.splitlines(keepends=True)[0])
            assert first in known, f"{first!r} is not in the output:\n{output}"
            at += known.index(first)
            own = "".join(lines[at : at + part.count("\n")])
            at += part.count("\n")
            parts.append(part if comparable(part) == comparable(own) else own)
        else:
            parts.append("")
    return "...\n".join(parts)


def flush(code: str) -> str:
    """The lines without their indentation."""
    return re.sub(r"^ +", "", code, flags=re.MULTILINE)


def run(commands: str, folder: Path) -> str:
    """The output of a block of commands, with `kgen` and `python` those of this interpreter."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    names = {
        f"GIT_{role}_{part}": "kgen@localhost"
        for role in ("AUTHOR", "COMMITTER")
        for part in ("NAME", "EMAIL")
    }
    process = subprocess.run(
        ["sh", "-e", "-c", commands],
        cwd=folder,
        env={
            **os.environ,
            **names,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


def follow(folder: Path, slow: bool) -> str:
    """Follow the tutorial in a folder, and return the page with the outputs that the commands
    have.
    """
    text = PAGE.read_text(encoding="utf-8")
    for name, code in FILE.findall(text):
        (folder / name).write_text(code, encoding="utf-8")
    run("git init -q", folder)

    def step(match: re.Match[str]) -> str:
        commands = match["commands"]
        if "path/to/" in commands or (match["slow"] and not slow):
            return match[0]
        output = run(commands, folder)
        if match["output"] is None:
            assert not output, output
            return match[0]
        return match[0].replace(
            f"```text\n{match['output']}", f"```text\n{shown(match['output'], output)}"
        )

    text = STEP.sub(step, text)
    for name, code in EXCERPT.findall(text):
        assert flush(code) in flush((folder / name).read_text(encoding="utf-8")), name
    return text


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_tutorial(slow: bool, tmp_path: Path) -> None:
    followed = follow(tmp_path, slow)
    if os.environ.get("KGEN_UPDATE_GOLDEN") == "1":
        PAGE.write_text(followed, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == followed
