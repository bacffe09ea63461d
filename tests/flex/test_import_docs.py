"""Importing the example of docs/import.md gives the spec that the page shows."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kgen.cli import app

PAGE = Path(__file__).resolve().parents[2] / "docs/import.md"


def test_the_example_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    source = text.partition("```python\n")[2].partition("```")[0]
    command = text.partition("```sh\nkgen ")[2].partition("\n")[0]
    Path("mods.py").write_text(source)
    with pytest.raises(SystemExit) as caught:
        app(shlex.split(command), prog_name="kgen")
    assert caught.value.code == 0
    wanted = text.partition("<!-- imported -->\n```yaml\n")[2].partition("```")[0]
    assert Path("yours/alibi_document_causal.yaml").read_text() == wanted
