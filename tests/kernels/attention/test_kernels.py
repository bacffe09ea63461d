"""Emitted attention against float64 in Triton's interpreter: stock specs, and corner specs.

The corner specs in `tests/specs` have features that no stock spec has. Examples are scattered
gradients, repeated reads of one buffer, guarded indices, and head dims that are not powers of two.
Others are promised lengths, run-time parameters, fp32 without tensor cores, and 64-bit integers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.interpreters.against_float64 import CORNERS, assert_right, of_family
from test_longest import LONG

from kgen.kernels.attention.plan.planning import plan_attention
from kgen.spec.load import load

ROOT = Path(__file__).resolve().parents[3]

STOCK = [
    ROOT / "specs" / f"{name}.yaml"
    for name in (
        "causal_alibi",
        "document_causal",
        "longformer",
        "pair_bias",
        "decode_gqa",
        "decode_paged",
    )
]
SLOW = {
    **dict.fromkeys(("packed_narrow", "packed_learned"), 9),
    **dict.fromkeys(
        ("documents_of_64_bits", "lengths_of_64_bits", "mixed_widths", "searched_for_64_bits"), 99
    ),
    "hashed": 16,
    "open_extents": 25,
    "key_tables": 25,
    "read_lengths": 9,
    **dict.fromkeys(("broad", "filled", "filled_broad", "filled_narrow", "promised_full"), 9),
    **dict.fromkeys(("learned_slopes", "packed_table", "promised_window", "steps"), 5),
    **dict.fromkeys(("clusters", "listed_heads", "packed"), 5),
    **dict.fromkeys(("decode_small_pages", "listed_anyway", "ragged_cache", "sunk"), 3),
    **dict.fromkeys(("constants", "ends_by_head"), 3),
    **dict.fromkeys(("decode_gqa", "decode_heads", "decode_paged"), 2),
}
"""Slow specs: one of this number of their cases runs here. `kgen verify` runs all cases."""
SPECS = of_family("attention", [path for path in CORNERS if path.stem not in LONG]) + STOCK


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_verified_in_the_interpreter(path: Path, tmp_path: Path, verdict: Any) -> None:
    assert_right(path, tmp_path, verdict, SLOW.get(path.stem, 1))


@pytest.mark.parametrize("head_dim", [1, 16, 24, 40, 64, 72, 80, 96, 120, 192, 200, 256, 576])
def test_blocks_of_a_head_dim(head_dim: int, tmp_path: Path) -> None:
    """Every column is in one block.

    Blocks have different sizes, because Triton 3.6 confuses loads of equal blocks.
    """
    path = tmp_path / "x.yaml"
    path.write_text(f"kernel: attention\nname: x\ndtype: bf16\nhead_dim: {head_dim}\n")
    chunks = plan_attention(load(path)).qk_chunks
    assert sum(c.width for c in chunks) == head_dim
    assert all(c.size >= 16 and c.size & (c.size - 1) == 0 and c.width <= c.size for c in chunks)
    assert [c.start for c in chunks] == [0, chunks[0].size][: len(chunks)]
    assert len({c.size for c in chunks}) == len(chunks)
    assert sum(c.size for c in chunks) < 2 * max(head_dim, 16)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "generated").glob("*/triton.py")), ids=lambda p: p.parent.name
)
def test_no_remainder_by_zero(path: Path) -> None:
    """A pipelined loop computes addresses before its first iteration, even if it has no iterations.

    A remainder by the number of tiles would then be a remainder by zero. The compiler would
    conclude that there are tiles, and kernels have hung for this reason.
    """
    text = path.read_text()
    assert text.count("% wrap *") == text.count("wrap = tl.maximum(n_tiles, 1)")
    assert "turn) % n_tiles" not in text
