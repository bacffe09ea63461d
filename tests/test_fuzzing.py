"""`tests/fuzzing`: random specs cover the language, find planted bugs, and keep the specs that
found bugs.
"""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
from fuzzing import __main__ as program
from fuzzing import attention, ledger, linear_attention, running, seeds
from fuzzing.drawing import FAMILIES, OF_ITS_OWN, drawn
from fuzzing.explained import EXPLAINED
from fuzzing.ledger import Ledger, OfFamily, generator, of_family
from fuzzing.running import smaller, tried, written
from ruamel.yaml import YAML
from support.interpreters.own_process import interpreted
from typer.testing import CliRunner

from kgen.diagnostics import KgenError
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, walk
from kgen.kernels.attention.verify import reference
from kgen.kernels.linear_attention.plan.planning import plan_linear_attention
from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.verify.families import problem_of
from kgen.verify.farm.sharding import Shard
from kgen.verify.farm.tasks import lost
from kgen.verify.processes import WorkerError

FOUND = sorted((Path(running.__file__).parent / "found").glob("*.yaml"))

SEEDS = {"tanh_in_float32": (21,)}
"""Seeds that show a bug which few seeds show. The default is the first three."""

FIELDS = {
    "attention": "dtype head_dim gqa varlen lengths buffers params score_mod mask_mod block_mask "
    "sinks "
    "align passes "
    "paged_kv",
    "norm": "dtype width heads weight bias weight_offset residual statistics round_x_hat eps "
    "input_mod output_mod "
    "quantize",
    "chunk_output": "head_dim chunk_size heads decay gate_base gate_dtype state_dtype state_layout "
    "v_layout varlen "
    "passes",
    "linear_attention": "head_dim chunk_size heads buffers decay gate_base rule beta q_map k_map "
    "qk_norm eps scale skip output_gate output_norm output_eps output state_dtype varlen save "
    "passes",
}


@pytest.mark.parametrize("path", FOUND, ids=lambda p: p.stem)
def test_what_was_found_stays_mended(path: Path, verdict: Any) -> None:
    spec = YAML(typ="safe").load(path.read_text())
    loaded = loads(path.read_text(), path.name)
    verdict(problem_of(loaded), path, *render_spec(loaded, single=True).values())
    for seed in SEEDS.get(path.stem, (0, 1, 2)):
        outcome = interpreted(tried, seed, spec)
        assert outcome.what == "right", outcome.message


def test_seeds_of_the_ledger_are_right_or_explained() -> None:
    assert {int(seed) for seed in Ledger.read().failed} == {*EXPLAINED}


def test_a_seed_is_one_spec() -> None:
    assert [drawn(seed) for seed in range(20)] == [drawn(seed) for seed in range(20)]
    assert len({written(drawn(seed)) for seed in range(50)}) == 50


def test_the_whole_language_is_drawn_and_little_is_refused() -> None:
    functions, fields, refused = set(), set(), 0
    for seed in range(700):
        spec = drawn(seed)
        try:
            loaded = loads(written(spec), "drawn.yaml")
        except KgenError:
            refused += 1
            continue
        fields |= {f"{spec['kernel']}.{key}" for key in spec}
        functions |= {
            n.fn for tree in loaded.trees.values() for n in walk(tree) if isinstance(n, Call)
        }
    assert refused < 50
    assert functions >= {*TABLE}
    for kernel, wanted in FIELDS.items():
        assert {f"{kernel}.{key}" for key in wanted.split()} <= fields


EDGES = (
    *(
        "abs(q_idx - kv_idx) <= 0",
        "abs(q_idx - kv_idx) < 1",
        "-abs(",
        "not abs(",
        "where(q_idx",
        ") != (",
        "h_kv",
    ),
    *(
        "kv_idx < 0",
        " < 1000000",
        "1 / q_idx",
        "log(float(q_idx))",
        "log(float(n[b]))",
        "/ n[b]",
        "/ SK",
    ),
    *("t[h_kv]", "gains[h_kv]", "0.0 * score"),
)


def test_what_was_missed_once_is_drawn() -> None:
    specs = [spec for spec in map(drawn, range(4000)) if spec["kernel"] == "attention"]
    texts = " ".join(f"{spec.get('mask_mod')} {spec.get('score_mod')}" for spec in specs)
    assert [form for form in EDGES if form not in texts] == []
    of_heads = [spec for spec in specs if "t" in spec.get("buffers", {})]
    assert {1, "any"} <= {spec["gqa"] for spec in of_heads}
    learned = [spec for spec in specs if spec.get("buffers", {}).get("a", {}).get("grad")]
    assert any("n[b]" in spec["score_mod"] for spec in learned)
    assert any("/ SK" in spec.get("score_mod", "") for spec in specs if spec.get("varlen"))


