"""Tasks on the nodes of a Ray cluster: a GPU or a core for each.

Each node gets the kgen package of the command as a Ray module, which Ray names by its content, and
with each task the files that it is about. A node reports the hash of its kgen, so all rows are of
one version. A shared working directory would be rewritten under the tasks of other nodes. A task
whose node is lost is done again on another, as a whole: Ray returns its rows once, when all are
there. A worker that a kernel takes along is the task's own affair, as on one machine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError, MissingError
from kgen.render.environment import template_root
from kgen.verify.farm.address import ADDRESS, AUTO, is_address
from kgen.verify.farm.packing import PACKAGE, Packed, Refused, pack, package_digest, unpack
from kgen.verify.farm.tasks import NODE, Done, Heard, Row, Task, lost, nobody
from kgen.verify.processes import importing_from
from kgen.verify.toolchain import require

LOST = 3
"""How often a task that lost its node is begun again."""
SECONDS = 5.0
"""That a machine may take to answer; its Ray may take four times that."""
WAITING = 60.0
"""Seconds that a cluster may be without a device that its tasks need, before these are lost."""
BESIDE = "kgen_beside"
"""The module that has the folders that tasks import from."""
MEMORY = 128 * 2**20
"""Bytes for what is sent, where a cluster begins here: tasks are small, and so may be the memory that is shared."""


@contextlib.contextmanager
def farm(address: str, code: Sequence[str] = ()) -> Iterator[Farm]:
    """The Ray cluster at an address, `host:port` or `auto`.

    Raises `MissingError` without Ray and where none answers, `KgenError` for what is no address.
    """
    if not is_address(address):
        hint = "as `--ray head:6379`, or `--ray` alone for that of this machine"
        raise KgenError(Diagnostic("bad-address", f"`{address}` is no address of a Ray cluster", hint=hint))
    require("ray", extra="ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
        ray = _joined(address, _stage(Path(folder), code))
        try:
            yield Farm(ray, code)
        finally:
            ray.shutdown()


class Farm:
    """The nodes of a cluster."""

    far = True

    def __init__(self, ray: Any, code: Sequence[str] = ()) -> None:
        self._ray, self._code = ray, tuple(code)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.beside = max([1, *(int(node.get("GPU") or node.get("CPU", 1)) for node in nodes)])

    def device(self, asked: str) -> str:
        """`cuda` for `auto` where a node has a GPU."""
        device = asked if asked != "auto" else "cuda" if self._has("cuda") else "cpu"
        if not self._has(device):
            what = "GPU" if device == "cuda" else "core"
            hint = "`ray status` lists what its nodes have"
            raise MissingError(Diagnostic("missing-device", f"no node of this Ray has a {what}", hint=hint))
        return device

    def run(self, tasks: Sequence[Task], heard: Heard = nobody, alone: bool = False) -> list[Done]:
        """Each on a node of its own choice; a GPU does one at a time whether that is asked for or not."""
        done: dict[tuple[str, ...], Done] = {}
        waiting = {self._begun(task): task for task in tasks}
        there = time.monotonic()
        try:
            while waiting:
                ready, _ = self._ray.wait([*waiting], num_returns=1, timeout=1.0)
                for reference in ready:
                    task = waiting.pop(reference)
                    _enter(done, self._done(task, reference), heard)
                if ready or all(map(self._has, {task.device for task in waiting.values()})):
                    there = time.monotonic()
                elif time.monotonic() - there > WAITING:
                    for task in waiting.values():
                        _enter(done, _lost(task, "no node is left that it can run on"), heard)
                    break
        finally:
            for reference in waiting:
                self._ray.cancel(reference, force=True)
        return [done[task.key] for task in tasks]

    def _has(self, device: str) -> bool:
        resource = "GPU" if device == "cuda" else "CPU"
        return bool(self._ray.cluster_resources().get(resource, 0) >= 1)

    def _begun(self, task: Task) -> Any:
        do = self._ray.remote(_do).options(
            num_cpus=1, num_gpus=int(task.device == "cuda"), max_retries=LOST, name=" ".join(task.key)
        )
        return do.remote(pack(task, self._code))

    def _done(self, task: Task, reference: Any) -> Done:
        errors = self._ray.exceptions
        try:
            key, node, rows, refused = self._ray.get(reference)
        except errors.RuntimeEnvSetupError as error:
            message = f"a node of the Ray cluster cannot take this kgen: {_first(error)}"
            raise MissingError(Diagnostic("bad-node", message)) from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, ImportError | errors.RaySystemError):
                last = str(error.cause).strip().rpartition("\n")[2]
                message = f"a node of the Ray cluster cannot import what a task needs: {last}"
                hint = "install there what is installed here: pip install 'kgen-kernels[verify,ray]'"
                raise MissingError(Diagnostic("bad-node", message, hint=hint)) from None
            raise
        except errors.RayError as error:
            return _lost(task, f"{LOST + 1} nodes were lost: {_first(error)}")
        if refused:
            hint = "begin its Ray again without a kgen of its own on PYTHONPATH"
            raise MissingError(Diagnostic("bad-node", f"node {node}: {refused}", hint=hint))
        assert key == task.key
        return Done(task, rows)


def _enter(done: dict[tuple[str, ...], Done], one: Done, heard: Heard) -> None:
    """A task counts once, whatever became of attempts at it."""
    if one.task.key not in done:
        done[one.task.key] = one
        for row in one.rows:
            heard(one.task, row)


def _lost(task: Task, why: str) -> Done:
    return Done(task, list(task.work(task.job, lost(why))))


def _first(error: BaseException) -> str:
    """The first line of what Ray says, which may be many."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _do(packed: Packed) -> tuple[tuple[str, ...], str, list[Row], str]:
    """On a node: the key of a task, the node, the rows of the task, or why they are none."""
    import ray

    NODE[:] = [node := str(ray.util.get_node_ip_address())]
    if packed.package != (own := package_digest()):
        refused = f"another kgen runs there ({own[:12]}, from {PACKAGE}), and {packed.package[:12]} was sent"
        return (), node, [], refused
    for name in packed.code:
        # For this process, and for the workers that it begins.
        place = str(_beside() / name)
        if place not in sys.path:
            sys.path.insert(0, place)
            os.environ["PYTHONPATH"] = importing_from(place, os.environ.get("PYTHONPATH"))
    with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
        try:
            task = unpack(packed, Path(folder))
        except Refused as error:
            return (), node, [], str(error)
        return task.key, node, list(task.work(task.job)), ""


