"""Every loop of an emitted kernel runs zero, one and several turns.

The quick cases and checks of its spec together show all three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.interpreters.loops import ROOT, Turns, counted, turns

from kgen.spec.load import load
from kgen.verify.families import problem_of


class Listed(NamedTuple):
    """Exception for a loop that does not run in all three ways.

    `number` is None if the file fixes the number of turns.
    """

    loop: str
    number: int | None
    reason: str
    specs: tuple[str, ...] = ()
    """The specs with this exception, or all if empty."""


FILE = "triton.py"
HOPPER = "hopper.py"
SPECS = {
    FILE: {path.stem for path in (ROOT / "specs").glob("*.yaml")},
    HOPPER: {path.parent.name for path in (ROOT / "generated").glob("*/hopper.py")},
}
SAMPLE = {FILE: ("rms_norm",), HOPPER: ()}
NOT_RUN = {(FILE, "softcap_fast"): "the interpreter of Triton has no inline assembly"}
"""Files that no interpreter runs."""

CHUNKS = "a call without tokens runs portable kernels, and the producer loads one chunk more"
UNPACKED = tuple(
    x for x in SPECS[HOPPER] if "varlen: true" not in (ROOT / "specs" / f"{x}.yaml").read_text()
)
"""Files without packed sequences, which launch programs for the largest possible number of
tiles.
"""
LAGGING = tuple(
    x
    for x in SPECS[HOPPER]
    if "LAG: tl.constexpr = 1" in (ROOT / "generated" / x / HOPPER).read_text()
)
"""Files in which values are loaded one tile after their keys."""
FIXED = "the file fixes the number of turns"
NO_KEYS = "there are as many queries as keys, so a call without keys has no program"
NO_SEQUENCES = "offsets of no sequence are refused"
NO_ITEMS = "a call without sequences launches no kernel"
ONE_SEGMENT = "keys of quick cases fit into a segment of 2048"
SPLIT = "a split tile has two parts or more"
LISTED = {
    FILE: (
        Listed(
            "_finalize_kernel: for start in tl.range(0, n_parts", 0, "there is at least one part"
        ),
        Listed(
            "_combine_kernel: for first in tl.range(0, splits", 0, "it runs with two splits or more"
        ),
        Listed(
            "_splits_by_batch: while used > slots",
            2,
            "a share grown by used / slots fits in the second turn",
        ),
        Listed("_dkdv_kernel: for h in range(h_kv * GQA", 0, "a key-value head has a query head"),
        Listed(
            "_dkdv_kernel: for h in range(h_kv * GQA",
            1,
            "`gqa` is more",
            ("llama3_gqa", "gpt_oss", "gemma2", "block_sparse", "varlen_alibi"),
        ),
        Listed("_first_at_least: while step > 0", 0, NO_KEYS, ("document_causal",)),
        Listed("_packed_tile: while count > 1", 0, NO_SEQUENCES),
        Listed("_block_list: for start in range(0, size", 0, NO_KEYS, ("causal_images",)),
        Listed(
            "_block_list: for start in range(0, size",
            2,
            "there are as many queries as keys: 2**30 pairs",
            ("causal_images",),
        ),
        Listed(
            "_d_table_kernel: for i in range(n_tiles)", 0, "a diagonal of tiles has one at least"
        ),
        Listed("_block_kind: for start in range(q_start, q_start + BLOCK_SIZE, 32)", None, FIXED),
        Listed("_block_kinds_kernel: for i in range(0, GROUP)", None, FIXED),
        Listed(
            "_dq_tiles: for i in tl.range(0, n_blocks * BLOCK_SIZE", 1, "a block has several tiles"
        ),
        Listed(
            "_dkdv_tiles: for i in tl.range(0, n_blocks * BLOCK_SIZE",
            1,
            "a block has several tiles",
        ),
        Listed("_dqdk_kernel: for member in tl.range(HV // H", None, FIXED),
        Listed("_dqdk_kernel: for start in tl.range(0, V, BLOCK_V)", None, FIXED),
        Listed("_serve_list: for first in range(0, B", 0, NO_ITEMS),
        Listed("_serve_merge_kernel: for part in tl.range(0, parts", 0, SPLIT),
        Listed("_serve_merge_kernel: for part in tl.range(0, parts", 1, SPLIT),
        Listed(
            "_serve_merge_kernel: for part in tl.range(0, parts",
            2,
            ONE_SEGMENT,
            ("serve_fp8", "serve_window_fp8"),
        ),
        Listed("_serve_kernel: for segment in range", 2, ONE_SEGMENT, ("serve_window_fp8",)),
        Listed(
            "_serve_tiles: for start",
            0,
            "a segment of a tile has keys",
            ("serve_fp8", "serve_window_fp8"),
        ),
        Listed("for start in tl.range(0, V, BLOCK_V, num_stages=1)", None, FIXED),
        Listed("for start in tl.range(0, K, BLOCK_K, num_stages=1)", None, FIXED),
        Listed("for start in range(0, K, BLOCK_K)", None, FIXED),
        Listed("_keys_back_kernel: for start in tl.range(0, V, BLOCK_V)", None, FIXED),
        Listed("_q_map_back_kernel: for member in range(HV // H)", None, FIXED),
        Listed("_k_map_back_kernel: for member in range(HV // H)", None, FIXED),
        Listed("for done in range(1, 16)", None, FIXED),
        Listed("for level in range(", None, FIXED),
        Listed("_sequences_kernel: for start in range(first", 0, "a sequence has a slot"),
        Listed("_sequences_kernel: for start in range(first", 2, "cases have at most 64 chunks"),
        Listed("_states_kernel: for n in range(count, ", 2, "a sequence leaves at most one slot"),
        Listed("tl.static_range(", None, FIXED),
    ),
    HOPPER: (
        Listed("gl.static_range(", None, FIXED),
        Listed("range(GQA)", None, FIXED),
        Listed(
            "_consumer_skip: for _ in range(n)",
            2,
            "one half of a tile of keys needs at most one tile of queries less",
            tuple(x for x in SPECS[HOPPER] if x != "padding"),
        ),
        Listed(
            "_consumer_skip: for _ in range(n)",
            1,
            "lengths end several tiles earlier",
            ("padding",),
        ),
        Listed("_start >= 0", 0, "a program is launched for a tile at least", UNPACKED),
        Listed(
            "_dkdv_hopper_producer: for j in range(n_tiles)",
            1,
            "a block has several tiles",
            ("block_sparse", "causal_images", "natten_2d"),
        ),
        Listed("range(n_tiles + LAG)", 1, "a block has several tiles", ("causal_images",)),
        Listed(
            "_backward_hopper_tiles: for j in range(j_lo, j_hi)",
            1,
            "a block has several tiles",
            ("causal_images", "natten_2d"),
        ),
        Listed(
            "_dkdv_hopper_producer: for j in range(n_tiles)",
            0,
            "a query sees each key",
            (
                "full",
                "full_d64_fp16",
                "head_scale",
                "siglip",
                "decode_alibi",
                "document_causal",
                "causal_images",
            ),
        ),
        Listed(
            "_dkdv_hopper_producer: for j in range(n_tiles)",
            1,
            "lengths end several tiles earlier",
            ("padding",),
        ),
        Listed(
            "_dq_hopper_tiles: for j in range(j_lo, j_hi)",
            0,
            "a query sees its own key",
            ("causal_images", "gemma2"),
        ),
        Listed(
            "_dq_hopper_producer: for j in range(n_tiles)",
            0,
            "a query sees its own key",
            ("gemma2",),
        ),
        Listed(
            "range(n_past)",
            2,
            "a half of a tile of queries needs at most one tile of keys less",
            ("gemma2",),
        ),
        Listed(
            "_dq_hopper_consumer: for _ in range(n_ahead)",
            1,
            "the window is longer than quick cases",
            ("gemma2",),
        ),
        Listed(
            "_dq_hopper_consumer: for _ in range(n_ahead)",
            2,
            "the window is longer than quick cases",
            ("gemma2",),
        ),
        Listed("while number < n_q_tiles", 2, "quick cases have few tiles", ("pair_bias",)),
        Listed(
            "_hopper_consumer: while q_start >= 0", 2, "quick cases have few tiles", ("pair_bias",)
        ),
        Listed("_first_key_hopper: while step > 0", 0, NO_KEYS),
        Listed("_first_at_least_gluon: while step > 0", 0, NO_KEYS, ("document_causal",)),
        Listed("_packed_tile_hopper: while count > 1", 0, NO_SEQUENCES),
        Listed("while number < n_", 0, "a program is launched for a tile at least"),
        Listed("range(n_tiles + LAG)", 0, "queries without keys meet one tile, all of it masked"),
        Listed("range(n_tiles + LAG)", 1, "and `LAG` is 1", LAGGING),
        Listed("_equations_hopper_kernel: for member in range(HV // H)", None, FIXED),
        Listed("_sweep_producer: for n in range(at.count + 1)", 0, CHUNKS),
        Listed("_sweep_producer: for n in range(at.count + 1)", 1, CHUNKS),
        Listed("_sweep_consumer: for n in range(at.count)", 0, CHUNKS),
        Listed("_pairs_hopper_kernel: for member in range(HV // H)", None, FIXED),
        Listed("_sweep_back_producer: for n in range(at.count + 1)", 0, CHUNKS),
        Listed("_sweep_back_producer: for n in range(at.count + 1)", 1, CHUNKS),
        Listed("_sweep_back_consumer: for n in range(at.count)", 0, CHUNKS),
        *(
            Listed(f"{name}: for n in range(_turns(grid))", 0, CHUNKS)
            for name in (
                "_gradients_producer",
                "_queries_back",
                "_system_back",
                "_keys_back",
                "_last_back",
            )
        ),
    ),
}


def listed(file: str, spec: str, loop: str) -> list[Listed]:
    """Return the exceptions for a loop."""
    return [
        one for one in LISTED[file] if one.loop in loop and (not one.specs or spec in one.specs)
    ]


def unlisted(file: str, spec: str, found: Turns) -> list[str]:
    """Return the numbers of turns that no case shows and no exception lists."""
    return [
        f"{loop}: {('no', 'one', 'several')[number]} turn(s)"
        for loop, seen in found.items()
        for number in {0, 1, 2} - seen
        if not any(
            one.number in (number, None) and (seen or one.number is not None)
            for one in listed(file, spec, loop)
        )
    ]


def stale(file: str, spec: str, found: Turns) -> list[str]:
    """Return the exceptions that are wrong."""
    return [
        f"{loop}: {one.reason}"
        for loop, seen in found.items()
        for one in listed(file, spec, loop)
        if one.number in seen or (one.number is None and len(seen) == 3)
    ]


def _files() -> list[Any]:
    return [
        pytest.param(
            file,
            spec,
            marks=() if spec in SAMPLE[file] else pytest.mark.thorough,
            id=f"{spec}-{file}",
        )
        for file, specs in SPECS.items()
        for spec in sorted(specs)
        if (file, spec) not in NOT_RUN
    ]


@pytest.mark.parametrize(("file", "spec"), _files())
def test_loops_turn_in_all_ways(file: str, spec: str, tmp_path: Path, verdict: Any) -> None:
    verdict(problem_of(load(ROOT / "specs" / f"{spec}.yaml")), ROOT / "generated" / spec)
    found = turns(spec, tmp_path, file)
    assert (unlisted(file, spec, found), stale(file, spec, found)) == ([], [])


def test_an_entry_is_about_a_loop_of_some_file() -> None:
    loops = {
        file: [
            x for spec in specs for x in counted((ROOT / "generated" / spec / file).read_text())[1]
        ]
        for file, specs in SPECS.items()
    }
    assert [
        one.loop
        for file in LISTED
        for one in LISTED[file]
        if not any(one.loop in x for x in loops[file])
    ] == []


def test_an_entry_that_is_not_so_fails() -> None:
    loop = "_combine_kernel: for first in tl.range(0, splits, BLOCK_S)"
    assert unlisted(FILE, "decode_gqa", {loop: {1, 2}}) == []
    assert unlisted(FILE, "decode_gqa", {loop: {2}}) == [f"{loop}: one turn(s)"]
    assert stale(FILE, "decode_gqa", {loop: {1, 2}}) == []
    assert stale(FILE, "decode_gqa", {loop: {0, 1, 2}}) == [
        f"{loop}: it runs with two splits or more"
    ]
    fixed = "_forward_kernel: for start in tl.static_range(0, K, BLOCK_K)"
    assert unlisted(FILE, "retention_output", {fixed: {2}}) == []
    assert len(unlisted(FILE, "retention_output", {fixed: set()})) == 3
    assert stale(FILE, "retention_output", {fixed: {0, 1, 2}}) == [f"{fixed}: {FIXED}"]


def test_loops_of_kernels_alone_are_counted() -> None:
    text, loops = counted(
        "@triton.jit\ndef _a_kernel(n):\n    for i in tl.range(0, n):\n        while i:\n"
        "            i -= 1\n"
        "def launch(n):\n    for i in range(n):\n        pass\n"
    )
    assert loops == ["_a_kernel: for i in tl.range(0, n)", "_a_kernel: while i"]
    assert text.count("_kgen_turns") == 1
    assert text.count("_kgen_turn(") == 1