def test_calls_without_batches_queries_or_keys_are_drawn() -> None:
    found = []
    for seed in range(60):
        spec = drawn(seed)
        if spec["kernel"] == "attention" and not spec.get("varlen"):
            with contextlib.suppress(KgenError):
                problem = problem_of(loads(written(spec), "drawn.yaml"))
                found += attention.cases(problem, random.Random(seed))
    assert {0} < {case.batch for case in found}
    assert any(not case.sq and case.sk for case in found)
    assert any(case.sq and not case.sk for case in found)


def test_kinds_of_linear_attention_are_drawn() -> None:
    found = set()
    for seed in range(9, 1000, 10):
        with contextlib.suppress(KgenError):
            loaded = loads(written(drawn(seed)), "drawn.yaml")
            plan = plan_linear_attention(loaded)
            decay = "column" if plan.by_column else "head" if "decay" in loaded.trees else "none"
            found.add((decay, plan.delta, "beta" in loaded.trees))
            problem = problem_of(loaded)
            assert len(linear_attention.cases(problem, random.Random(seed))) == 2
            steps = linear_attention.steps(problem, random.Random(seed))
            found |= {one.within for one in steps}
    kinds = {*product(("none", "head", "column"), (False, True), (False, True))}
    assert found == kinds | {None, "fp32", "bf16"}