def _beside() -> Path:
    """On a node: the folder of what came beside the package."""
    found: str = importlib.import_module(BESIDE).__path__[0]
    return Path(found)


def _stage(folder: Path, code: Sequence[str]) -> list[str]:
    """The package with its templates, as in a wheel, and what it takes of the repository, as modules for every node."""

    def copy(source: Path, to: Path) -> None:
        shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__", ".*"), dirs_exist_ok=True)

    copy(PACKAGE, folder / PACKAGE.name)
    copy(template_root(), folder / PACKAGE.name / "_data/templates")
    (folder / BESIDE).mkdir()
    (folder / BESIDE / "__init__.py").touch()
    for name in code:
        copy(PACKAGE.parent / name, folder / BESIDE / name)
    return [str(folder / name) for name in (PACKAGE.name, BESIDE)]


def _joined(address: str, modules: Sequence[str]) -> Any:
    import ray

    # Not a working directory: nodes of one machine share its place, and each that begins writes it anew.
    options: dict[str, Any] = {"runtime_env": {"py_modules": [*modules]}}
    options |= {"logging_level": "ERROR", "log_to_driver": False}
    try:
        if address == AUTO:
            try:
                ray.init(AUTO, **options)
            except ConnectionError:
                ray.init("local", include_dashboard=False, object_store_memory=MEMORY, **options)
        else:
            _ask(address)
            ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise _absent(address, _first(error)) from None
    return ray


def _ask(address: str) -> None:
    """Raise `MissingError` where no Ray answers soon: by itself it takes minutes to say so, or ends the process."""
    found = ADDRESS.fullmatch(address)
    assert found is not None
    client, host, port = found.groups()
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _absent(address, str(error)) from None
    if client:
        return
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        subprocess.run(command, capture_output=True, timeout=4 * SECONDS, check=True)
    except (subprocess.SubprocessError, OSError):
        raise _absent(address, "what answers there is no Ray") from None


def _absent(address: str, why: str) -> MissingError:
    hint = "`ray start --head` begins one and says its address; `--ray` alone begins one here"
    return MissingError(Diagnostic("no-ray", f"no Ray cluster at `{address}`: {why}", hint=hint))
