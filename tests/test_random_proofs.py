"""Proofs of random specs: a sample, and specs on which the prover once failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import fuzzing.__main__
import mutating.__main__
import pytest
import typer
from fuzzing import proofs
from fuzzing.proofs import Proof, drawn, read, told, tried
from fuzzing.running import written
from typer.testing import CliRunner

from kgen.diagnostics import KgenError
from kgen.expr.nodes import Call, Node, transform
from kgen.kernels.attention.plan import planning
from kgen.kernels.linear_attention.prove import obligations as of_linear_attention
from kgen.spec.load import Loaded, loads

SAMPLE = (0, 2, 4, 5, 7, 9, 10, 11, 12, 13)
FIELDS = {"kernel": "attention", "name": "drawn", "dtype": "bf16", "head_dim": 64}
RECURRENCE = {**FIELDS, "kernel": "linear_attention", "chunk_size": 16, "passes": ["forward"]}


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_sample_of_seeds(seed: int) -> None:
    found = tried(seed)
    assert (found.what, found.found) == ("proved", ())


def test_a_seed_is_one_spec() -> None:
    for family in get_args(proofs.Family):
        specs = [drawn(seed, family) for seed in range(40)]
        assert specs == [drawn(seed, family) for seed in range(40)]
        assert {spec["kernel"] for spec in specs} == {family}


def test_what_was_missed_once_is_drawn() -> None:
    specs = [drawn(seed) for seed in range(400)]
    texts = [f"{spec.get('mask_mod')} {spec.get('score_mod')}" for spec in specs]
    for words in ("abs(", "where(", "!=", " or ", "h_kv", "512", "1000000"):
        assert any(words in text for text in texts), words
    for field, value in (
        ("varlen", True),
        ("block_mask", "always"),
        ("gqa", 1),
        ("gqa", "any"),
        ("align", "end"),
    ):
        assert any(spec.get(field) == value for spec in specs), field
    assert any("decode" in spec.get("passes", ()) for spec in specs)
    assert any(
        buffer.get("sorted") for spec in specs for buffer in spec.get("buffers", {}).values()
    )


def test_rows_are_read_where_the_last_query_is_at_the_end() -> None:
    specs = [
        spec for spec in map(drawn, range(400)) if spec.get("align") == "end" and "buffers" in spec
    ]
    texts = [f"{spec.get('mask_mod')} {spec.get('score_mod')}" for spec in specs]
    assert any("[q_idx - (SK - SQ)]" in text for text in texts)
    codes = {tried_to_load(spec) for spec in specs}
    assert "bad-shape" not in codes


def tried_to_load(spec: Mapping[str, Any]) -> str:
    """Return the code of the error that refuses a spec, or an empty string."""
    try:
        loads(written(spec), "drawn.yaml")
    except KgenError as error:
        return error.diagnostics[0].code
    return ""


def test_a_mask_that_loses_a_side_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`abs(x) <= n` is replaced by `x <= n`."""
    canonical = planning.canonical

    def without_abs(trees: Mapping[str, Node], *more: Any) -> Mapping[str, Node]:
        return canonical({name: transform(tree, _inside) for name, tree in trees.items()}, *more)

    def _inside(node: Node) -> Node:
        return node.args[0] if isinstance(node, Call) and node.fn == "abs" else node

    spec = {**FIELDS, "mask_mod": "abs(q_idx - kv_idx) <= 3"}
    assert tried(1, spec).what == "proved"
    monkeypatch.setattr(planning, "canonical", without_abs)
    found = tried(1, spec)
    assert found.what == "refuted"
    assert found.failed
    assert "the computed mask equals the mask of the spec" in "\n".join(found.found)


