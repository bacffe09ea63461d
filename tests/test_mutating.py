"""`tests/mutating`: each operator has mutants, and verification finds those of a sample."""

from __future__ import annotations

import ast
import json
import pickle
import threading
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
from mutating import __main__ as script
from mutating import mutants as of_mutants
from mutating import on_gpu
from mutating.operators import OPERATORS, Mutant, mutants
from mutating.reasons import converts_to_int64, reason, unseen
from mutating.running import File, Outcome, _rank, refuted, tried
from support.interpreters.own_process import interpreted
from support.running import parts
from support.running.last_words import says

from kgen.diagnostics import KgenError
from kgen.verify.farm.tasks import lost

ROOT = Path(__file__).resolve().parents[1]


def test_each_operator_has_mutants() -> None:
    names = (
        "generated/causal/triton.py",
        "generated/causal/hopper.py",
        "generated/rms_norm/triton.py",
    )
    found = {mutant.operator for name in names for mutant in mutants((ROOT / name).read_text())}
    assert found == {*OPERATORS}


def test_mutants_differ_in_one_piece_and_can_be_read() -> None:
    text = (ROOT / "generated/rms_norm/triton.py").read_text()
    found = mutants(text)
    assert len({one.of(text) for one in found}) == len(found)
    for one in found:
        assert text[one.begin : one.end] == one.old
        ast.parse(one.of(text))


def test_reasons_are_of_few_mutants() -> None:
    """Reasons cover few mutants, so they cannot excuse most of them."""
    for name in (
        "causal/triton.py",
        "causal/hopper.py",
        "document_causal/hopper.py",
        "decode_gqa/triton.py",
        "kda/triton.py",
    ):
        found = mutants((ROOT / "generated" / name).read_text())
        explained = [one for one in found if reason(name, one)[0] and one.operator != "key"]
        assert len(explained) < len(found) / 15


SAMPLE = {
    "a mask left out": ("causal", "triton.py", 'qk = tl.where(mask, qk, float("-inf"))', "qk = qk"),
    "a bound": (
        "causal",
        "triton.py",
        "kv_hi = tl.minimum(q_last + 1, SK)",
        "kv_hi = tl.minimum(q_last, SK)",
    ),
    "a wait left out": (
        "full",
        "hopper.py",
        "        _consumer_wait(kv_ring, n_used)\n        qk_async",
        "        qk_async",
    ),
    "a mask that holds everywhere": (
        "causal",
        "triton.py",
        "lse, mask=q_live)",
        "lse, mask=(q_live) | True)",
    ),
    "an arrival that counts twice": (
        "causal",
        "hopper.py",
        "count=1, pred=wanted ^ True",
        "count=2, pred=wanted ^ True",
    ),
    "a fence left out": (
        "causal",
        "hopper.py",
        "scheduler = _tile_scheduler(2)\n    fence_async_shared()",
        "scheduler = _tile_scheduler(2)",
    ),
    "rows of a tile": ("rms_norm", "triton.py", "tile * ROWS", "tile"),
    "the scale of a key left out": (
        "serve_window_fp8",
        "triton.py",
        "qk = qk * k_of_keys[None, :]",
        "qk = qk",
    ),
    "one part merged as all": (
        "serve_causal",
        "triton.py",
        "at = ((slot + part) * HKV + h_kv) * BLOCK_M + own",
        "at = (slot * HKV + h_kv) * BLOCK_M + own",
    ),
    "all tokens in one row of a page": (
        "serve_window_fp8",
        "triton.py",
        "page, row = slot // PAGE, slot % PAGE",
        "page, row = slot // PAGE, 0",
    ),
    "a chunk without its diagonal": (
        "linear_attention_elu",
        "triton.py",
        "pair = i[:, None] >= i[None, :]\n    p = tl.where(pair, p, 0.0) * scale\n    out =",
        "pair = i[:, None] > i[None, :]\n    p = tl.where(pair, p, 0.0) * scale\n    out =",
    ),
    "tokens after the end of a chunk": (
        "linear_attention_elu",
        "triton.py",
        "k = tl.load(k_rows + first * stride_k_t, mask=live[:, None], other=0.0)",
        "k = tl.load(k_rows + first * stride_k_t)",
    ),
    "a state that starts at zero in each step": (
        "linear_attention_elu",
        "triton.py",
        "state = tl.load(of_state).to(tl.float32)",
        "state = tl.load(of_state).to(tl.float32) * 0",
    ),
}


