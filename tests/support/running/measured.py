"""Measurement of a command that runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MEASURING = """
import os, resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
os.write(int(sys.argv[1]), f"{code} {used.ru_utime + used.ru_stime} {used.ru_maxrss}".encode())
"""


@dataclass(frozen=True)
class Measured:
    """Output of a command, its seconds of processor time and its peak memory in bytes."""

    code: int
    out: str
    err: str
    seconds: float
    bytes: int


def measured(
    command: Sequence[str | bytes], folder: Path, environment: Mapping[str, str] | None = None
) -> Measured:
    """Run the command in the folder.

    A small process starts it. On Linux, the peak memory of a process includes the memory of its
    parent, and a test process is large.
    """
    read, write = os.pipe()
    start = [sys.executable, "-I", "-S", "-c", MEASURING, str(write), *command]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            subprocess.run(
                start,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=environment,
                pass_fds=(write,),
                check=True,
            )
        finally:
            os.close(write)
            with open(read) as file:
                line = file.read()
        texts = [file.seek(0) or file.read() for file in (out, err)]
    code, seconds, kilobytes = line.split()
    return Measured(int(code), *texts, float(seconds), int(kilobytes) * 1024)
