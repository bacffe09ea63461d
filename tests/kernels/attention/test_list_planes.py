"""Each tile reads its own list: proved for the emitted code, refuted with planted errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kgen.kernels.attention.lowered import block_mask, ranges
from kgen.kernels.attention.lowered.model import SpanLoops
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.prove import list_planes
from kgen.kernels.attention.prove.claims import LOADS, OWN_LIST, STORES
from kgen.kernels.attention.prove.list_planes import of_planes
from kgen.kernels.attention.prove.obligations import of_pairs
from kgen.prove.obligations import Decision, Verdict, decide
from kgen.spec.load import Loaded, loads
from kgen.targets.code import Assign, Code, Name, rewritten

TEMPLATE = Path(__file__).resolve().parents[3] / "templates/attention/triton/_block_mask.j2"
LINES = (
    "kinds_ptr += row.to(tl.int64) * kv_blocks",
    "q_start = row % q_blocks * BLOCK_SIZE",
    "if row < planes * q_blocks:",
    "kinds_ptr + own, 1, kv_blocks,",
    "row -= planes * q_blocks",
    "first = (row // kv_blocks).to(tl.int64) * q_blocks * kv_blocks + row % kv_blocks",
    "kinds_ptr + first, kv_blocks, q_blocks,",
)
SHAPES = ("[SQ, SK]", "[B, SQ, SK]", "[HQ, SQ, SK]", "[B, HQ, SQ, SK]")


def listed(shape: str) -> Loaded:
    names = {"B": "b", "HQ": "h", "SQ": "q_idx", "SK": "kv_idx"}
    at = ", ".join(names[size] for size in shape.strip("[]").split(", "))
    fields = "kernel: attention\nname: x\ndtype: bf16\nhead_dim: 64\ngqa: 2\nblock_mask: always\n"
    return loads(
        f"{fields}buffers: {{seen: {{shape: {shape}, dtype: bool}}}}\nmask_mod: 'seen[{at}]'\n",
        "x.yaml",
    )


def decisions(shape: str) -> dict[str, Decision]:
    plan = plan_attention(listed(shape))
    loops: dict[str, TileLoop | None] = {"forward": plan.forward, "dq": plan.dq, "dkdv": plan.dkdv}
    assert plan.block_mask is not None
    return {
        name: decide(of_planes(name, plan.block_mask, loop, 64), 10.0)
        for name, loop in loops.items()
        if loop is not None
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tile_reads_its_own_list(shape: str) -> None:
    assert {name: found.verdict for name, found in decisions(shape).items()} == dict.fromkeys(
        ("forward", "dq", "dkdv"), Verdict.PROVED
    )


def test_lists_that_are_made_for_another_head_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that classifies blocks swaps heads and sequences."""
    lines = block_mask.plane_lines

    def swapped(mask: Any) -> list[Any]:
        (line,) = lines(mask)
        assert isinstance(line, Assign)
        return [Assign(line.names[::-1], line.values)]

    monkeypatch.setattr(list_planes, "plane_lines", swapped)
    found = decisions("[B, HQ, SQ, SK]")
    assert {name: one.verdict for name, one in found.items()} == dict.fromkeys(
        found, Verdict.REFUTED
    )


def test_a_list_of_another_sequence_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel indexes by head, although lists differ between sequences."""
    loops = ranges.listed_loops

    def of_head(code: Code) -> Code | None:
        return Name("h") if code == Name("b") else None

    def wrong(*args: Any) -> SpanLoops:
        found = loops(*args)
        first, *rest = found.bounds
        return replace(found, bounds=[first.map(lambda code: rewritten(code, of_head)), *rest])

    monkeypatch.setattr(list_planes, "listed_loops", wrong)
    found = decisions("[B, SQ, SK]")
    assert {name: one.verdict for name, one in found.items()} == dict.fromkeys(
        found, Verdict.REFUTED
    )
    assert {one.why for one in found.values()} & {"b", "a list of the mask"}


def test_the_template_says_the_same() -> None:
    text = TEMPLATE.read_text()
    assert [line for line in LINES if line not in text] == []


@pytest.mark.parametrize("what", [OWN_LIST, LOADS, STORES])
def test_it_is_stated_before_a_write(what: str) -> None:
    kernels = {o.kernel.split()[0] for o in of_pairs(listed("[B, SQ, SK]")) if o.what == what}
    assert kernels >= {"forward", "dq", "dkdv"}
