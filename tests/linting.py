"""What ruff says of emitted files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

RULES = "F811,F821,F823,F841"
"""Names that are defined twice, or not, or not yet, or that nothing reads."""


def wrong_names(files: Iterable[Path]) -> str:
    """Where names are wrong; empty if they are right."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--ignore-noqa"]
    done = subprocess.run([*command, "--select", RULES, *files], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout if done.returncode else ""


def findings(files: Iterable[Path]) -> str:
    """What a repository's own ruff would format or find, with every rule but the one on files that leave it out."""
    ruff, files = [sys.executable, "-m", "ruff"], list(files)
    commands = (
        [*ruff, "format", "--isolated", "--no-cache", "--check", *files],
        [*ruff, "check", "--isolated", "--no-cache", "--select", "ALL", "--ignore", "PGH004", *files],
    )
    done = [subprocess.run(command, capture_output=True, text=True, check=False) for command in commands]
    return "".join(run.stdout for run in done if run.returncode)
