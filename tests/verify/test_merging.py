"""Ledgers of several machines: their order does not matter, and a file that is not a ledger changes
nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.specs.hand_built import plain, render
from typer.testing import CliRunner

from kgen.cli import app
from kgen.diagnostics import KgenError
from kgen.verify import ledger
from kgen.verify.merging import merge, union

ONE, TWO = "1" * 64, "2" * 64
PLACE = "interpreter, torch 2.11.0, triton 3.6.0"


def ran(error: float = 1e-3, quick: bool = False, cases: int = 4) -> dict[str, Any]:
    record = {"device": "interpreter", "capability": "", "versions": {}, "passes": ["forward"]}
    return {
        **record,
        "cases": cases,
        "quick": quick,
        "worst": {"out": {"error": error, "ratio": error}},
    }


def of(
    digest: str, record: dict[str, Any], place: str = PLACE, name: str = "a/triton.py"
) -> dict[str, Any]:
    return {digest: {"file": name, "records": {place: record}}}


def written(path: Path, files: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"format": 1, "files": files}))
    return path


LEDGERS = [
    of(ONE, ran(quick=True, error=5e-3)),
    of(ONE, ran()),
    of(ONE, ran(error=2e-3)),
    of(ONE, ran(error=2e-3, cases=3)),
    of(TWO, ran(), name="b/triton.py"),
    of(
        ONE,
        {"versions": {}, "kernels": {"k": {"registers": 9, "spills": 0, "shared": 0}}},
        "compiled sm_90",
    ),
    of(TWO, {"versions": {}, "counts": {"killed": 3}}, "mutants", name="c/triton.py"),
    of(ONE, {"versions": {}, "kernels": ["k"], "beyond": [], "proved": 2, "unknown": 1}, "proof"),
]


def test_order_and_number_make_no_difference() -> None:
    whole = union(LEDGERS)
    for order in itertools.islice(itertools.permutations(LEDGERS), 0, 40000, 997):
        assert union([union(order[:3]), *order[2:], order[0]]) == whole
    assert union([whole, whole]) == whole
    assert set(whole) == {ONE, TWO}
    assert set(whole[ONE]["records"]) == {PLACE, "compiled sm_90", "proof"}
    # A full run wins over a quick one. Of two full runs, the one with the larger errors wins.
    assert whole[ONE]["records"][PLACE] == ran(error=2e-3, cases=3)


def test_newer_texts_take_the_place_of_others(tmp_path: Path) -> None:
    """A merge drops records of an earlier text once the present text ran on that device."""
    render(plain(), tmp_path)
    own = ledger.file_hash(tmp_path / "plain/triton.py")
    new = written(tmp_path / "new.json", of(own, ran(), name="plain/triton.py"))
    old = of(TWO, ran(), name="plain/triton.py")
    old[TWO]["records"]["NVIDIA H200, torch 2.11.0"] = ran()
    older = written(tmp_path / "old.json", old)
    into = tmp_path / ledger.FILENAME
    for order in ([new, older], [older, new]):
        into.unlink(missing_ok=True)
        assert merge(order, into) == (2, 2)
        assert set(ledger.read(tmp_path)[TWO]["records"]) == {"NVIDIA H200, torch 2.11.0"}
    text = into.read_text()
    assert merge([new, older, into], into) == (2, 2)
    assert into.read_text() == text


@pytest.mark.parametrize("name", ["a b", "a (copy)", ".old", "a~", "a+1", "0a", "zz"])
def test_a_copy_of_a_folder_changes_nothing(name: str, tmp_path: Path) -> None:
    """Neither the name of a copied folder nor the order of folders matters: the ledger can be
    read.
    """
    render(plain(), tmp_path)
    own = ledger.file_hash(tmp_path / "plain/triton.py")
    into = written(tmp_path / ledger.FILENAME, of(own, ran(), name="plain/triton.py"))
    before = ledger.read(tmp_path)
    shutil.copytree(tmp_path / "plain", tmp_path / name)
    ledger.update(tmp_path, lambda files: files.update({}))
    assert ledger.read(tmp_path) == before
    merge([into], into)
    assert ledger.read(tmp_path) == before


BAD = {
    "cut off": '{"format": 1, "files": {',
    "foreign": '{"name": "something else"}',
    "of another kgen": json.dumps({"format": 2, "files": {}}),
    "a list": "[1]",
    "no hash": json.dumps({"format": 1, "files": of("x", ran())}),
    "a path": json.dumps({"format": 1, "files": of(ONE, ran(), name="../../etc/passwd")}),
    "a path of another system": json.dumps(
        {"format": 1, "files": of(ONE, ran(), name="..\\..\\x.py")}
    ),
    "a drive": json.dumps({"format": 1, "files": of(ONE, ran(), name="C:/x.py")}),
    "a hidden file": json.dumps({"format": 1, "files": of(ONE, ran(), name="a/.x.py")}),
    "a name in two lines": json.dumps({"format": 1, "files": of(ONE, ran(), name="a/x.py\n")}),
    "a hash in two lines": json.dumps({"format": 1, "files": of(ONE + "\n", ran())}),
    "an error that is no number": json.dumps({"format": 1, "files": of(ONE, ran(error=math.nan))}),
    "an error without end": json.dumps({"format": 1, "files": of(ONE, ran(error=math.inf))}),
    "an error too large": json.dumps({"format": 1, "files": of(ONE, ran(error=7))}).replace(
        "7", "1e999"
    ),
    "an error below none": json.dumps({"format": 1, "files": of(ONE, ran(error=-1e-3))}),
    "cases below none": json.dumps({"format": 1, "files": of(ONE, ran(cases=-1))}),
    "a case and a half": json.dumps({"format": 1, "files": of(ONE, {**ran(), "cases": 1.5})}),
    "true cases": json.dumps({"format": 1, "files": of(ONE, {**ran(), "cases": True})}),
    "proofs below none": json.dumps(
        {"format": 1, "files": of(ONE, {**LEDGERS[-1][ONE]["records"]["proof"], "proved": -1})}
    ),
    "mutants below none": json.dumps(
        {"format": 1, "files": of(ONE, {"versions": {}, "counts": {"killed": -3}})}
    ),
    "something more": json.dumps({"format": 1, "files": of(ONE, {**ran(), "note": "x"})}),
    "an empty record": json.dumps({"format": 1, "files": of(ONE, {})}),
    "cases that are none": json.dumps({"format": 1, "files": of(ONE, {**ran(), "cases": "many"})}),
    "errors that are none": json.dumps(
        {"format": 1, "files": of(ONE, {**ran(), "worst": {"out": 3}})}
    ),
    "not text": "\udcff",
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_ledger_changes_nothing(what: str, tmp_path: Path) -> None:
    good = written(tmp_path / "good.json", LEDGERS[0])
    bad = tmp_path / "bad.json"
    bad.write_bytes(BAD[what].encode(errors="surrogateescape"))
    into = tmp_path / "into.json"
    for paths in ([good, bad], [bad, good], [good, tmp_path / "none.json"]):
        with pytest.raises(KgenError) as caught:
            merge(paths, into)
        (said,) = caught.value.diagnostics
        assert (said.code, said.file) == ("bad-ledger", str(paths[paths[0] == good]))
    assert not into.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "good.json"]


def test_the_verb(tmp_path: Path) -> None:
    paths = [str(written(tmp_path / f"{n}.json", one)) for n, one in enumerate(LEDGERS)]
    into = str(tmp_path / "into.json")
    run = CliRunner().invoke(app, ["ledger", "merge", *paths, "--into", into])
    assert run.exit_code == 0, run.output
    assert run.output.startswith("8 ledgers merged: 5 records of 2 files in ")
    assert json.loads(Path(into).read_text())["files"] == union(LEDGERS)
    Path(paths[3]).write_text("{")
    run = CliRunner().invoke(app, ["ledger", "merge", *paths, "--into", into])
    assert run.exit_code == 2
    assert run.output.count("error[") == 1
