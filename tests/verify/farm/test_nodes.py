"""Tasks on a Ray cluster of three nodes of this machine: none is lost, and none counts twice."""

from __future__ import annotations

import _thread
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzzing import seeds
from support.running.farm_tasks import Waiting, read, until, waiting
from support.specs.hand_built import causal_alibi, plain, render

from kgen.cli import terminal
from kgen.cli.terminal import Format
from kgen.diagnostics import EXIT_MISSING, KgenError, MissingError
from kgen.verify import ledger, verifying
from kgen.verify.events import Event, Progressed
from kgen.verify.farm import nodes, packing
from kgen.verify.farm.opening import hands
from kgen.verify.farm.tasks import Here, Task
from kgen.verify.options import VerifyOptions
from kgen.verify.verifying import verify_specs

ray = pytest.importorskip("ray", exc_type=ImportError)
MEMORY = 80 * 2**20
SOON = {f"health_check_{what}_ms": 500 for what in ("initial_delay", "period")}
SOON |= {"health_check_timeout_ms": 5000, "health_check_failure_threshold": 2}
"""When Ray takes a node for lost: by default after half a minute."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, and two nodes that do one task at a time."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
    head["_system_config"] = SOON
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            found.add_node(num_cpus=1, object_store_memory=MEMORY)
        yield found
    finally:
        found.shutdown()


@pytest.fixture(scope="module")
def crew(cluster: Any) -> Iterator[nodes.Farm]:
    with nodes.farm(cluster.address, ("tests",)) as found:
        yield found


def lose_a_node(cluster: Any, folder: Path) -> threading.Thread:
    """Ends one of two nodes when both have begun a task in `folder`, and lets the other go on."""

    def lose() -> None:
        try:
            until(lambda: len(list(folder.iterdir())) >= 2, 200.0)
            pids = [int(path.name.rpartition("-")[2]) for path in folder.iterdir()]
            cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
            # Its processes outlive it by a moment, in which a task could end.
            until(lambda: not all(Path(f"/proc/{pid}").exists() for pid in pids))
        finally:
            (folder / "go").touch()

    thread = threading.Thread(target=lose)
    thread.start()
    return thread


def test_devices(crew: nodes.Farm) -> None:
    assert crew.device("auto") == crew.device("cpu") == "cpu"
    assert crew.beside == 1
    with pytest.raises(MissingError, match="no node of this Ray cluster has a GPU"):
        crew.device("cuda")


def test_files_go_along(crew: nodes.Farm, tmp_path: Path) -> None:
    for name in ("a.py", "b.cu"):
        (tmp_path / name).write_text(f"this is {name}")
    (done,) = crew.run([Task(("one",), read, tmp_path / "a.py", (tmp_path,))])
    (row,) = done.rows
    assert (row["text"], row["beside"]) == ("this is a.py", ["a.py", "b.cu"])
    assert row["path"] != str(tmp_path / "a.py")


def test_another_kgen_is_refused(
    crew: nodes.Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()
    monkeypatch.setattr(packing, "package_digest", lambda: "0" * 64)
    with pytest.raises(
        MissingError, match=r"node [\d.]+: another kgen runs there: expected 0{12}, got "
    ):
        crew.run([Task(("one",), read, tmp_path / "a", (tmp_path,))])


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """A process that a shell started in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_ends_tasks(crew: nodes.Farm, tmp_path: Path) -> None:
    tasks = [Task((name,), waiting, Waiting(name, tmp_path)) for name in "xyz"]

    def interrupt() -> None:
        until(lambda: list(tmp_path.iterdir()))
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        crew.run(tasks)
    thread.join()
    pids = {int(path.name.partition("-")[2]) for path in tmp_path.iterdir()}
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.thorough
def test_a_run_that_loses_a_node_is_as_one_here(
    crew: nodes.Farm, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file is right.

    A kernel of the other takes its worker along, which costs one case, there as here.
    """
    whole = verifying._job
    few = [("forward", "tile"), ("forward", "q-shorter")]
    monkeypatch.setattr(
        verifying, "_job", lambda *args, **how: replace(whole(*args, **how), cases=tuple(few))
    )
    begun = tmp_path / "begun"
    begun.mkdir()
    wait = f"import os, time\nopen(f'{begun}/{{os.getpid()}}', 'w').close()\n"
    wait += f"while not os.path.exists('{begun}/go'):\n    time.sleep(0.1)\n"
    generated = [tmp_path / "there", tmp_path / "here"]
    for place in generated:
        for one in (plain(), causal_alibi()):
            path = render(one, place)
            text = path.read_text().replace("import torch\n", f"import torch\n{wait}", 1)
            path.write_text(
                text.replace(
                    "    p, weights_lse,", "    q.shape[2] != 33 or os.abort()\n    p, weights_lse,"
                )
            )
    seen: list[Event] = []
    losing = lose_a_node(cluster, begun)
    specs = [plain(), causal_alibi()]
    options = VerifyOptions("cpu", record=True)
    there = verify_specs(specs, generated[0], options, crew, seen.append)
    losing.join()
    # The lost node had one of the two started sections, which starts again. A new process replaces
    # each process that a kernel ended.
    assert len(list(begun.iterdir())) >= 4
    here = verify_specs(specs, generated[1], options)
    assert [(r["spec"], r["pass"], r["case"], r["ok"], r["error"]) for r in there] == [
        (r["spec"], r["pass"], r["case"], r["ok"], r["error"]) for r in here
    ]
    assert len(there) == 4
    (wrong,) = (row for row in there if not row["ok"])
    assert (wrong["spec"], wrong["case"]) == ("plain", "q-shorter")
    assert "SIGABRT" in wrong["message"]
    steps = [event for event in seen if isinstance(event, Progressed)]
    assert len(steps) == 4
    assert steps[-1].done == steps[-1].total
    assert ledger.read(generated[0]) == ledger.read(generated[1])
    assert len(ledger.read(generated[0])) == 1


@pytest.mark.thorough
def test_tasks_that_lose_their_node_are_done_once(
    crew: nodes.Farm, cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    tasks = [Task((name,), waiting, Waiting(name, tmp_path)) for name in "abcdef"]
    heard: Counter[tuple[str, int]] = Counter()
    losing = lose_a_node(cluster, tmp_path)
    done = crew.run(tasks, lambda task, row: heard.update([(row["name"], row["row"])]))
    losing.join()
    assert [one.task for one in done] == tasks
    assert heard == {(name, row): 1 for name in "abcdef" for row in (1, 2)}
    assert len([path for path in tmp_path.iterdir() if "-" in path.name]) > len(tasks)


@pytest.mark.thorough
def test_seeds_become_the_same(crew: nodes.Farm) -> None:
    found = []
    for who in (crew, Here(2)):
        rows = [row for one in who.run(seeds.tasks(range(4), 2)) for row in one.rows]
        found.append([{**row, "seconds": 0} for row in rows])
    assert found[0] == found[1]
    assert [row["seed"] for row in found[0]] == [0, 1, 2, 3]


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(KgenError, match="`nowhere` is not an address of a Ray cluster"),
        nodes.farm("nowhere"),
    ):
        pass
    monkeypatch.setattr(nodes, "SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began = time.monotonic()
        with (
            pytest.raises(MissingError, match=f"no Ray cluster at `127.0.0.1:{port}`"),
            nodes.farm(f"127.0.0.1:{port}"),
        ):
            pass
    with (
        pytest.raises(MissingError, match=f"no Ray cluster at `127.0.0.1:{port}`"),
        nodes.farm(f"127.0.0.1:{port}"),
    ):
        pass
    assert time.monotonic() - began < 20


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kgen.verify.toolchain.importlib.util.find_spec", lambda name: None)

    def run() -> int:
        with hands(1, "auto"):
            return 0

    assert terminal.guarded(run, Format.TEXT) == EXIT_MISSING
    said = capsys.readouterr().err
    assert "`ray` is not installed" in said
    assert "pip install 'kgen-kernels[ray]'" in said