def test_tiles_of_linear_attention_have_mutants() -> None:
    found = mutants((ROOT / "generated/gated_delta_rule/triton.py").read_text())
    tiles = {(one.old, one.new) for one in found if one.operator == "tile"}
    assert {("BLOCK_K", "BLOCK_V"), ("BLOCK_V", "BLOCK_K"), ("BLOCK_V", "(2 * BLOCK_V)")} <= tiles


def test_cases_of_the_changed_pass_run_first() -> None:
    cases = [(group, "other") for group in ("forward", "backward", "decode")]
    for function, group in (("_states_back_kernel", "backward"), ("_decode_op", "decode")):
        assert min(cases, key=lambda one: _rank(*one, function)) == (group, "other")
    assert _rank("forward", "guarded", "_delta") < _rank("forward", "other", "_delta")


@pytest.mark.parametrize("what", SAMPLE)
def test_those_of_a_sample_are_killed(what: str) -> None:
    spec, name, old, new = SAMPLE[what]
    path = ROOT / "generated" / spec / name
    text = path.read_text()
    begin = text.index(old)
    function = text[:begin].rpartition("\ndef ")[2].partition("(")[0]
    mutant = Mutant(what, function, 0, begin, begin + len(old), old, new, kernel=True)
    file = File(spec, (ROOT / "specs" / f"{spec}.yaml").read_text(), path)
    outcome = interpreted(tried, file, mutant)
    assert outcome.what == "killed", outcome


@pytest.mark.parametrize(
    ("old", "by"),
    [
        ("(pid // H % blocks).to(tl.int64)", "proof of q_map 16: no int32 expression overflows"),
        ("tl.where(pair, p, 0.0)", ""),
    ],
)
def test_proofs_find_mutants_that_only_large_tensors_show(old: str, by: str) -> None:
    """Values are not part of the proof of a kernel: it finds only wrong addresses."""
    file = _of_file("linear_attention_elu/triton.py")
    text = file.path.read_text()
    begin = text.index(old)
    function = text[:begin].rpartition("\ndef ")[2].partition("(")[0]
    new = old.partition(".to(")[0] if by else "p"
    mutant = Mutant("", function, 0, begin, begin + len(old), old, new, kernel=True)
    assert refuted(file, mutant) == by
    assert refuted(_of_file("causal/triton.py"), of_mutants.NOTHING) == ""


