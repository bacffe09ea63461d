"""Public sources around FlexAttention are imported with equal values, or refused at their line.

The docs name each reason for a refusal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import expected, got, same
from public_patterns import READ, REFUSED

from kgen.diagnostics import KgenError
from kgen.flex.importing import Options, imported
from kgen.flex.writing import settled
from kgen.spec.load import Loaded

PAGE = Path(__file__).parents[2] / "docs/import-coverage.md"


def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a source in Python and return its names."""
    module = type(sys)(path.stem)
    monkeypatch.setitem(sys.modules, path.stem, module)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return vars(module)


def read(path: Path, asked: dict[str, str]) -> Loaded:
    return settled(imported(str(path), asked, Options(name="pattern")), "pattern.yaml")[1]


def held(value: Any, found: dict[str, torch.Tensor], seen: set[int]) -> dict[str, torch.Tensor]:
    """Return the tensors that are reachable from a value, by name."""
    if id(value) in seen:
        return found
    seen.add(id(value))
    inside: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    inside |= inside.pop("_parameters", None) or {}
    for part in (getattr(value, "__func__", value), getattr(value, "func", value)):
        closure = getattr(part, "__closure__", None) or ()
        names = part.__code__.co_freevars if closure else ()
        inside |= {name: cell.cell_contents for name, cell in zip(names, closure, strict=True)}
    inside |= {"": getattr(value, "__self__", None)}
    for name, one in inside.items():
        if isinstance(one, torch.Tensor):
            found[name] = one
        else:
            held(one, found, seen)
    return found


@pytest.mark.parametrize("name", READ)
def test_a_public_pattern_means_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, source = READ[name]
    path = tmp_path / "public.py"
    path.write_text(source)
    loaded = read(path, asked)
    torch.manual_seed(0)
    scope = run(path, monkeypatch)
    tensors = {n: value for n, value in scope.items() if isinstance(value, torch.Tensor)}
    for field, text in asked.items():
        function = eval(text, scope)
        held(function, tensors, set())
        # A buffer is renamed to `NAME_values` if kernels use its name.
        tensors |= {f"{n}_values": value for n, value in tensors.items()}
        want = expected(function, field)
        # The oracle's scores are float64, whose smallest finite number also means minus infinity.
        want = (
            torch.where(want == torch.finfo(torch.float64).min, -torch.inf, want)
            if field == "score_mod"
            else want
        )
        same(got(loaded, field, tensors), want, 1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_public_pattern_is_refused_at_its_line(name: str, tmp_path: Path) -> None:
    asked, line, words, reason, source = REFUSED[name]
    path = tmp_path / "public.py"
    path.write_text(source)
    with pytest.raises(KgenError) as caught:
        read(path, asked)
    (found,) = caught.value.diagnostics
    assert (found.line, words in found.message) == (line, True), str(caught.value)
    assert found.hint
    assert f"| {name} | {reason} |" in PAGE.read_text(encoding="utf-8")


def test_there_are_forty() -> None:
    assert len(READ) >= 40
