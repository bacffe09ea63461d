"""The corner specs of `tests/specs`: a change that means to leave kernels alone leaves their text
alone.

`scripts/update` writes `corners.json` anew, the hash of each emitted body.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_unused import unread

from kgen.render.header import body_hash
from kgen.render.rendering import render_spec
from kgen.spec.load import load

TESTS = Path(__file__).resolve().parent
CORNERS = sorted((TESTS / "specs").glob("*.yaml"))
GOLDEN = TESTS / "corners.json"


@pytest.mark.parametrize("path", CORNERS, ids=lambda p: p.stem)
def test_text_is_as_recorded(path: Path) -> None:
    files = render_spec(load(path))
    found = {f"{path.stem}/{name}": body_hash(text) for name, text in sorted(files.items())}
    golden = json.loads(GOLDEN.read_text())
    if os.environ.get("KGEN_UPDATE_GOLDEN") == "1":
        golden = {n: h for n, h in golden.items() if not n.startswith(f"{path.stem}/")} | found
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    recorded = {n: h for n, h in golden.items() if n.startswith(f"{path.stem}/")}
    assert found == recorded, (
        "emitted text has changed: read it (kgen render --stdout), then run scripts/update"
    )
    assert [
        found for name, text in files.items() if name.endswith(".py") for found in unread(text)
    ] == []


def test_nothing_else_is_recorded() -> None:
    assert {name.partition("/")[0] for name in json.loads(GOLDEN.read_text())} == {
        p.stem for p in CORNERS
    }
