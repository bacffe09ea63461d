"""Output of verbs that run kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kgen.cli.results import Results
from kgen.cli.terminal import Format
from kgen.verify.events import Ended, Event, Judged, Ran
from kgen.verify.found import Interrupted

ROWS = [{"spec": "a", "ok": True, "error": 0.5}, {"spec": "b", "ok": False, "error": None}]
COLUMNS = {"spec": 5, "ok": 3, "error": 0}
NOT_RECORDED = "not recorded: add `--record` to write it to the ledger"
RAN = (
    Ran("triton.py", 1, "cases in Triton's interpreter"),
    Ran("hopper.py", 1, "small cases in X"),
)


def results(form: Format = Format.TEXT) -> Results:
    return Results(COLUMNS, "right", form)


def hear(shown: Results, event: Event) -> None:
    shown.hear(event, lambda done, total, doing: None)


def test_a_row_is_printed_at_once_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    shown = results()
    hear(shown, Judged(ROWS[0]))
    assert capsys.readouterr().out == "spec   ok   error\na      yes  0.5\n"
    hear(shown, Judged(ROWS[1]))
    assert shown.judged(ROWS) == 1
    assert capsys.readouterr().out == "b      no   -\n1 right, 1 failed\n"


def test_a_terminal_has_a_table_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = results()
    hear(shown, Judged(ROWS[0]))
    assert capsys.readouterr().out == ""
    assert shown.interrupted(Interrupted(ROWS[:1], 3)) == 130
    out = capsys.readouterr().out
    assert "0.5" in out
    assert out.endswith("1 right, 0 failed, 3 not run: interrupted\n")


@pytest.mark.parametrize("interrupted", [False, True])
def test_json_is_whole(interrupted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    shown = results(Format.JSON)
    hear(shown, Judged(ROWS[0]))
    hear(shown, Ended(RAN, None, True))
    code = shown.interrupted(Interrupted(ROWS[:1], 1)) if interrupted else shown.judged(ROWS[:1])
    assert code == (130 if interrupted else 0)
    out, err = capsys.readouterr()
    assert json.loads(out) == ROWS[:1]
    assert "hopper.py: 1 small cases in X" in err


@pytest.mark.parametrize(
    ("end", "rows", "last"),
    [
        (
            Ended(RAN, None, True),
            ROWS[:1],
            f"1 right, 0 failed; {NOT_RECORDED}",
        ),
        (Ended(RAN, None, True), ROWS, "1 right, 1 failed"),
        (Ended(RAN, None, False), ROWS[:1], "1 right, 0 failed"),
        (
            Ended(RAN, Path("g/verified.json"), False),
            ROWS[:1],
            "1 right, 0 failed; recorded in g/verified.json",
        ),
    ],
)
def test_the_last_line_says_what_was_recorded(
    end: Ended, rows: list[dict[str, object]], last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = results()
    hear(shown, end)
    shown.judged(rows)
    assert capsys.readouterr().out.splitlines() == [
        "triton.py: 1 cases in Triton's interpreter",
        "hopper.py: 1 small cases in X",
        last,
    ]
