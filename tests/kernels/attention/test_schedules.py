"""Schedules of attention: each implements the interface, and a call uses the first schedule that
fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kgen.family import Lazy
from kgen.kernels.attention.explaining.explained import Explained
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.prove.setting import Extent
from kgen.kernels.attention.schedules import NAMES, SCHEDULES
from kgen.kernels.attention.schedules.schedule import Schedule
from kgen.kernels.attention.targets.triton.choice import (
    backward_ways,
    portable_first,
    ways_of,
    workspace_lines,
)
from kgen.kernels.attention.targets.triton.launches import Launch
from kgen.kernels.attention.targets.triton.made import (
    BackwardBranch,
    Branch,
    Made,
    Planned,
    follower_of,
)
from kgen.kernels.attention.targets.triton.native_calls import Calls, Prepared
from kgen.prove.obligations import Obligation
from kgen.spec.load import Loaded
from kgen.targets.code import lines_of

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
    assert ways.last == []


def test_a_branch_that_takes_the_rest_is_last() -> None:
    rest = Branch("_few", "SQ <= 64", takes_rest=True, leaves="SQ > 64")
    ways = ways_of([(rest, ""), (CHIP, "")], "_layouts(q, out)")
    assert [(way.when, way.function, way.layouts) for way in ways.first] == [
        ("SQ > 64 and _on_chip(q)", "on_chip", ["_layouts(q, out)"])
    ]
    assert ways.laid_out == []
    assert [(way.function, way.layouts) for way in ways.last] == [("_few", [])]


UNUSED: Any = None
DQ = Launch((), (), (), "_dq_kernel", "_DQ_TILES", "n_tiles", UNUSED)
OLD = BackwardBranch("on_old", "old", "_old(q)", ("dk", "dv"), dq=False, overlaps=True)
RECENT = BackwardBranch(
    function="on_recent",
    variable="recent",
    when="_recent(q)",
    operands=("dq", "dk", "dv"),
    overlaps=True,
    counts=True,
    sums="sums_for_dq",
    ends="dq_of_sums",
)
PLAIN = BackwardBranch("plain", "one", "q.shape[2] == 1", ("dq", "dk", "dv"))


def test_the_backward_pass_takes_the_first_branch_that_serves() -> None:
    """A branch without dq has the portable launch of dq before its own."""
    ways = backward_ways([PLAIN, OLD, RECENT], RECENT, ["q", "k", "v"], DQ)
    given = "layouts, q, k, v, dout, lse, delta"
    assert [(way.test, way.variable, way.call) for way in ways] == [
        ("if", "one", f"plain({given}, dq, dk, dv)"),
        ("elif", "old", f"on_old({given}, dk, dv)"),
        ("elif", "recent", f"on_recent({given}, dq, dk, dv)"),
    ]
    assert [way.before for way in ways] == [[], [DQ], []]
    assert [way.ends for way in ways] == ["", "", "dq_of_sums"]
    assert [lines_of(way.ended) for way in ways] == [
        [],
        [],
        [
            "if dq_sum is not None and shared is None:",
            "    dq_of_sums(layouts, dq_sum, dq, scale)",
        ],
    ]


@pytest.mark.parametrize(
    ("branches", "count"), [([], 2), ([OLD], 1), ([OLD, OLD], 1), ([RECENT], 0), ([OLD, RECENT], 0)]
)
def test_portable_launches_of_every_call(branches: list[BackwardBranch], count: int) -> None:
    """Without branches dq, dk and dv; dq if no branch computes it."""
    assert portable_first(branches) == count
    before = [way.before for way in backward_ways(branches, None, ["q"], DQ)]
    assert before == [[DQ] if count == 0 and not branch.dq else [] for branch in branches]


def test_counters_and_sums_are_of_all_branches() -> None:
    later = BackwardBranch(
        "on_later", "later", "_later(q)", (), overlaps=True, counts=True, sums="_later().sums"
    )
    assert workspace_lines([PLAIN, OLD], None) == []
    assert workspace_lines([OLD, RECENT, later], None) == [
        "counters = q.new_empty(2, dtype=torch.int32) if old or recent or later else None",
        "dq_sum = sums_for_dq(q, k) if recent else _later().sums(q, k) if later else None",
    ]
    assert workspace_lines([RECENT, later], RECENT)[1] == (
        "dq_sum = (sums_for_dq(q, k) if shared is None else shared.dq_sum) if recent"
        " else _later().sums(q, k) if later else None"
    )


def test_the_kernel_of_delta_starts_the_next_kernel_for_branches_that_overlap() -> None:
    assert follower_of([PLAIN]) is None
    follower = follower_of([PLAIN, OLD, RECENT])
    assert follower is not None
    assert (follower.when, follower.counts) == ("old or recent", True)


def test_a_branch_names_the_module_of_its_functions() -> None:
    inside = RECENT.inside("_recent_module().")
    functions = ("on_recent", "sums_for_dq", "dq_of_sums")
    assert (inside.function, inside.sums, inside.ends) == tuple(
        f"_recent_module().{x}" for x in functions
    )
    assert (PLAIN.inside("_module().").sums, PLAIN.inside("").function) == ("", "plain")