def test_a_kernel_that_loses_the_diagonal_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of a chunk also reads its own key and value."""
    rendered = of_linear_attention.rendered

    def without_diagonal(loaded: Loaded) -> str:
        right = "pair = i[:, None] >= i[None, :]"
        text = rendered(loaded)
        assert right in text
        return text.replace(right, right.replace(">=", ">"))

    assert tried(1, RECURRENCE).what == "proved"
    monkeypatch.setattr(of_linear_attention, "rendered", without_diagonal)
    found = tried(1, RECURRENCE)
    assert found.what == "refuted"
    assert "the chunked form equals the recurrence" in "\n".join(found.found)


def test_a_refused_spec_and_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(1, {**FIELDS, "mask_mod": "q_idx >= nothing"}).what == "refused"

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(proofs, "obligations", broken)
    found = tried(1, dict(FIELDS))
    assert (found.what, found.failed) == ("crash", True)
    assert "planted" in found.found[0]


def test_seeds_that_are_kept_are_not_tried_again(tmp_path: Path) -> None:
    kept = tmp_path / "proofs.jsonl"
    one = Proof(7, "proved", "a spec", 0.5, {"proved": 3})
    other = Proof(8, "unknown", "another", 0.5, {"proved": 2, "unknown": 1}, ("unknown: forward",))
    kept.write_text("".join(json.dumps(proof.row()) + "\n" for proof in (one, other)))
    assert read(kept) == [one, other]
    assert proofs.run((7, 8), 1, kept, lambda done: None) == [one, other]
    assert told([one, other]) == "specs: 1 proved, 1 unknown; obligations: 5 proved, 1 unknown"


def test_seeds_from_zero_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "proofs.json"
    found = [
        Proof(0, "proved", "a spec", 0.5, {"proved": 3}),
        Proof(1, "unknown", "another", 0.5, {"proved": 2, "unknown": 1}, ("unknown: forward",)),
        Proof(2, "refuted", "a third", 0.5, {"refuted": 1}, ("refuted: forward",)),
    ]
    proofs.enter(found[1:], path)
    assert not path.exists()
    proofs.enter(found, path)
    assert json.loads(path.read_text()) == {
        "generator": proofs.generator(),
        "tried": 3,
        "specs": {"proved": 1, "unknown": 1, "refuted": 1},
        "obligations": {"proved": 5, "unknown": 1, "refuted": 1},
        "unknown": [1],
        "failed": {"2": ["a third", "refuted: forward"]},
    }


@pytest.mark.parametrize("family", get_args(proofs.Family))
def test_no_recorded_seed_failed(family: proofs.Family) -> None:
    found = json.loads(proofs.record_of(family).read_text())
    assert found["failed"] == {}
    assert found["obligations"].get("unknown", 0) < 0.02 * sum(found["obligations"].values())


def test_the_program_hands_seeds_to_the_prover(tmp_path: Path) -> None:
    kept = tmp_path / "proofs.jsonl"
    kept.write_text(json.dumps(Proof(7, "proved", "a spec", 0.5, {"proved": 3}).row()) + "\n")
    asked = ["--proofs", "--seed", "7", "--count", "1", "--jobs", "1", "--kept", str(kept)]
    found = CliRunner().invoke(fuzzing.__main__.app, asked)
    assert (found.exit_code, found.stdout) == (0, "specs: 1 proved; obligations: 3 proved\n")


def test_the_program_proves_the_specs_of_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--family` chooses the specs and the record. Other families have no random proofs."""
    asked, entered = [], []

    def run(seeds: Any, *_: Any) -> list[Proof]:
        asked.append(([*seeds], _[-1]))
        return [Proof(seed, "proved", "a spec", 0.5, {"proved": 3}) for seed in seeds]

    monkeypatch.setattr(proofs, "run", run)
    monkeypatch.setattr(proofs, "enter", lambda _, path, family: entered.append((path, family)))
    options = ["--proofs", "--count", "2", "--family"]
    invoke, app = CliRunner().invoke, fuzzing.__main__.app
    assert invoke(app, [*options, "linear_attention"]).exit_code == 0
    assert asked == [([0, 1], "linear_attention")]
    path = proofs.RECORD.with_name("proofs_linear_attention.json")
    assert entered == [(path, "linear_attention")]
    for wrong in ([*options, "norm"], ["--expressions", "--family", "attention"]):
        found = invoke(app, wrong)
        assert found.exit_code != 0
        assert "cannot be combined with `--family" in found.output
    assert len(asked) == 1


@pytest.mark.parametrize("program", [fuzzing.__main__.app, mutating.__main__.app])
def test_programs_have_help(program: typer.Typer) -> None:
    assert CliRunner().invoke(program, ["--help"]).exit_code == 0