def test_parts_are_put_together(tmp_path: Path) -> None:
    """If a worker is lost, its mutants are lost, and the earlier report of the file stays."""
    path = ROOT / "generated/rms_norm/triton.py"
    file = File("rms_norm", (ROOT / "specs/rms_norm.yaml").read_text(), path)
    drawn = script._drawn(file, 20, 0)
    tasks = of_mutants.tasks(file, drawn)
    assert [len(task.job.mutants) for task in tasks] == [16, 4]
    (task,) = of_mutants.tasks(file, drawn[:3])
    outcomes = [of_mutants.outcome(row) for row in task.work(task.job, lost("gone"))]
    assert outcomes == [Outcome("rms_norm/triton.py", one, "lost", "gone") for one in drawn[:3]]
    report = tmp_path / "report.json"
    with (
        mock.patch.object(script, "REPORT", report),
        mock.patch.object(script.ledger, "record_mutated"),
    ):
        script._record(outcomes)
        assert json.loads(report.read_text()) == {}
    places = [tmp_path / f"{n}.json" for n in range(2)]
    for place, some in zip(places, (outcomes[:2], outcomes[2:]), strict=True):
        parts.write(place, script.OF, {script.key(o): asdict(o) for o in some})
    assert script.merged(places) == script.merged([*places[::-1], places[0]])
    assert {str(one.mutant) for one in script.merged(places)} == {str(one) for one in drawn[:3]}
    # Two mutants on one line with equal text.
    alike = [
        replace(outcomes[0], mutant=replace(drawn[0], begin=begin), what=what)
        for begin, what in ((7, "lived"), (99, "killed"))
    ]
    assert len({str(one.mutant) for one in alike}) == 1
    parts.write(places[0], script.OF, {script.key(o): asdict(o) for o in alike})
    assert [one.what for one in script.merged([places[0]])] == ["lived", "killed"]
    for change in (
        {"what": "nonsense"},
        {"loads": "many"},
        {"mutant": {**asdict(drawn[0]), "line": None}},
    ):
        parts.write(
            places[0], script.OF, {script.key(outcomes[0]): {**asdict(outcomes[0]), **change}}
        )
        with pytest.raises(KgenError, match="it has no results"):
            script.merged(places)
    parts.write(places[0], "something else", {})
    with pytest.raises(KgenError, match="it is of something else"):
        script.merged(places)


def _of_file(name: str) -> File:
    path = ROOT / "generated" / name
    return File(path.parent.name, (ROOT / "specs" / f"{path.parent.name}.yaml").read_text(), path)


def test_what_is_marked_for_a_gpu_is_of_the_text_as_it_is() -> None:
    file = _of_file("causal/triton.py")
    one, other = mutants(file.path.read_text())[:2]
    row = {
        "survivors": [
            {"mutant": str(one), "what": "gpu"},
            {"mutant": str(other), "what": "slower"},
        ],
    }
    assert on_gpu.marked(file, row) == [one]
    row["survivors"][0]["on"] = {"device": "a GPU", "by": "strides several"}
    assert on_gpu.marked(file, row) == []
    del row["survivors"][0]["on"]
    row["survivors"][0]["mutant"] = str(one).replace(f"{one.line}:", f"{one.line + 1}:")
    with pytest.raises(KgenError, match=r"the report is of another text of causal/triton\.py"):
        on_gpu.marked(file, row)


def test_large_calls_have_a_gpu_each() -> None:
    """Each large call has its own GPU. The others share the GPUs evenly."""
    file = _of_file("causal/hopper.py")
    found = mutants(file.path.read_text())
    large = [one for one in found if converts_to_int64(one)][:4]
    small = [one for one in found if one not in large][:12]
    running: Counter[int] = Counter()
    most: Counter[tuple[bool, int]] = Counter()
    lock, together = threading.Lock(), threading.Barrier(6)

    def tried(_: File, mutant: Mutant, gpu: int, only: str) -> tuple[str, str]:
        with lock:
            running[gpu] += 1
            most[mutant in large, gpu] = max(most[mutant in large, gpu], running[gpu])
        if mutant in small:
            together.wait(60)
        with lock:
            running[gpu] -= 1
        return ("", "") if only else (f"on {gpu}", "wrong")

    got = list(on_gpu.found_wrong([(file, one) for one in (*large, *small)], 6, 2, tried))
    assert {(one, by) for _, one, by in got} == {(one, "wrong") for one in (*large, *small)}
    assert most[False, 0] == most[False, 1] == 3
    assert most[True, 0] == most[True, 1] == 1


