"""Tasks on the nodes of a Ray cluster, each with a GPU or a core.

Each node receives this kgen as a Ray module, which Ray names by its content, and the files of each
task. A node reports the hash of its kgen, so all rows come from one version. A shared working
directory would be overwritten under tasks of other nodes.

A task whose node is lost restarts as a whole on another node: Ray returns its rows together. The
task itself handles crashes of its workers, as on one machine.
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
"""Number of restarts of a task that lost its node."""
SECONDS = 5.0
"""Time limit for an answer of a machine, in seconds. Its Ray may take four times as long."""
WAITING = 60.0
"""Seconds without a required device after which the tasks of a cluster are lost."""
BESIDE = "kgen_beside"
"""The module that contains the folders that tasks import from."""
MEMORY = 128 * 2**20
"""Bytes of shared memory of a cluster that starts here. Tasks are small."""


@contextlib.contextmanager
def farm(address: str, code: Sequence[str] = ()) -> Iterator[Farm]:
    """The Ray cluster at an address, `host:port` or `auto`.

    Raises `MissingError` without Ray or an answer, and `KgenError` for a wrong address.
    """
    if not is_address(address):
        hint = "for example `--ray head:6379`, or `--ray` alone for the local cluster"
        raise KgenError(
            Diagnostic("bad-address", f"`{address}` is not an address of a Ray cluster", hint=hint)
        )
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
        """Return `cuda` for `auto` if a node has a GPU."""
        device = asked if asked != "auto" else "cuda" if self._has("cuda") else "cpu"
        if not self._has(device):
            what = "GPU" if device == "cuda" else "core"
            hint = "`ray status` lists the resources of its nodes"
            raise MissingError(
                Diagnostic("missing-device", f"no node of this Ray cluster has a {what}", hint=hint)
            )
        return device

    def run(self, tasks: Sequence[Task], heard: Heard = nobody, alone: bool = False) -> list[Done]:
        """Run each task on any node. A GPU always runs one task at a time."""
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
                        _enter(done, _lost(task, "no node is left that can run it"), heard)
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
            num_cpus=1,
            num_gpus=int(task.device == "cuda"),
            max_retries=LOST,
            name=" ".join(task.key),
        )
        return do.remote(pack(task, self._code))

    def _done(self, task: Task, reference: Any) -> Done:
        errors = self._ray.exceptions
        try:
            key, node, rows, refused = self._ray.get(reference)
        except errors.RuntimeEnvSetupError as error:
            message = f"a node of the Ray cluster cannot use this kgen: {_first(error)}"
            raise MissingError(Diagnostic("bad-node", message)) from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, ImportError | errors.RaySystemError):
                last = str(error.cause).strip().rpartition("\n")[2]
                message = f"a node of the Ray cluster cannot import a module of a task: {last}"
                hint = (
                    "install the packages of this machine there: pip install "
                    "'kgen-kernels[verify,ray]'"
                )
                raise MissingError(Diagnostic("bad-node", message, hint=hint)) from None
            raise
        except errors.RayError as error:
            return _lost(task, f"{LOST + 1} nodes were lost: {_first(error)}")
        if refused:
            hint = "restart its Ray without another kgen on PYTHONPATH"
            raise MissingError(Diagnostic("bad-node", f"node {node}: {refused}", hint=hint))
        assert key == task.key
        return Done(task, rows)


def _enter(done: dict[tuple[str, ...], Done], one: Done, heard: Heard) -> None:
    """Enter the result of a task once, also after several attempts."""
    if one.task.key not in done:
        done[one.task.key] = one
        for row in one.rows:
            heard(one.task, row)


def _lost(task: Task, why: str) -> Done:
    return Done(task, list(task.work(task.job, lost(why))))


def _first(error: BaseException) -> str:
    """Return the first line of an error of Ray, which may have many."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _do(packed: Packed) -> tuple[tuple[str, ...], str, list[Row], str]:
    """Run a task on a node. Return its key, the node, and its rows or an error."""
    import ray

    NODE[:] = [node := str(ray.util.get_node_ip_address())]
    if packed.package != (own := package_digest()):
        refused = (
            f"another kgen runs there: expected {packed.package[:12]}, got {own[:12]} from "
            f"{PACKAGE}"
        )
        return (), node, [], refused
    for name in packed.code:
        # For this process and its workers.
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
    """Return the folder on a node with the code that came with the package."""
    found: str = importlib.import_module(BESIDE).__path__[0]
    return Path(found)


def _stage(folder: Path, code: Sequence[str]) -> list[str]:
    """Stage the package with its templates, and `code` of the repository, as modules for every
    node.
    """

    def copy(source: Path, to: Path) -> None:
        shutil.copytree(
            source, to, ignore=shutil.ignore_patterns("__pycache__", ".*"), dirs_exist_ok=True
        )

    copy(PACKAGE, folder / PACKAGE.name)
    copy(template_root(), folder / PACKAGE.name / "_data/templates")
    (folder / BESIDE).mkdir()
    (folder / BESIDE / "__init__.py").touch()
    for name in code:
        copy(PACKAGE.parent / name, folder / BESIDE / name)
    return [str(folder / name) for name in (PACKAGE.name, BESIDE)]


def _joined(address: str, modules: Sequence[str]) -> Any:
    import ray

    # Not a working directory: nodes of one machine share it, and each node overwrites it when it
    # starts.
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
    """Raise `MissingError` if no Ray answers soon.

    Ray itself takes minutes, or ends the process.
    """
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
        raise _absent(address, "the server there is not Ray") from None


def _absent(address: str, why: str) -> MissingError:
    hint = "`ray start --head` starts one and prints its address; `--ray` alone starts one here"
    return MissingError(Diagnostic("no-ray", f"no Ray cluster at `{address}`: {why}", hint=hint))
