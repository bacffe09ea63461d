"""Signatures of all stock specs, on which users of emitted files rely.

`scripts/update` writes `signatures.json` anew. CONTRIBUTING.md has the rules for a change.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("signatures.json")
# Other files call `hopper.py` and `_launch.py`; users never do.
FILES = sorted(
    path
    for path in (ROOT / "generated").glob("*/*.py")
    if path.name not in ("hopper.py", "_launch.py")
)
RULES = "Stable interfaces of emitted files"


def signatures(text: str) -> Iterator[str]:
    """Yield the signature and the result of each public function, and the signature of each
    operator.
    """
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if not node.name.startswith("_"):
            says = re.search(
                r"^ *Returns (.*?)\.(?:\s|$)",
                ast.get_docstring(node) or "",
                re.DOTALL | re.MULTILINE,
            )
            gives = f" -> {' '.join(says[1].split())}" if says else ""
            yield f"{node.name}({ast.unparse(node.args)}){gives}"
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "_operator":
                texts = [arg.value for arg in decorator.args if isinstance(arg, ast.Constant)]
                yield f"operator {texts[0]}"


@cache
def found() -> dict[str, list[str]]:
    return {f"{path.parent.name}/{path.name}": list(signatures(path.read_text())) for path in FILES}


def test_signatures_are_as_recorded() -> None:
    now = found()
    if os.environ.get("KGEN_UPDATE_GOLDEN") == "1":
        RECORD.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    recorded = json.loads(RECORD.read_text())
    differ = [
        f"{name}: {', '.join(sorted({*recorded.get(name, ())} ^ {*now.get(name, ())}))}"
        for name in sorted({*recorded, *now})
        if recorded.get(name) != now.get(name)
    ]
    assert not differ, "\n".join(
        [
            (
                f'stable interfaces have changed: read "{RULES}" in CONTRIBUTING.md, then run '
                "scripts/update"
            ),
            *differ,
        ]
    )


def test_every_file_has_a_function() -> None:
    """Each file has the function of the spec, or of the part that it computes. `__init__.py` has
    the signature of the files.
    """
    for name, has in found().items():
        spec, _, file = name.partition("/")
        own = [line for line in has if line.startswith((f"{spec}(", f"{spec}_delta("))]
        if file == "__init__.py" and not own:
            text = " ".join((ROOT / "generated" / name).read_text().split())
            assert f'__all__ = ["{spec}"' in text.replace("[ ", "[")
            continue
        assert own, name
        if file == "__init__.py":
            beside = [
                line
                for other, lines in found().items()
                if other.startswith(f"{spec}/")
                for line in lines
            ]
            assert {
                line.partition(" -> ")[0] for line in beside if line.startswith(f"{spec}(")
            } == {own[0].partition(" -> ")[0]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def f(x, *, eps=1e-06):", "def f(x, *, epsilon=1e-06):"),
        ("def f(x, *, eps=1e-06):", "def f(x, *, eps=1e-05):"),
        ("def f(x, *, eps=1e-06):", "def f(x, w, *, eps=1e-06):"),
        ("Returns out.", "Returns (out, h)."),
        ('@_operator("f")', '@_operator("g")'),
    ],
)
def test_what_a_user_would_see_is_seen(old: str, new: str) -> None:
    text = (
        '@_operator("f")\ndef _f_op(x):\n    return x\n\n\n'
        'def f(x, *, eps=1e-06):\n    """F of x.\n\n    Returns out. Raises.\n    """\n'
    )
    assert list(signatures(text)) == ["operator f", "f(x, *, eps=1e-06) -> out"]
    assert list(signatures(text.replace(old, new))) != list(signatures(text))


def test_the_rules_are_there() -> None:
    assert f"\n## {RULES}\n" in (ROOT / "CONTRIBUTING.md").read_text()