def test_where_a_file_is_wrong_as_it_is_nothing_is_said_about_its_mutants() -> None:
    file = _of_file("causal/triton.py")
    found = mutants(file.path.read_text())[:6]
    asked: Counter[str] = Counter()

    def tried(_: File, mutant: Mutant, __: int, only: str) -> tuple[str, str]:
        if mutant is of_mutants.NOTHING:
            asked[only] += 1
            return only, "out" if only == "b" else ""
        return "abc"[found.index(mutant) % 3], "" if mutant == found[2] else "dq"

    got = {
        one: by for _, one, by in on_gpu.found_wrong([(file, one) for one in found], 4, 1, tried)
    }
    right, wrong = "dq", f"{on_gpu.LOST}the file is wrong as it is: out"
    assert [got[one] for one in found] == [right, wrong, "", right, wrong, right]
    assert asked == {"a": 1, "b": 1, "c": 1}


def _asked(name: str, only: str) -> tuple[str, list[str]]:
    """Run the unchanged file, as another process receives it, at one place.

    Return the verdict and the places that it reached. There is no GPU.
    """
    came_to: list[str] = []
    with mock.patch("torch.cuda.set_device"):
        as_it_is = pickle.loads(pickle.dumps(of_mutants.NOTHING))
        return on_gpu.wrong(_of_file(name), as_it_is, 0, only, came_to.append), came_to


def test_a_file_as_it_is_is_asked_of_the_place_and_of_no_other() -> None:
    word, came_to = interpreted(_asked, "rms_norm/triton.py", on_gpu.LARGE)
    assert word != ""
    assert came_to == [on_gpu.IMPORT, on_gpu.LARGE]
    word, came_to = interpreted(_asked, "rms_norm/triton.py", "nowhere")
    assert (word, came_to) == (f"{on_gpu.LOST}there is no nowhere", [on_gpu.IMPORT])
    assert interpreted(_asked, "rms_norm/triton.py", on_gpu.IMPORT) == ("", [on_gpu.IMPORT])


def test_what_a_mutant_comes_to_is_waited_for_and_no_longer() -> None:
    for places, word in {
        ("a", "wrong"): "dq",
        ("a", "right"): "",
        ("a", "spins"): "no end of spins",
        ("a",): f"{on_gpu.LOST}its process ended in a",
    }.items():
        seconds = 5.0 if "spins" in places else 20.0
        assert on_gpu.last_word(says, places, seconds) == (places[-1], word)


def test_of_mutants_that_are_called_alike_each_has_to_be_found() -> None:
    lost = f"{on_gpu.LOST}others have the memory"
    for pair, both in {("a", "b"): "a", ("a", ""): "", (lost, ""): "", ("a", lost): lost}.items():
        assert script.alike(*pair) == both
        assert bool(script.alike(*pair[::-1])) == bool(both)
        assert script.alike(*pair[::-1]).startswith(on_gpu.LOST) == both.startswith(on_gpu.LOST)


def test_what_lived_is_listed_with_a_reason() -> None:
    report = json.loads(script.REPORT.read_text())
    for called, row in report.items():
        file, lived = _of_file(called), [one for one in row["survivors"] if one["what"] == "lived"]
        for mutant in mutants(file.path.read_text()) if lived else ():
            for one in (one for one in lived if one["mutant"] == str(mutant)):
                assert one["why"] == unseen(called, mutant) != "", f"{called}:{mutant}"


def test_the_report_hears_of_gpus() -> None:
    mark, other = "7: key in _forward: `k` -> `v`", "9: key in _forward: `q` -> `v`"
    survivors = [{"mutant": m, "what": "gpu", "why": "a rule"} for m in (mark, other, other)]
    report = {"a/triton.py": {"operators": {"key": {"gpu": 3}}, "survivors": survivors}}
    for name, by in ((mark, "strides several"), (other, "")):
        report = script.told_by_gpu(report, ("a/triton.py", name), by, "a GPU")
    (row,) = report.values()
    assert row["operators"] == {"key": {"gpu": 1, "lived": 2}}
    assert row["survivors"] == [
        {
            "mutant": mark,
            "what": "gpu",
            "why": "a rule",
            "on": {"device": "a GPU", "by": "strides several"},
        },
        *[{"mutant": other, "what": "lived", "why": "nothing is wrong on a GPU"}] * 2,
    ]
