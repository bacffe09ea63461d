"""Every loop of an emitted kernel turns not at all, once and several times in some quick case or check of its spec."""

from __future__ import annotations

from pathlib import Path

import pytest
from loops import counted, turns

SPECS = ("rms_norm", "layer_norm", "decode_gqa", "causal_alibi")
SAMPLE = ("rms_norm",)
REASONS = {
    (
        "_forward_kernel: for tile in tl.range(group",
        2,
    ): "no program of a forward norm has a second tile here: a device runs as many as there are tiles",
    ("_finalize_kernel: for start in tl.range(0, n_parts", 0): "there is at least one part",
    ("_combine_kernel: for first in tl.range(0, splits", 0): "it runs where there are two splits or more",
    ("_splits_by_batch: while used > slots", 2): "a share that grows by used / slots fits in the second turn",
}
"""By the beginning of a loop and the number of turns (2: several), why no case has it."""


def _missing(spec: str, folder: Path) -> list[str]:
    return [
        f"{loop}: {('no', 'one', 'several')[number]} turn(s)"
        for loop, seen in turns(spec, folder).items()
        for number in range(3)
        if number not in seen and not any(loop.startswith(x) and n == number for x, n in REASONS)
    ]


@pytest.mark.parametrize(
    "spec", [x if x in SAMPLE else pytest.param(x, marks=pytest.mark.thorough) for x in SPECS]
)
def test_loops_turn_in_all_ways(spec: str, tmp_path: Path) -> None:
    assert not _missing(spec, tmp_path)


def test_loops_of_kernels_alone_are_counted() -> None:
    text, loops = counted(
        "@triton.jit\ndef _a_kernel(n):\n    for i in tl.range(0, n):\n        while i:\n            i -= 1\n"
        "def launch(n):\n    for i in range(n):\n        pass\n"
    )
    assert loops == ["_a_kernel: for i in tl.range(0, n)", "_a_kernel: while i"]
    assert text.count("_kgen_turns") == 1
    assert text.count("_kgen_turn(") == 1
