"""A factor of 1.01 in one product or result fails every quick case in which it changes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.interpreters.sensitivity import PLANTED, ROOT

from kgen.spec.load import load
from kgen.verify.families import problem_of


@pytest.mark.parametrize("name", [name for name, planted in PLANTED.items() if planted.sample])
def test_a_factor_is_found(name: str, tmp_path: Path) -> None:
    planted = PLANTED[name]
    found = planted.found(tmp_path, planted.sample)
    assert [case for case, messages in found.items() if not messages] == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLANTED)
def test_a_factor_is_found_in_every_case(name: str, tmp_path: Path, verdict: Any) -> None:
    """Neither does a case find it that is listed as one that cannot."""
    planted = PLANTED[name]
    beside = ROOT / "generated" / planted.spec / "_launch.py"
    verdict(problem_of(load(ROOT / "specs" / f"{planted.spec}.yaml")), planted.text(), beside)
    found = planted.found(tmp_path)
    unseen = {case for case, messages in found.items() if not messages}
    assert unseen == {case for case in planted.unseen if case in found}
    assert {*planted.unseen} <= {*found}
