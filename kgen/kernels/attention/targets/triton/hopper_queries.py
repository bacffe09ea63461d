"""The kernels for Hopper whose tiles are queries: forward, and dq."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kgen.kernels.attention.plan.hopper import HopperPlan, HopperTile
from kgen.kernels.attention.plan.idioms import LinearBias
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.targets.triton.hopper_loops import (
    from_zero,
    head_of,
    of_half,
    offsets,
    own_range,
    passed_names,
    tile_lines,
    tile_loop,
)
from kgen.kernels.attention.targets.triton.hopper_operands import (
    begins,
    start_of_keys,
)
from kgen.kernels.attention.targets.triton.hopper_reads import (
    documents,
    from_first_key,
)
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
    renamed,
    row,
    text,
    times,
    uses_of,
    walk,
)

Fields = dict[str, Any]

MASKED_TILES = ("n_first_masked", "n_last_masked")
"""Of the tiles that a tile meets, how many need masking at the start of the range, and at its end."""


@dataclass(frozen=True)
class _Bias:
    """A linear bias as a kernel has it."""

    distance: Code
    slope: Code
    scale: Code


def bias_of(found: LinearBias | None, loop: TileLoop, kernels: KernelFields) -> _Bias | None:
    if found is None:
        return None
    printer = kernels.printer(loop)
    return _Bias(*(printer.own(node) for node in (found.distance, found.slope, found.scale)))


def forward_loop(
    fields: Fields,
    of: TileLoop,
    kernels: KernelFields,
    problem: list[str],
    hopper: HopperPlan,
) -> Fields:
    """Forward, and who computes it."""
    tile = hopper.forward
    assert tile is not None
    chained = tile.chained
    found = hopper.idioms["forward"]
    if found.documents is not None:
        fields = fields | from_first_key(fields, found.documents, of, kernels)
        fields = fields | documents(fields, found.documents, of, kernels)
    bias = bias_of(found.bias, of, kernels)
    loop = queries_loop(fields, problem, tile, bias, split=True, begun=chained, roped=hopper.rope > 0)
    return loop | {
        "carried": ", ".join([*["p"] * chained, "m_i", "l_i", "acc", "n_used"]),
        "columns": "BLOCK_N" if chained else "BLOCK_N // 2",
        "value_slots": f"SLOTS - {tile.fewer_values}" if tile.fewer_values else "SLOTS",
        "hidden_keys": hopper.hidden_keys and _hidden_keys(fields, loop["bounds"], problem),
    }


def _hidden_keys(fields: Fields, bounds: list[Statement], problem: list[str]) -> Fields:
    """How forward knows which keys of the first tile that it takes are past the end; its producer has `bounds`."""
    (live,) = (line for line in fields["mask_lines"] if line.defines == {"kv_live"})
    passed = passed_names([live], ["b", "h", *fields["prologue"]], problem)
    return {
        "live": live,
        "needed": [line for line in needed(fields["prologue"], live.uses) if line not in bounds],
        "last_live": assign("last_live", renamed(live.value, {"kv_idx": Name("kv_last")})),
        "names": passed,
        "of_scores": any(calls(code, "tanh") for code in codes(fields["score_lines"])),
    }


def queries_loop(
    fields: Fields,
    problem: list[str],
    tile: HopperTile,
    bias: _Bias | None,
    split: bool,
    begun: bool,
    roped: bool = False,
) -> Fields:
    """A kernel whose tiles are queries: forward, and dq.

    Where scores are q @ k^T times a positive number, a `bias` that is linear in the key, over that number, is where the
    product begins. `split` gives masked tiles a loop of their own, if they lie at one end alone. `begun` has
    the first tile ahead of the loops. `roped` keys have tiles of their rope dims.
    """
    # Where dq has K and V in rings of their own, it begins with no tile.
    keys = "_keys(kv_ring, n_used)" if split or begun else "k"
    product = op("_async_dot_nt(q, {0}, SCORES)", keys)
    if bias is not None:
        distance = times("slope", bias.distance)
        product = op("_async_dot_biased(q, {0}, {1}, {2}, SCORES)", keys, distance, "slope")
        fields = fields | {
            "prologue": [*fields["prologue"], assign("slope", row("div", bias.slope, bias.scale))],
            "score_lines": [],
            "logits": "qk",
            "scaled": bias.scale,
        }
    before = [of_half(line, "q") for line in fields["prologue"] if "offs_n" not in line.defines]
    outside = ["b", "h", "q_idx", "q_start", "item"]
    loop = tile_loop(fields, [*before, *fields["searches"]], [*outside, "n_first_masked"], problem)
    after = [fields["row_rest"], fields["sink"], *fields["lse_lines"], fields["vector_load"]]
    after += [fields.get("dqk_scale", product), *(g["value"] for g in fields.get("row_gradients", []))]
    prologue = needed(before, uses_of([*tile_lines(fields), *after, product]))
    own = own_range(fields, [*before, *fields["searches"]], prologue, "kv", tile.BLOCK_N)
    lines = [*own.lines]
    last: Code = row("sub", "n_tiles", 1)
    if own.past:
        left_out = row("sub", "n_tiles", cdiv(row("sub", "own_hi", "kv_lo"), "BLOCK_N"))
        lines.append(assign("n_past", minimum(left_out, last)))
    if own.ahead:
        left = row("sub", last, "n_past") if own.past else last
        fewer: Code = minimum(over(row("sub", "own_lo", "kv_lo"), "BLOCK_N"), left)
        lines.append(assign("n_ahead", maximum(fewer, 0) if own.before else fewer))
    if own.full_past:
        rest: Code = row("sub", "n_tiles", over(row("sub", "own_full_hi", "kv_lo"), "BLOCK_N"))
        if loop["from_first_key"]:
            rest = op("{tl}.where({0}, {1}, {2})", row("gt", "n_first_masked", 0), "n_tiles", rest)
        lines.append(assign("n_last_masked", rest))
    if own.full_ahead:
        lines.append(assign("n_first_masked", over(row("sub", "own_full_lo", "kv_lo"), "BLOCK_N")))
    if loop["lo"] == text("0"):
        lines = [line.map(lambda code: from_zero(code)) for line in lines]
    first: Code = Name("n_past") if own.past else text("0")
    end: Code = row("sub", "n_tiles", "n_ahead") if own.ahead else Name("n_tiles")
    passed = passed_names([*tile_lines(fields), product], [*outside, "n_first_masked", *before], problem)
    masked = _masked_loops(loop, first, end, split, begun)
    lo = begins(loop, "kv_lo")
    listed = fields["listed"]
    kv_start = start_of_keys(Name("j"), lo, listed)
    of_tiles = uses_of([kv_start, masked["masked_tile"]])
    asks = uses_of([*lines, kv_start, *(part[end] for part in masked["loops"] for end in ("lo", "hi"))])
    return loop | {
        "prologue": prologue,
        "offs_n": offsets("BLOCK_N", 0) if "offs_n" in uses_of(prologue) else [],
        **{name: fields[name] for name in ("row_rest", "sink", "vector_load", "vector_guard")},
        "row_gradients": fields.get("row_gradients", []),
        "row_sums": fields.get("accumulators", []),
        "product": op("_async_dot_nt_plus({0}, q_rope, _rope_keys(kv_ring, n_used))", product)
        if roped
        else product,
        "linear": bias is not None,
        "alpha": [] if tile.bounded else ["alpha"],
        # Of bounded logits m_i is a number where no key is seen, too.
        "sum": "l_i" if tile.bounded else "l_safe",
        "passed": passed,
        "own_bounds": lines,
        "used": uses_of([*prologue, *own.lines, *after]) | {*passed},
        "past": own.past,
        "ahead": own.ahead,
        "fewer_first": own.full_ahead and not own.full_past,
        "kv_start": kv_start,
        "v_start": start_of_keys(row("sub", "j", "LAG"), lo, listed)
        if listed
        else row("add", "kv_start", row("mul", "LAG", "BLOCK_N")),
        "first_start": start_of_keys(first, lo, listed),
        "of_tiles": [n for n in ("kv_blocks", "kv_lo", *MASKED_TILES, "n_tiles") if n in of_tiles],
        # What the consumers ask of a tile beside where it is.
        "asks": asks | of_tiles | {*passed},
        **masked,
        **_loads_ahead(loop["mask_lines"]),
    }


def last_masked(loops: Mapping[str, Fields]) -> Code:
    """How many tiles at the end of a tile's range need the mask, as its producer knows it.

    If no tile is without the mask, all of them count as first ones, unless a consumer may have fewer first ones.
    """
    loop = loops["forward"]
    left: Code = Name("n_tiles")
    if not loop["has_full"]:
        return left
    full = loop["full_length"]
    if any(loops[name]["fewer_first"] for name in ("forward", "dq") if name in loops):
        full = loop["full_end"]
    elif loop["head"]:
        left = row("sub", left, "n_first_masked")
    return row("sub", left, maximum(cdiv(full, "BLOCK_N"), 0))


def rings_of_dq(hopper: HopperPlan, fields: Fields) -> Fields:
    """Where dq has K and V, and what its loop carries: the dS of the tile before too, where there is room for its K."""
    sums = fields.get("accumulators", [])
    stored = [(x, scaled(fields, f"d{x}")) for x in ("q", *("q_rope",) * (hopper.rope > 0))]
    if hopper.wide:
        return {
            "stored": stored,
            "rings": ["k_ring", "v_ring"],
            "ring": "v_ring",
            "beside": [{"name": "k_ring", "at": "n_used"}],
            "held": ["q_ring", "do_ring", "CONSUMER"],
            "carried": ", ".join(["dq", "n_used", *sums]),
        }
    own = [f"d{x}" for x, _ in stored]
    return {
        "stored": stored,
        "rings": ["kv_ring"],
        "ring": "kv_ring",
        "beside": [],
        "held": ["q", *["q_rope"] * (hopper.rope > 0), "do"],
        "carried": ", ".join(["ds", *own, "n_used", *sums]),
        "sums_of_products": ", ".join(own),
        "products_async": ", ".join(f"{x}_async" for x in own),
        "younger": 2 if hopper.rope else 1,
    }


def _masked_loops(loop: Fields, first: Code, end: Code, split: bool, begun: bool) -> Fields:
    """The loops over all tiles, or over what follows the first if that has `begun`, and how a tile knows whether it
    needs the mask."""
    second = text("1") if first == text("0") else row("add", first, 1)
    after = second if begun else first
    whole = [{"lo": after, "hi": end, "masked": []}]
    if not (loop["masked"] and loop["has_full"]):
        own: Code = text(str(loop["masked"]))
        return {"masked_tile": own, "masked_param": [], "loops": whole}
    if split and not loop["head"]:
        # At least one tile counts as masked: what the first loop sets up, ptxas 12.8 reads in the second.
        from_here = maximum("n_last_masked", second)
        masked = {"lo": after, "hi": Name("n_last_masked") if begun else from_here, "masked": ["MASKED=True"]}
        rest = {"lo": from_here, "hi": end, "masked": ["MASKED=False"]}
        return {
            "masked_tile": text("MASKED"),
            "masked_param": ["MASKED: tl.constexpr"],
            "loops": [masked, rest],
        }
    own = row("lt", "j", "n_last_masked")
    if loop["head"]:
        own = row("or", own, row("ge", "j", row("sub", "n_tiles", "n_first_masked")))
    return {"masked_tile": own, "masked_param": [], "loops": whole}


def _loads_ahead(mask_lines: list[Statement]) -> Fields:
    """What a mask reads for each key is asked for before the product is waited for, in tiles that want it."""
    loads = [line for line in mask_lines if isinstance(line, Assign) and _loads_keys(line.value)]
    return {
        "mask_loads": [{"name": line.name, "buffer": _pointer(line.value), "line": line} for line in loads],
        "mask_lines": [line for line in mask_lines if line not in loads],
    }


def _loads_keys(value: Code) -> bool:
    """Whether a value is what a buffer has for the keys of a tile."""
    if isinstance(value, Op) and value.fn == "to float32":
        value = value.args[0]
    return isinstance(value, Op) and value.fn == "load" and "kv_idx" in value.names


def _pointer(load: Code) -> str:
    """What a load adds offsets to."""
    names = [part.name for part in walk(load) if isinstance(part, Name)]
    return next(name for name in names if name.endswith("_ptr"))


def begin_of_queries(loop: Fields, kernels: KernelFields) -> list[Statement]:
    """What a consumer makes of a tile of queries that it was told of."""
    end = [assign("q_end", row("add", "q_begin", "SQ"))] * kernels.packed
    q_idx = assign("q_idx", row("add", "q_start", "offs_m"))
    return [head_of(loop["used"], kernels.packed), *loop["blocks"], *end, q_idx, *loop["prologue"]]
