"""The kernels for Hopper whose tiles are keys: those of dk and dv, with dq or without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kgen.kernels.attention.plan.hopper import HopperPlan
from kgen.kernels.attention.targets.triton.hopper_loops import (
    NO_OWN,
    Own,
    from_zero,
    head_of,
    of_half,
    offsets,
    own_range,
    tile_lines,
    tile_loop,
)
from kgen.kernels.attention.targets.triton.hopper_operands import (
    begins,
    start_of_queries,
)
from kgen.kernels.attention.targets.triton.hopper_queries import MASKED_TILES
from kgen.kernels.attention.targets.triton.kernels import KernelFields, scaled
from kgen.targets.code import (
    Assign,
    Code,
    Name,
    Op,
    Statement,
    assign,
    calls,
    cdiv,
    codes,
    maximum,
    minimum,
    needed,
    op,
    over,
    row,
    text,
    uses_of,
)

Fields = dict[str, Any]


def keys_loop(fields: Fields, problem: list[str], hopper: HopperPlan, hidden: set[str]) -> Fields:
    """The kernel whose tiles are keys, of dk and dv; its loop over query heads has a prologue of its own. `hidden` is
    what tells which keys are past an end."""
    tile = hopper.dkdv
    assert tile is not None
    shared, by_head = ([of_half(line, "kv") for line in fields[x]] for x in ("shared_prologue", "prologue"))
    lse_lines = [_by_column(line) for line in fields["lse_lines"]]
    mask = [line for line in fields["mask_lines"] if line.defines == {"mask"}]
    fields = fields | {"lse_lines": lse_lines}
    if uses_of([fields["dqk_scale"]]) & {"SQ", "SK"}:
        # Of packed sequences: where dk is stored, sizes are those of the next tile.
        shared.append(assign("dk_scale", fields["dqk_product"]))
        fields |= {"dqk_scale": Name("dk_scale")}
    loop = tile_loop(fields, [*shared, *by_head], ["b", "h", "kv_idx"], problem)
    of_tiles, at_the_end = uses_of([*tile_lines(fields), *lse_lines]), uses_of([fields["dqk_scale"]])
    prologue = needed(
        [*shared, *by_head], (of_tiles if hopper.split_dkdv else of_tiles | at_the_end) | hidden
    )
    # The consumer that has dk alone multiplies it at the end, and knows nothing of tiles.
    late = needed([*shared, *by_head], at_the_end | hidden)
    used_late = uses_of(late) | at_the_end | hidden
    before = [*shared, *by_head]
    # Where one consumer has dv and the other dk, both have all keys of a tile.
    own = NO_OWN if hopper.split_dkdv else own_range(fields, before, prologue, "q", tile.BLOCK_M)
    lines = [*own.lines]
    masked = "n_masked" if loop["has_full"] else "n_tiles"
    rest: Code = maximum(row("sub", masked, 1), 0)
    if own.ahead:
        fewer: Code = minimum(over(row("sub", "own_lo", "q_lo"), "BLOCK_M"), rest)
        lines.append(assign("n_ahead", maximum(fewer, 0) if own.before else fewer))
    if own.past:
        left = row("sub", rest, "n_ahead") if own.ahead else rest
        left_out = row("sub", "n_tiles", cdiv(row("sub", "own_hi", "q_lo"), "BLOCK_M"))
        lines.append(assign("n_past", minimum(left_out, left)))
    if loop["lo"] == text("0"):
        lines = [line.map(lambda code: from_zero(code, "q_lo")) for line in lines]
    used = uses_of([*prologue, *own.lines]) | {*loop["passed"]} | at_the_end | hidden
    listed = fields["listed"]
    q_start = start_of_queries(loop, begins(loop, "q_lo"), listed)
    of_tiles = uses_of([q_start])
    offs_n = offsets("BLOCK_N" if hopper.split_dkdv else "OWN_N", 1)
    return loop | {
        "stored": {x: scaled(fields, x) for x in ("dk", "dk_rope")},
        "used": used,
        "offs_n": offs_n if "kv_idx" in used else [],
        "late_consumer": {
            "shared_prologue": late,
            "offs_n": offs_n if "kv_idx" in used_late else [],
            "used": used_late,
        },
        "shared_prologue": [line for line in prologue if line in shared],
        "of_head": [*(line for line in prologue if line in by_head), *loop["blocks"]],
        "linear": any(calls(code, "linear") for code in codes(lse_lines)),
        "own_bounds": lines,
        "past": own.past,
        "ahead": own.ahead,
        "left_out": ["n_ahead"] * own.ahead + ["n_past"] * own.past,
        "loops": _key_loops(loop, masked, own),
        "q_start": q_start,
        "produced": q_start if listed else start_of_queries(loop, loop["lo"], listed),
        "of_tiles": [n for n in ("q_blocks", "q_lo", *MASKED_TILES, "n_masked", "n_tiles") if n in of_tiles],
        "mask_lines": [line for line in fields["mask_lines"] if line not in mask],
        "mask": mask[0] if mask else "",
    }


def _key_loops(loop: Fields, masked: str, own: Own) -> list[Fields]:
    """The loops over the tiles of queries that a tile of keys meets, of which `masked` need masking; and how many tiles
    `ahead` of each and `past` it are left out."""
    ahead, past = "n_ahead" if own.ahead else None, "n_past" if own.past else None
    first = {"masked": True, "lo": ahead or "0", "hi": f"{masked} - {past}" if past else masked}
    rest = {"masked": False, "lo": masked, "hi": "n_tiles", "ahead": None, "past": None}
    return [first | {"ahead": ahead, "past": past}] * loop["masked"] + [rest] * loop["has_full"]


def key_products(hopper: HopperPlan, looked_up: bool) -> Fields:
    """How the kernel of dk and dv takes the queries of a tile: at once, or in two halves; how many products are younger
    than that of the scores; and where it has K and V, `looked_up` for each tile where registers are short."""
    assert hopper.dkdv is not None
    if hopper.dkdv.halves:
        return {
            "rows": {"lse": "lse_rows", "delta": "delta_rows"},
            "younger": 3,
            "columns": "BLOCK_M // 2",
            "held": "k_held, v_held",
            "held_params": "k, v",
            "looked_up": False,
            "at_the_end": "No product may be in flight where the loop closes: "
            "the compiler would wait after each of them.",
        }
    slot = "{}_slots.index(slot).reshape([BLOCK_M])"
    return {
        "rows": {"lse": slot.format("lse"), "delta": slot.format("delta")},
        "younger": 0 if hopper.split_dkdv else 1,
        "columns": "BLOCK_M",
        **dict.fromkeys(("held", "held_params"), "kv_ring, at_k" if looked_up else "k, v"),
        "looked_up": looked_up,
        "at_the_end": "As in dq, no product may be in flight where the loop closes.",
    }


def with_keys_masked(fields: Mapping[str, Any]) -> Fields:
    """The kernel of dk and dv where keys past the end, which it does not store, are masked, too: they add to dq."""
    ends = op("({0})[:, None]", row("lt", "kv_idx", "SK"))
    lines = [
        line.map(lambda code: row("and", ends, code)) if line.defines == {"mask"} else line
        for line in fields["mask_lines"]
    ]
    return {**fields, "mask_lines": lines}


def _by_column(line: Statement) -> Statement:
    """A log-sum-exp that is linear in the query, by the columns of a tile."""
    (value,) = codes([line])
    moved = row("sub", "q_start", "q_idx")
    if isinstance(value, Op) and value.fn == "sub" and value.args[0] == Name("lse"):
        slope = value.args[1]
        if isinstance(slope, Op) and slope.fn == "mul" and slope.args[1] == moved:
            return assign("lse", op("_linear(lse, {0}, offs_m)", slope.args[0], fn="linear"))
    return line


def begin_of_keys(loop: Fields, kernels: KernelFields) -> list[Statement]:
    """What a consumer makes of a tile of keys that it was told of."""
    found = [head_of(loop["used"], kernels.packed)]
    found += [assign("h_kv", over("h", "GQA"))] * kernels.plan.grouped
    found += [assign("kv_idx", row("add", "kv_start", "offs_n"))] * bool(loop["offs_n"])
    found += loop["shared_prologue"]
    if kernels.packed:
        first = row("add", row("sub", "FAR", "SK"), "kv_start")
        found.append(Assign(("kv_end", "kv_row"), (row("add", "kv_begin", "SK"), first)))
    return found
