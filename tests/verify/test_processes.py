"""Workers do not outlive the command that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import os, sys, time
from kgen.verify.processes import serve

def main(job, lines):
    (job / str(os.getpid())).touch()
    time.sleep(60)

if __name__ == "__main__":
    serve(main)
"""
COMMAND = """
import signal
import sys
from pathlib import Path
from kgen.verify.processes import WorkerError, messages, threads

# what a shell starts in the background ignores it
signal.signal(signal.SIGINT, signal.default_int_handler)

def run(number):
    try:
        return list(messages("sleeping_worker", Path(sys.argv[1]), 60.0, {}))
    except WorkerError:  # what a verb calls a failure
        Path(sys.argv[1], f"failed-{number}").touch()

with threads(2) as pool:
    list(pool.map(run, range(4)))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_command(how: signal.Signals, tmp_path: Path) -> None:
    if sys.platform != "linux" and how != signal.SIGINT:
        pytest.skip("only Linux tells a process of its parent's end")
    (tmp_path / "sleeping_worker.py").write_text(WORKER)
    begun = tmp_path / "begun"
    begun.mkdir()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(begun)], env=environment, stderr=subprocess.DEVNULL
    )
    _until(lambda: len(os.listdir(begun)) == 2)
    command.send_signal(how)
    assert command.wait(timeout=10) != 0
    _until(lambda: not any(_alive(int(pid)) for pid in os.listdir(begun) if pid.isdigit()))
    # Those that waited never began, and those that were ended have not failed.
    assert len([name for name in os.listdir(begun) if name.isdigit()]) == 2
    assert not list(begun.glob("failed-*"))


def _until(true, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
