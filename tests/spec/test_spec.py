"""Specs: the stock ones load, wrong ones raise exactly the checked-in message, and positions are
exact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgen.diagnostics import Diagnostic, KgenError, as_json, show
from kgen.expr.nodes import Type, reads
from kgen.family import NAMES, family
from kgen.render.rendering import render_spec
from kgen.spec import schema
from kgen.spec.load import Loaded, load, loads
from kgen.spec.source import Document, decode

ROOT = Path(__file__).resolve().parents[1]
BAD = sorted((ROOT / "bad_specs").glob("*.yaml"))
STOCK = sorted((ROOT.parent / "specs").glob("*.yaml"))

HEAD = "kernel: attention\nname: sample\ndtype: bf16\nhead_dim: 128\n"


def failure(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(KgenError) as caught:
        loads(text, "sample.yaml")
    return caught.value.diagnostics


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_spec_says_what_is_wrong(path: Path) -> None:
    name = f"bad_specs/{path.name}"
    with pytest.raises(KgenError) as caught:
        # Rendering finds clashes of names with emitted files.
        render_spec(loads(decode(path.read_bytes(), name), name))
    assert all(d.hint for d in caught.value.diagnostics)
    text = "\n\n".join(map(show, caught.value.diagnostics)) + "\n"
    golden = path.with_suffix(".stderr")
    if os.environ.get("KGEN_UPDATE_GOLDEN") == "1":
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", STOCK, ids=lambda path: path.stem)
def test_stock_spec_loads(path: Path) -> None:
    loaded = load(path)
    assert loaded.spec.name == path.stem
    assert loaded.spec.summary.written.endswith(".")
    assert "score_mod" not in loaded.trees or loaded.trees["score_mod"].type is Type.FLOAT
    assert "mask_mod" not in loaded.trees or loaded.trees["mask_mod"].type is Type.BOOL


def test_short_forms_are_normalised() -> None:
    loaded: Loaded = loads(
        HEAD.replace("head_dim: 128", "head_dim: {qk: 192, v: 128}")
        + "gqa: any\nlengths: {q: {multiple_of: 128}}\n"
        + (
            "params:\n  window: 8\n  cap: {type: float, value: 30}\n"
            "  prefix: {type: int, runtime: true}\n"
        )
        + "buffers:\n  bias: {shape: [HQ, 4], dtype: bf16, grad: true}\n"
        + "score_mod: cap * tanh(score / cap) + bias[h, -1]\n"
        + "mask_mod: q_idx - kv_idx < window or kv_idx < prefix\n",
        "sample.yaml",
    )
    spec = loaded.spec
    assert (spec.head_dim.qk, spec.head_dim.v, spec.gqa) == (192, 128, "any")
    assert (spec.lengths.q.multiple_of, spec.lengths.kv.multiple_of) == (128, 1)
    assert [(p.scalar, p.value, p.runtime) for p in spec.params.values()] == [
        (Type.INT, 8, False),
        (Type.FLOAT, 30, False),
        (Type.INT, None, True),
    ]
    assert spec.buffers["bias"].shape == ("HQ", 4)
    assert spec.passes == ("forward", "backward")
    assert spec.targets.triton is not None
    assert "score_mod" in loaded.trees
    assert [read.buffer for read in reads(loaded.trees["score_mod"])] == ["bias"]


@pytest.mark.parametrize(
    "scalar",
    [
        "q_idx >= MARK",
        "'q_idx >= MARK'",
        '"q_idx >= MARK"',
        '"\\x71_idx >=\\tMARK"',
        '"x = q_idx\\nx >= MARK"',
        "|\n  x = q_idx\n\n  x >= MARK",
        "|2-  # comment\n  x = (q_idx\n        + 1)\n  x >= MARK\n",
        ">-\n  q_idx\n  >=\n  MARK",
        "q_idx\n  >= MARK",
        '"q_idx \\\n  >= MARK"',
    ],
)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_positions_in_every_kind_of_scalar(scalar: str, ends: str) -> None:
    text = f"\ufeff{HEAD}mask_mod: {scalar}\n".replace("\n", ends)
    (diagnostic,) = failure(text)
    assert diagnostic.code == "unknown-name"
    assert diagnostic.source is not None
    start = (diagnostic.column or 0) - 1
    assert diagnostic.source[start : start + diagnostic.length] == "MARK"


def test_yaml_means_the_core_schema_of_1_2() -> None:
    text = (
        "a: [no, on, yes, 1_000, 0o17, 0x1F, 012, .5, 1e3, -.inf, ~, null, true, '1', 12:30, "
        "2020-01-01]\n"
    )
    assert Document(text, "x").data["a"] == [
        *("no", "on", "yes", "1_000", 15, 31, 12, 0.5, 1000.0, float("-inf"), None, None, True),
        *("1", "12:30", "2020-01-01"),
    ]


@given(st.text() | st.text(alphabet="ab:-[]{}&*!|>'\"%@\n\t #,?0.~"))
def test_any_text_loads_or_is_diagnosed(text: str) -> None:
    for whole in (text, f"{HEAD}{text}", f"{HEAD}mask_mod: {text}"):
        found: tuple[Diagnostic, ...] | None = None
        try:
            loads(whole, "any.yaml")
        except KgenError as error:
            found = error.diagnostics
        assert found != ()
        for diagnostic in found or ():
            assert all(c.isprintable() or c == "\n" for c in show(diagnostic))
            assert json.loads(json.dumps(as_json(diagnostic))) == as_json(diagnostic)


def test_every_error_is_reported_in_the_order_of_the_file() -> None:
    found = failure(HEAD.replace("bf16", "bf61") + "gqa: 0\nmaskmod: x\n")
    assert [(d.code, d.line) for d in found] == [
        ("bad-value", 3),
        ("bad-value", 5),
        ("unknown-key", 6),
    ]


def test_large_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("#" * 100_001)
    for name, code in (
        ("large.yaml", "too-large"),
        ("none.yaml", "cannot-read"),
        (".", "cannot-read"),
    ):
        with pytest.raises(KgenError) as caught:
            load(tmp_path / name)
        found = caught.value.diagnostics[0]
        place = (1, 100_001) if code == "too-large" else (1, 1)
        assert (found.code, found.line, found.column) == (code, *place)


def test_show_escapes_what_a_terminal_would_obey() -> None:
    diagnostic = Diagnostic("x", "m\x1b[31m", "f\n.yaml", 1, 3, 2, "a\tb\x1b]0;c\x07", "\u202e")
    assert show(diagnostic).split("\n") == [
        "error[x]: m\\x1b[31m",
        " --> f\\n.yaml:1:3",
        "  |",
        "1 | a b\\x1b]0;c\\x07",
        "  |   ^^^^^",
        "  = hint: \\u202e",
    ]
    plain = show(diagnostic, color=True)
    for sequence in ("\x1b[1;31m", "\x1b[1;34m", "\x1b[1m", "\x1b[0m"):
        plain = plain.replace(sequence, "")
    assert plain == show(diagnostic)


def test_schema_is_up_to_date() -> None:
    if os.environ.get("KGEN_UPDATE_GOLDEN") == "1":
        schema.PATH.write_text(schema.text(), encoding="utf-8")
    assert schema.PATH.read_text(encoding="utf-8") == schema.text()


def test_schema_asks_for_the_family_first_and_then_for_its_keys() -> None:
    """An editor first offers only `kernel`, then the keys of that family."""
    made = schema.json_schema()
    assert made["required"] == [*made["properties"]] == ["kernel"]
    assert made["properties"]["kernel"]["enum"] == [*NAMES]
    assert not {"anyOf", "oneOf"} & {*made}
    for name, rule in zip(NAMES, made["allOf"], strict=True):
        assert rule["if"] == {"properties": {"kernel": {"const": name}}, "required": ["kernel"]}
        keys = made["$defs"][rule["then"]["$ref"].removeprefix("#/$defs/")]
        assert keys["properties"]["kernel"]["const"] == name
        assert keys["additionalProperties"] is False
        assert {*keys["properties"]} == {*family(name).model.get().model_fields}


@pytest.mark.parametrize("first", NAMES)
def test_schema_is_the_same_whichever_family_is_read_first(first: str) -> None:
    """typing caches `Literal["a", "b"] | None` also for `Literal["b", "a"] | None`.

    So all families use one order.
    """
    code = (
        "from kgen.family import family; from kgen.spec import schema; "
        f"family({first!r}).model.get(); print(schema.text(), end='')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == schema.PATH.read_text(encoding="utf-8")
