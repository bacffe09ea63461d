"""Shards of a run: together they equal the whole run, and so do their merged ledgers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.running.farm_tasks import until
from support.specs.hand_built import causal_alibi, loaded, plain, render

from kgen.diagnostics import KgenError, MissingError
from kgen.verify import ledger, verifying
from kgen.verify.events import Event, LeftOut, ignore
from kgen.verify.farm.sharding import WHOLE, Shard
from kgen.verify.farm.tasks import Here, Task, lost
from kgen.verify.merging import merge
from kgen.verify.options import VerifyOptions
from kgen.verify.verifying import verify_specs

PARTS = [Shard(number, 3) for number in (1, 2, 3)]


@pytest.mark.parametrize("text", ["0/4", "5/4", "x", "1/0", "1", "-1/4", "1/4/2", "1.0/4", ""])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(KgenError, match="is not a part") as caught:
        Shard.parse(text)
    assert caught.value.exit_code == 2
    assert caught.value.diagnostics[0].hint


def test_parts_are_the_whole() -> None:
    assert Shard.parse(None) == WHOLE
    assert Shard.parse("2/3") == PARTS[1]
    names = [f"n{number}" for number in range(10)]
    parts = [part.of(names, str) for part in PARTS]
    assert sorted(name for part in parts for name in part) == names
    assert sorted(map(len, parts)) == [3, 3, 4]
    shuffled = random.Random(0).sample(names, len(names))
    assert [sorted(part.of(shuffled, str)) for part in PARTS] == parts
    # Equal keys are in one shard.
    assert WHOLE.of([*names, *names], str) == [*names, *names]
    assert [part.of([*names, *names], str) for part in PARTS] == [[*part, *part] for part in parts]


def test_ledgers_of_parts_are_the_ledger_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(job: Any, *_: object) -> Any:
        row = {"spec": job.emitted.spec, "target": job.emitted.stem, "ok": True}
        for group, name in job.cases:
            outputs = {"out": [len(name) * 1e-4, 0.5]}
            yield row | {"pass": group, "case": name, "outputs": outputs, "message": ""}

    monkeypatch.setattr(verifying, "_rows", rows)
    specs = [plain(), causal_alibi(), loaded("another"), loaded("one_more")]
    places = [tmp_path / name for name in ("whole", "first", "second", "third")]
    for place in places:
        for one in specs:
            path = place / one.spec.name / "triton.py"
            if one.spec.name in ("plain", "causal_alibi"):
                render(one, place)
            else:
                path.parent.mkdir(parents=True)
                path.write_text(f"{one.spec.name} = 1\n")
    whole = verify_specs(specs, places[0], VerifyOptions("cpu", record=True))
    parts: list[Any] = []
    for place, part in zip(places[1:], PARTS, strict=True):
        parts += verify_specs(specs[::-1], place, VerifyOptions("cpu", record=True, shard=part))
    assert sorted(map(repr, parts)) == sorted(map(repr, whole))
    merge([place / ledger.FILENAME for place in places[1:]], tmp_path / "merged.json")
    assert (tmp_path / "merged.json").read_text() == (places[0] / ledger.FILENAME).read_text()


def test_a_part_may_have_nothing_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard passes like the whole run, even if its files need a GPU or it has none."""

    def rows(job: Any, *_: object) -> Any:
        for group, name in job.cases:
            place = {"spec": job.emitted.spec, "target": job.emitted.stem}
            yield {**place, "pass": group, "case": name, "ok": True, "message": ""}

    def unable(file: Any, device: str) -> str | None:
        return "needs a GPU" if file.spec in on_gpus else None

    monkeypatch.setattr(verifying, "_rows", rows)
    monkeypatch.setattr("kgen.verify.emitted.Emitted.unable", unable)
    specs = [plain(), causal_alibi()]
    for one in specs:
        render(one, tmp_path)
    on_gpus: Any = {"causal_alibi"}
    said: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, LeftOut):
            said.append(event.file.spec)

    def run(part: Shard, *cases: str) -> list[Any]:
        options = VerifyOptions("cpu", shard=part, cases=cases or None)
        return verify_specs(specs, tmp_path, options, hear=hear)

    found = [run(part) for part in PARTS]
    assert ([len(part) > 0 for part in found], said) == ([False, True, False], ["causal_alibi"])
    chosen = [run(part, "opcheck") for part in PARTS]
    assert [{row["case"] for row in part} for part in chosen] == [set(), {"opcheck"}, set()]
    for part in (WHOLE, *PARTS):
        with pytest.raises(KgenError, match="there is no case `opchek`"):
            run(part, "opchek")
    on_gpus = {"causal_alibi", "plain"}
    for part in (WHOLE, *PARTS):
        with pytest.raises(MissingError, match="needs a GPU"):
            run(part)


def test_what_is_lost_is_said_of_every_case(tmp_path: Path) -> None:
    path = render(plain(), tmp_path)
    (problem, file), *_ = verifying.files_to_run(
        [plain()], tmp_path, VerifyOptions("cpu"), Here(), ignore
    )[1]
    job = verifying._job(problem, file, ("forward",), built=None, device="cpu", quick=True)
    assert file.path == path
    rows = list(verifying.run_job(job, lost("4 nodes were lost"), timeout=1.0, beside=1))
    assert [(row["pass"], row["case"]) for row in rows] == list(job.cases)
    assert "4 nodes were lost" in rows[0]["message"]
    assert not any(row["ok"] for row in rows)


def test_tasks_here_keep_their_order(tmp_path: Path) -> None:
    """Results have the order of the tasks, whichever ends first.

    With `alone`, tasks run one after the other.
    """
    order: list[str] = []

    def work(name: str) -> Any:
        if name == "a" and not alone:
            until(lambda: "b" in order)
        yield {"name": name}

    for alone in (False, True):
        order.clear()
        tasks = [Task((name,), work, name) for name in "ab"]
        done = Here(2).run(tasks, lambda task, row: order.append(row["name"]), alone=alone)
        assert [one.rows for one in done] == [[{"name": "a"}], [{"name": "b"}]]
        assert order == (["a", "b"] if alone else ["b", "a"])
