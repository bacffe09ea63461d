"""Worker processes. A crash, a hang or wrong output of a worker does not affect the caller."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn

import kgen

PR_SET_PDEATHSIG = 1
_running: set[subprocess.Popen[bytes]] = set()
_ended = threading.Event()


class WorkerError(Exception):
    """A worker that died, timed out, or wrote something that is not a result."""


@contextlib.contextmanager
def threads(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Yield threads that each run one worker at a time.

    An interrupt ends the workers, and no other worker starts. Such a worker has not failed: the
    thread that waits for its `messages` is interrupted, too.
    """
    try:
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            try:
                yield pool
            except BaseException:
                _ended.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(_running):
                    _kill(process)
                raise
    finally:
        _ended.clear()


def _kill(process: subprocess.Popen[bytes]) -> None:
    # End the whole group: a compiler of the worker must not outlive it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def messages(
    module: str,
    job: object,
    timeout: float,
    environment: Mapping[str, str | None],
    under: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Run `python -m module JOB` and yield the JSON objects that it prints, one per line.

    `timeout` is in seconds, and restarts with every line. `environment` is added to the environment
    of this process; `None` removes a variable. `under` is a command that runs the worker. Raises
    `WorkerError` with the end of the worker's standard error if it fails, and `KeyboardInterrupt`
    if `threads` were interrupted.
    """
    try:
        if not _ended.is_set():
            yield from _messages(module, job, timeout, environment, under)
    except WorkerError:
        if not _ended.is_set():
            raise
    if _ended.is_set():
        raise KeyboardInterrupt


def _messages(
    module: str,
    job: object,
    timeout: float,
    environment: Mapping[str, str | None],
    under: Sequence[str],
) -> Iterator[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="kgen-") as folder,
        open(f"{folder}/stderr", "w+b") as stderr,
    ):
        path = Path(folder) / "job"
        path.write_bytes(pickle.dumps(job))
        process = subprocess.Popen(
            [*under, sys.executable, "-m", module, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(environment),
            start_new_session=True,
        )
        _running.add(process)
        if _ended.is_set():
            _kill(process)
        lines: queue.Queue[bytes | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        try:
            while True:
                try:
                    line = lines.get(timeout=timeout)
                except queue.Empty:
                    raise WorkerError(f"no result within {timeout:g} s{_tail(stderr)}") from None
                if line is None:
                    break
                yield _parsed(line, stderr)
            code = process.wait(timeout=timeout)
            if code:
                raise WorkerError(f"{_ending(code)}{_tail(stderr)}")
        finally:
            _kill(process)
            process.wait()
            _running.discard(process)
            reader.join(timeout=5)


def _read(process: subprocess.Popen[bytes], lines: queue.Queue[bytes | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _parsed(line: bytes, stderr: Any) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise WorkerError(f"unreadable result {line[:80]!r}{_tail(stderr)}")
    return value


def _ending(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def _tail(stderr: Any, size: int = 1500) -> str:
    stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, stderr.tell() - size))
    text = stderr.read().decode(errors="replace").strip()
    return f": {text}" if text else ""


def importing_from(*paths: object) -> str:
    """Return a PYTHONPATH of the paths that exist."""
    return os.pathsep.join(str(path) for path in paths if path)


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    environment = dict(os.environ)
    # `-m kgen...` must import this kgen, installed or not.
    root = str(Path(kgen.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = importing_from(root, environment.get("PYTHONPATH"))
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def serve(main: Callable[[Any, IO[str]], int | None]) -> NoReturn:
    """Run `main(job, lines)` as a worker on the pickled job of the command line, and exit with its
    code.

    `lines` is standard output. Other output to standard output goes to standard error. On Linux, a
    worker ends with its parent process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(sys.argv[1], "rb") as file:
        job = pickle.load(file)
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(job, results))
