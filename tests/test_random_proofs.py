"""Proofs of random specs of attention: a sample, and specs on which the prover once failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from kgen.spec.load import loads

SAMPLE = (0, 2, 4, 5, 7, 9, 10, 11, 12, 13)
FIELDS = {"kernel": "attention", "name": "drawn", "dtype": "bf16", "head_dim": 64}


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_sample_of_seeds(seed: int) -> None:
    found = tried(seed)
    assert (found.what, found.found) == ("proved", ())


def test_a_seed_is_one_spec() -> None:
    assert [drawn(seed) for seed in range(40)] == [drawn(seed) for seed in range(40)]


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


def test_no_recorded_seed_failed() -> None:
    found = json.loads(proofs.RECORD.read_text())
    assert found["failed"] == {}
    assert found["obligations"]["unknown"] < 0.02 * sum(found["obligations"].values())


def test_the_program_hands_seeds_to_the_prover(tmp_path: Path) -> None:
    kept = tmp_path / "proofs.jsonl"
    kept.write_text(json.dumps(Proof(7, "proved", "a spec", 0.5, {"proved": 3}).row()) + "\n")
    asked = ["--proofs", "--seed", "7", "--count", "1", "--jobs", "1", "--kept", str(kept)]
    found = CliRunner().invoke(fuzzing.__main__.app, asked)
    assert (found.exit_code, found.stdout) == (0, "specs: 1 proved; obligations: 3 proved\n")


@pytest.mark.parametrize("program", [fuzzing.__main__.app, mutating.__main__.app])
def test_programs_have_help(program: typer.Typer) -> None:
    assert CliRunner().invoke(program, ["--help"]).exit_code == 0