PLANTED = {
    "a bound": ("kv_idx < SK", "kv_idx < SK - 1"),
    "a position": ("kv_idx = kv_start + offs_n", "kv_idx = kv_start + offs_n + 1"),
    "a scale": ("qk_scale = LOG2E * scale", "qk_scale = LOG2E"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found_and_made_smaller(what: str) -> None:
    assert interpreted(_found, *PLANTED[what])


def _found(right: str, wrong: str) -> bool:
    """True if a seed finds the planted bug, and its reduced spec still does."""

    def planted(loaded: Any, single: bool) -> dict[str, str]:
        return {
            name: text.replace(right, wrong)
            for name, text in render_spec(loaded, single=single).items()
        }

    with mock.patch.object(running, "render_spec", planted):
        for seed in range(12):
            outcome = tried(seed)
            if outcome.what == "wrong" and "kernel: attention" in outcome.spec:
                least, again = smaller(outcome, 8)
                return again.what == "wrong" and len(written(least)) <= len(outcome.spec)
    return False


@pytest.mark.parametrize("seed", [802, 1026, 1344, 1630, 1831, 2898])
def test_functions_of_sizes_are_said_to_flexattention(seed: int) -> None:
    """FlexAttention gets functions of sizes, which are Python numbers without a tensor."""
    assert running.asked_flex(loads(written(drawn(seed)), "drawn.yaml"), random.Random(0))


def test_a_reference_that_is_wrong_is_found() -> None:
    assert interpreted(_told_by_flex, "") == "right"
    assert interpreted(_told_by_flex, "scale") == "reference"
    assert interpreted(_told_by_flex, "params") == "reference"


def _told_by_flex(wrong: str) -> str:
    """Return the outcome of a spec if the reference uses a wrong number and FlexAttention the right
    one.
    """
    from fuzzing import flexed

    spec = {
        "kernel": "attention",
        "name": "drawn",
        "dtype": "bf16",
        "head_dim": 16,
        "params": {"cap": 2.0},
    }
    spec |= {
        "score_mod": "cap * tanh(score / cap)",
        "mask_mod": "q_idx >= kv_idx and kv_idx >= q_idx - 5",
    }

    def other(q: Any, k: Any, v: Any, call: Any) -> Any:
        change = {"": {}, "scale": {"scale": 0.2}, "params": {"params": {"cap": 2.1}}}[wrong]
        return reference.attention(q, k, v, replace(call, **change))

    with mock.patch.object(flexed, "attention", other), mock.patch.object(running, "_run"):
        return tried(0, spec).what


def test_parts_enter_the_ledger_as_the_whole_does(tmp_path: Path) -> None:
    """Merged shards equal the whole run in any order and with duplicates.

    The ledger advances only if no shard is missing. A file that is not a shard is refused.
    """
    whats = ["right", "refused", "wrong", "right", "crash"]
    found = [
        (running.Outcome(s, what, "code: x", "", 0.1, s == 0), None) for s, what in enumerate(whats)
    ]
    found = [(one, one if one.failed else None) for one, _ in found]
    places = [tmp_path / f"{number}.json" for number in (1, 2, 3)]
    for place, part in zip(places, (Shard(n, 3) for n in (1, 2, 3)), strict=True):
        program.write(place, part.of(found, lambda one: one[0].seed))
    assert program.merged([places[2], *places, places[0]]) == found
    with mock.patch.object(ledger, "PATH", tmp_path / "seeds.json"):
        entered = []
        for these in (found, program.merged(places[::-1])):
            ledger.PATH.unlink(missing_ok=True)
            Ledger().enter(
                [one for one, _ in these], {one.seed: least for one, least in these if least}
            )
            entered.append(ledger.PATH.read_text())
        assert entered[0] == entered[1]
        assert Ledger.read().next() == 5
        ledger.PATH.unlink()
        Ledger().enter([one for one, _ in program.merged(places[:2])], {})
        assert Ledger.read().next() == 0
    row = {"outcome": found[0][0].row(), "least": None}
    wrong = [
        {"0": {**row, "outcome": {**row["outcome"], **change}}}
        for change in (
            {"seed": "0"},
            {"seed": -5},
            {"seed": None},
            {"what": ["right"]},
            {"what": "nonsense"},
        )
    ]
    texts = [
        json.dumps({"of": program.parts_of(), "results": one})
        for one in (*wrong, {"1": row}, {"0": {}})
    ]
    for text in ("{", "[]", '{"of": "x", "results": {}}', '{"results": {"1": 2}}', *texts):
        places[1].write_text(text)
        with pytest.raises(KgenError):
            program.merged(places)


def test_a_seed_that_takes_its_process_along_is_a_crash() -> None:
    """The remaining seeds are tried after the crash."""
    tries = []

    def messages(module: str, job: Any, timeout: float, environment: Any) -> Any:
        tries.append(job.seeds)
        if job.seeds[0] == 1:
            raise WorkerError("killed by SIGSEGV")
        yield running.Outcome(job.seeds[0], "right", "", "", 0.1).row()
        if job.seeds[1:]:
            raise WorkerError("killed by SIGSEGV")

    (task,) = seeds.tasks(range(3), 1)
    rows = list(task.work(task.job, messages))
    assert [(row["seed"], row["what"]) for row in rows] == [
        (0, "right"),
        (1, "crash"),
        (2, "right"),
    ]
    assert tries == [(0, 1, 2), (2,)]
    assert [row["what"] for row in task.work(task.job, lost("gone"))] == ["crash"] * 3
    assert [one.job.seeds for one in seeds.tasks(range(5), 2)] == [(0, 1, 2), (3, 4)]


def test_the_ledger_begins_anew_with_another_generator(tmp_path: Path) -> None:
    with mock.patch.object(ledger, "PATH", tmp_path / "seeds.json"):
        outcomes = [running.Outcome(seed, "right", "", "", 0.1) for seed in range(3)]
        Ledger().enter(outcomes, {})
        assert (Ledger.read().next(), Ledger.read().outcomes) == (3, {"right": 3})
        with mock.patch.object(ledger, "generator", return_value="other"):
            assert (Ledger.read().next(), Ledger.read().before) == (0, {generator(): {"right": 3}})


def test_seeds_of_a_family_are_tried_and_counted(tmp_path: Path) -> None:
    """`--family` chooses among the seeds of all specs, and continues where the last run ended."""
    assert {*get_args(program.Family)} == {*FAMILIES, *OF_ITS_OWN.values()}
    for family in get_args(program.Family):
        chosen = of_family(family, 3, 4)
        others = {*range(3, chosen[-1])} - {*chosen}
        assert chosen == sorted(chosen)
        assert {drawn(seed)["kernel"] for seed in chosen} == {family}
        assert family not in {drawn(seed)["kernel"] for seed in others}
    asked = []

    def tried(seeds: Any, *_: Any) -> Any:
        asked.append([*seeds])
        return [(running.Outcome(seed, "right", "", "", 0.1), None) for seed in seeds]

    with (
        mock.patch.object(ledger, "PATH", tmp_path / "seeds.json"),
        mock.patch.object(program, "tried", tried),
    ):
        for more in (("--count", "2"), ("--count", "3"), ("--seed", "4", "--count", "1")):
            options = ["--family", "linear_attention", "--jobs", "1", *more]
            assert CliRunner().invoke(program.app, options).exit_code == 0
        assert asked == [[9, 19], [29, 39, 49], [9]]
        found = Ledger.read()
        assert found.families == {"linear_attention": OfFamily(5, 49, {"right": 5})}
        assert (found.tried, found.next(), found.next("linear_attention")) == (0, 0, 59)
        with mock.patch.object(ledger, "generator", return_value="other"):
            assert Ledger.read().families == {}
