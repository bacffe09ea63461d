"""Schedules of attention: each implements the interface, and a call uses the first schedule that
fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_type_hints

import pytest

from kgen.family import Lazy
from kgen.kernels.attention.explaining.explained import Explained
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.prove.setting import Extent
from kgen.kernels.attention.schedules import NAMES, SCHEDULES
from kgen.kernels.attention.schedules.schedule import Schedule
from kgen.kernels.attention.targets.triton.choice import ways_of
from kgen.kernels.attention.targets.triton.made import Branch, Made, Planned
from kgen.kernels.attention.targets.triton.native_calls import Calls, Prepared
from kgen.prove.obligations import Obligation
from kgen.spec.load import Loaded

ROOT = Path(__file__).resolve().parents[3]
TYPES = {
    "made": [Planned, Sequence[Made], Made],
    "explained": [Loaded, AttentionPlan, Explained],
    "obligations": [Loaded, Extent, Iterator[Obligation]],
    "calls": [Prepared, Sequence[Calls], Calls],
}
"""Parameter and result types of the functions of a schedule."""


def test_every_folder_is_listed() -> None:
    folders = {
        path.parent.name for path in ROOT.glob("kgen/kernels/attention/schedules/*/__init__.py")
    }
    assert folders == {*NAMES}
    assert [schedule.name for schedule in SCHEDULES] == [*NAMES]
    assert all(any(ROOT.glob(f"templates/attention/{name}/*.j2")) for name in NAMES)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_a_schedule_has_the_interface(schedule: Schedule) -> None:
    for name, types in TYPES.items():
        offered = getattr(schedule, name)
        assert isinstance(offered, Lazy), name
        assert [*get_type_hints(offered.get()).values()] == types, name


FEW, CHIP = Branch("_few", "SQ <= 64"), Branch("on_chip", "_on_chip(q)", laid_out=True)


def test_a_branch_that_takes_layouts_is_asked_behind_them() -> None:
    ways = ways_of([(FEW, ""), (CHIP, "_chip().")], "_layouts(q, out)")
    assert [(way.when, way.function, way.layouts) for way in ways.first] == [
        ("SQ <= 64", "_few", [])
    ]
    assert [(way.when, way.function, way.layouts) for way in ways.laid_out] == [
        ("_on_chip(q)", "_chip().on_chip", ["layouts"])
    ]
    assert ways.last is None


def test_a_branch_that_takes_the_rest_is_last() -> None:
    rest = Branch("_few", "SQ <= 64", takes_rest=True, leaves="SQ > 64")
    ways = ways_of([(rest, ""), (CHIP, "")], "_layouts(q, out)")
    assert [(way.when, way.function, way.layouts) for way in ways.first] == [
        ("SQ > 64 and _on_chip(q)", "on_chip", ["_layouts(q, out)"])
    ]
    assert ways.laid_out == []
    assert ways.last is not None
    assert (ways.last.function, ways.last.layouts) == ("_few", [])
