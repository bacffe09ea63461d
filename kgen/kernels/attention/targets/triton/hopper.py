"""The kernels for Hopper: what `_forward_hopper.j2` and `_backward_hopper.j2` name, from the fields of the kernels for
every chip.

They are written in Gluon, which has Triton's functions under its own name; whatever has positions gets its layout from
the index vectors that the templates make.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from kgen.expr.softmax_form import QK
from kgen.kernels.attention.plan.hopper import HALF, HopperPlan, HopperTile, plan_hopper
from kgen.kernels.attention.plan.planning import AttentionPlan
from kgen.kernels.attention.targets.triton.hopper_loops import (
    linear_bias,
    lines_needed,
    own_range,
    passed_names,
    tile_lines,
    tile_loop,
)
from kgen.kernels.attention.targets.triton.hopper_reads import (
    BY_LISTS,
    BY_RANGES,
    NO_PAGES,
    NO_PAIR,
    NO_TAIL,
    columns,
    documents,
    from_first_key,
    pages,
    pair,
    tail,
)
from kgen.kernels.attention.targets.triton.kernels import KernelFields
from kgen.kernels.attention.targets.triton.placement import in_items
from kgen.targets.triton.text import wrapped

Fields = dict[str, Any]


def hopper_fields(plan: AttentionPlan, kernels: KernelFields, context: Mapping[str, Any]) -> Fields | None:
    """The names under `hopper`, from those of the kernels for every chip in `context`; None without such a kernel."""
    hopper = plan_hopper(plan)
    if hopper is None:
        return None
    problem, sinks, programs = list(kernels.problem), context["sinks"], context["programs"]
    # Lengths of packed sequences are told with each item of work.
    known = [*problem, *("SQ", "SK") * kernels.packed]
    scaled = plan.form.core == QK and plan.form.positive
    loops = {}
    paired = pair(hopper, kernels) if hopper.pair is not None else NO_PAIR
    if hopper.forward is not None:
        fields = context["forward"]
        if hopper.pair is not None:
            scores = kernels.tile_fields(plan.forward, kernels.printer(plan.forward), given=hopper.pair)
            fields = fields | {"score_lines": [paired["line"], *scores["score_lines"]]}
        loops["forward"] = _forward(fields, known, hopper, scaled)
    if hopper.dq is not None:
        fields = context["dq"] | (from_first_key(context["dq"]) if hopper.begins_anywhere else {})
        begun, tailed = not hopper.broad, hopper.tail > 0
        loops["dq"] = _of_queries(fields, known, hopper.dq, scaled, apart=False, begun=begun, tailed=tailed)
        loops["dq"] |= _rings_of_dq(hopper, fields)
        # Which tiles want a mask is known as it runs: it is made once, where all that it hides is there.
        late = fields["masked"] and (kernels.packed or fields["open_ended"])
        loops["dq"] |= {"late": late} | ({"dqk": fields["dqk"]} if late else {})
    if hopper.dkdv is not None:
        keys = _with_keys_masked(context["dkdv"]) if hopper.fused else context["dkdv"]
        loops["dkdv"] = _of_keys(keys, known, hopper.dkdv)
        loops["dkdv"] |= _key_products(hopper, looked_up=bool(loops["dkdv"]["factor_lines"]))
    gradients = "dq, dk, dv" if hopper.dq else "dk, dv"
    tails = tail(hopper.tail) if hopper.tail else NO_TAIL
    descs = f"q_desc, {tails['q_desc']}k_desc, {tails['k_desc']}v_desc, do_desc"
    short = hopper.dkdv is not None and hopper.dkdv.BLOCK_M < HALF
    accumulated = min(HALF * hopper.width // 128, 64)
    ranges = BY_LISTS if plan.forward.listed else BY_RANGES
    for fields in loops.values():
        fields |= {
            "kv_start": ranges["kv_start"].replace("kv_lo", fields["lo"]),
            "q_start": ranges["q_start"].replace("q_lo", fields["lo"]),
            "first_start": ranges["kv_start"].replace("(j,", f"({fields['first']},"),
        }
    return {
        **dict.fromkeys(("forward", "dq", "dkdv")),
        **ranges,
        **{name: _in_gluon(fields) | {"tile": getattr(hopper, name)} for name, fields in loops.items()},
        **_parts(hopper.forward.consumers if hopper.forward else 2),
        "others": "two others" if hopper.forward is None or hopper.forward.chained else "the others",
        "biased": any(loops[name]["linear"] for name in loops if name != "dkdv"),
        "gradients": gradients,
        # Gradients of buffers that the kernel of dq has in registers, one number a row.
        "row_sums": _row_sums(context["dq"]) if hopper.dq else "",
        "fused": hopper.fused,
        "broad": hopper.broad,
        "apart": hopper.apart,
        "hidden_keys": hopper.hidden_keys,
        "one": _one_kernel(hopper, programs["kv"].replace('tile["BLOCK_N"]', str(2 * HALF))),
        "sums": "dq_sum, " if hopper.fused else "",
        # Halves of K and V: of two tiles, or as the kernel that asks has it.
        "kv_slots": "KV_SLOTS" if hopper.fused else "8",
        "kv_slots_param": " KV_SLOTS: tl.constexpr," if hopper.fused else "",
        "kv_slots_of_two": " 8," if hopper.fused else "",
        "q_tiles": programs["q"].replace('tile["BLOCK_M"]', str(HALF)),
        "descs": f"q_desc, k_desc, v_desc, do_desc, {gradients.replace(',', '_desc,')}_desc",
        "short_dkdv": short,
        "dkdv_descs": descs,
        "dkdv_operands": re.sub(r"\b(q_desc|do_desc)", r"short_\1", descs) if short else descs,
        "sigmoid": "tl.sigmoid(" in str(loops),
        "streams_keys": hopper.forward is not None or hopper.dq is not None,
        "passes_over": any(fields["past"] or fields["ahead"] for fields in loops.values()),
        "lag": _lag(hopper),
        "linear": any(fields["linear"] for fields in loops.values()),
        "seldom_rescaled": hopper.forward is not None and hopper.forward.seldom_rescaled,
        # Elements of acc that a thread takes at a time; and where alpha of its two rows is among operands.
        "accumulated": accumulated,
        "alpha_at": accumulated * 2,
        "next_alpha_at": accumulated * 2 + 2,
        "sink_load": _in_gluon(sinks["load"]),
        **in_items(kernels.packed, hopper.dkdv.BLOCK_M if hopper.dkdv else 0),
        "vectors": _in_gluon(context["rows"]),
        "programs": {
            "forward": programs["q"].replace('tile["BLOCK_M"]', "BLOCK_M"),
            "dq": programs["q"].replace('tile["BLOCK_M"]', str(2 * HALF)),
            "dkdv": programs["kv"].replace('tile["BLOCK_N"]', str(hopper.dkdv.BLOCK_N if hopper.dkdv else 0)),
        },
        "width": hopper.width,
        # Threads of a warp beside each other in a row, eight elements each, and rows.
        "lanes": [256 // hopper.width, hopper.width // 8],
        "half": HALF,
        "problem_params": wrapped([f"{n}{': tl.constexpr' if n == 'GQA' else ''}" for n in problem], 4),
        "problem_args": wrapped(problem, 16),
        "pair": paired,
        "tail": tails,
        "head_columns": plan.spec.head_dim.qk,
        "columns": columns(hopper, plan.spec.head_dim.v),
        "in_registers": hopper.forward is not None and hopper.forward.queries_in_registers,
        "pages": pages(hopper, plan.spec.paged_kv.page_size) if plan.spec.paged_kv is not None else NO_PAGES,
        "sink_args": "sinks_ptr, stride_sinks," if sinks["there"] else "",
        "group": max(hopper.heads, context["group"]),
        "searches": any(fields["searches"] for fields in loops.values()),
        "searches_once": any(fields.get("from_first_key") for fields in loops.values()),
        # Tiles of one length need no counter.
        "dynamic": hopper.dynamic,
        "counter_param": "counter_ptr," if hopper.dynamic else "",
        "counter_arg": "q.new_zeros(1, dtype=torch.int32), " if hopper.dynamic else "",
        "beside_the_fill": " launch_pdl=True," if hopper.dynamic else "",
    }


def _one_kernel(hopper: HopperPlan, tiles: str) -> Fields:
    """When one backward kernel is ahead of two. Its zeros and sums cost the same for every query, whatever it sees. And
    where tiles differ in length, few of them end far apart, and dq fills what the kernel of dk and dv leaves."""
    enough = f"SK >= {hopper.least_keys}"
    if not hopper.dynamic:
        return {"params": "SK", "given": "SK", "enough": enough}
    enough += " and 2 * n_tiles >= 3 * _multiprocessors(device)"
    return {"params": "SK, n_tiles, device", "given": f"SK, {tiles}, q.device", "enough": enough}


def _lag(hopper: HopperPlan) -> Fields:
    """How many tiles V's stream is behind K's: one where the values of a tile meet P beside the next one's scores. The
    producer is told where it serves dq, too, which wants K and V together."""
    own = "1" if hopper.forward is not None and hopper.forward.chained else "0"
    if hopper.dq is None or hopper.broad:
        return {"own": own, "param": "", "says": "", "forward": "", "dq": ""}
    return {
        "own": own,
        "param": "LAG: tl.constexpr, ",
        "says": ", V LAG tiles behind K",
        "forward": f"{own}, ",
        "dq": "0, ",
    }


def _parts(count: int) -> Fields:
    """What forward calls the rows of a tile that one of its consumers has."""
    name = {2: "half", 3: "third"}[count]
    return {"part": {"count": count, "name": name, "NAME": name.upper()}}


def _forward(fields: Fields, problem: list[str], hopper: HopperPlan, scaled: bool) -> Fields:
    """Forward, and who computes it."""
    tile = hopper.forward
    assert tile is not None
    chained, others = tile.chained, tile.consumers - 1
    registers = [tile.consumer_registers] * others + [tile.producer_registers]
    if hopper.begins_anywhere:
        fields = fields | from_first_key(fields)
        fields = fields | documents(fields)
    loop = _of_queries(fields, problem, tile, scaled, apart=True, begun=chained, tailed=hopper.tail > 0)
    return loop | {
        "carried": f"{'p, ' * chained}m_i, l_i, acc, n_used",
        "columns": "BLOCK_N" if chained else "BLOCK_N // 2",
        "value_slots": f"SLOTS - {tile.fewer_values}" if tile.fewer_values else "SLOTS",
        "hidden_keys": hopper.hidden_keys and _hidden_keys(fields, loop["bounds"], problem),
        "consumers": [
            {"number": n, "pair_ring": f"pair_rings[{n}], " * (hopper.pair is not None)}
            for n in range(tile.consumers)
        ],
        "warps": [4] * tile.consumers,
        "registers": registers,
        "rest": "the second consumer and the producer; the first consumer has the rest of 504"
        if chained
        else "the other consumers and the producer; the first consumer has the rest of 512",
    }


def _hidden_keys(fields: Fields, bounds: list[str], problem: list[str]) -> Fields:
    """How forward knows which keys of the first tile that it takes are past the end; its producer has `bounds`."""
    (live,) = (line for line in fields["mask_lines"] if line.startswith("kv_live = "))
    passed = passed_names([live], ["b", "h", *fields["prologue"]], problem)
    return {
        "live": live,
        "needed": [line for line in lines_needed(fields["prologue"], [live]) if line not in bounds],
        "last_live": re.sub(r"\bkv_idx\b", "kv_last", live.replace("kv_live", "last_live")),
        "names": ", ".join(passed),
        "params": wrapped(passed, 4),
        "args": wrapped(passed, 12),
        "of_scores": any("_tanh(" in line for line in fields["score_lines"]),
    }


def _of_queries(
    fields: Fields,
    problem: list[str],
    tile: HopperTile,
    scaled: bool,
    apart: bool,
    begun: bool,
    tailed: bool = False,
) -> Fields:
    """A kernel whose tiles are queries: forward, and dq.

    `scaled` scores are q @ k^T times a positive number: a bias that is linear in the key, over that number, is then
    where the product begins. `apart` gives masked tiles a loop of their own, if they lie at one end alone. `begun` has
    the first tile ahead of the loops. `tailed` keys have tiles of their last columns.
    """
    # Where dq has K and V in rings of their own, it begins with no tile.
    keys = "_keys(kv_ring, n_used)" if apart or begun else "k"
    product = f"_times_transposed(q, {keys}, SCORES)"
    bias = linear_bias(fields) if scaled else None
    if bias is not None:
        product = f"_biased_product(q, {keys}, slope * {bias.distance}, slope, SCORES)"
        fields = fields | {
            "prologue": [*fields["prologue"], f"slope = {bias.slope} / {bias.scale}"],
            "score_lines": [],
            "logits": "qk",
            "scaled": f" * {bias.scale}",
        }
    before = [_of_half(line, "q") for line in fields["prologue"] if not line.startswith("offs_n = ")]
    outside = ["b", "h", "q_idx", "q_start", "pair_ring", "item"]
    loop = tile_loop(fields, [*before, *fields["searches"]], [*outside, "n_head"], problem)
    after = [fields["row_rest"], fields["sink"], *fields["lse_lines"], fields["vector_load"]]
    after += [fields.get("dqk_scale", ""), *(g["value"] for g in fields.get("row_gradients", []))]
    prologue = lines_needed(before, [*tile_lines(fields), *after, product])
    own = own_range(fields, [*before, *fields["searches"]], prologue, "kv", tile.BLOCK_N)
    lines, last = [*own.lines], "n_tiles - 1"
    if own.past:
        lines.append(f"n_past = gl.minimum(n_tiles - gl.cdiv(own_hi - kv_lo, BLOCK_N), {last})")
    if own.ahead:
        left = f"{last} - n_past" if own.past else last
        lines.append(f"n_ahead = gl.minimum((own_lo - kv_lo) // BLOCK_N, {left})")
    if own.full_past:
        rest = "n_tiles - (own_full_hi - kv_lo) // BLOCK_N"
        lines.append(
            f"n_tail = gl.where(n_head > 0, n_tiles, {rest})"
            if loop["from_first_key"]
            else f"n_tail = {rest}"
        )
    if own.full_ahead:
        lines.append("n_head = (own_full_lo - kv_lo) // BLOCK_N")
    first = "n_past" if own.past else "0"
    passed = passed_names([*tile_lines(fields), product], [*outside, *before], problem)
    return loop | {
        "prologue": prologue,
        "offs_n": any(re.search(r"\boffs_n\b", line) for line in prologue),
        **{name: fields[name] for name in ("row_rest", "sink", "vector_load", "vector_guard")},
        "row_gradients": fields.get("row_gradients", []),
        "row_sums": _row_sums(fields),
        "row_sum_ptrs": _row_sums(fields, "_ptr"),
        "product": f"_plus_times_transposed({product}, q_tail, _key_tails(kv_ring, n_used))"
        if tailed
        else product,
        "linear": bias is not None,
        "alpha": "" if tile.bounded else ", alpha",
        # Of bounded logits m_i is a number where no key is seen, too.
        "sum": "l_i" if tile.bounded else "l_safe",
        "range_params": wrapped(passed, 4),
        "range_args": wrapped(passed, 12),
        "own_bounds": lines,
        "past": own.past,
        "ahead": own.ahead,
        "first": first,
        **_masked_loops(loop, first, "n_tiles - n_ahead" if own.ahead else "n_tiles", apart, begun),
        **_loads_ahead(loop["mask_lines"]),
    }


def _of_half(line: str, x: str) -> str:
    """A line of a tile, as the half of one has it that may begin past the end: what it reads there is not stored."""
    first = f"tl.minimum({x}_start, S{x[0].upper()} - 1)"
    return re.sub(rf"\b{x}_start\b", first, line) if "tl.load(" in line else line


def _rings_of_dq(hopper: HopperPlan, fields: Fields) -> Fields:
    """Where dq has K and V, and what its loop carries: the dS of the tile before too, where there is room for its K."""
    sums = _row_sums(fields)
    if hopper.broad:
        return {
            "rings": "k_ring, v_ring",
            "producer": "_dq_hopper_producer",
            "held": "q_ring, do_ring, HALF",
            "carried": f"dq, n_used{sums}",
        }
    tails = ", dq_tail" * (hopper.tail > 0)
    return {
        "rings": "kv_ring",
        "producer": "_hopper_producer",
        "held": f"q{', q_tail' * (hopper.tail > 0)}, do",
        "carried": f"ds, dq{tails}, n_used{sums}",
        "sums_of_products": f"dq{tails}",
        "products_on": f"dq_on{', dq_tail_on' * (hopper.tail > 0)}",
        "younger": 2 if hopper.tail else 1,
    }


def _row_sums(fields: Mapping[str, Any], suffix: str = "") -> str:
    return "".join(f", {name}{suffix}" for name in fields.get("accumulators", []))


def _masked_loops(loop: Fields, first: str, end: str, apart: bool, begun: bool) -> Fields:
    """The loops over all tiles, or over what follows the first if that has `begun`, and how a tile knows whether it
    wants the mask."""
    second = "1" if first == "0" else f"{first} + 1"
    after = second if begun else first
    if not (loop["masked"] and loop["has_full"]):
        own, loops = str(loop["masked"]), [{"lo": after, "hi": end, "masked": ""}]
    elif apart and not loop["head"]:
        # At least one tile counts as masked: what the first loop sets up, ptxas 12.8 reads in the second.
        rest = {"lo": f"gl.maximum(n_tail, {second})", "hi": end, "masked": "MASKED=False, "}
        masked = {"lo": after, "hi": "n_tail" if begun else rest["lo"], "masked": "MASKED=True, "}
        own, loops = "MASKED", [masked, rest]
    else:
        own = "(j < n_tail) | (j >= n_tiles - n_head)" if loop["head"] else "j < n_tail"
        loops = [{"lo": after, "hi": end, "masked": ""}]
    return {"masked_tile": own, "apart": own == "MASKED", "loops": loops}


def _loads_ahead(mask_lines: list[str]) -> Fields:
    """What a mask reads for each key is asked for before the product is waited for, in tiles that want it."""
    of_keys = re.compile(r"(\w+) = tl\.load\((\w+_ptr) \+ .*\bkv_idx\b.*\)")
    loads = [m for line in mask_lines if (m := of_keys.fullmatch(line))]
    return {
        "mask_loads": [{"name": m[1], "buffer": m[2], "line": m[0]} for m in loads],
        "mask_lines": [line for line in mask_lines if all(line != m[0] for m in loads)],
    }


def _key_products(hopper: HopperPlan, looked_up: bool) -> Fields:
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
            "at_the_end": "No product may be under way where the loop closes: "
            "the compiler would wait after each of them.",
        }
    slot = "{}_slots.index(slot).reshape([BLOCK_M])"
    return {
        "rows": {"lse": slot.format("lse"), "delta": slot.format("delta")},
        "younger": 0 if hopper.apart else 1,
        "columns": "BLOCK_M",
        **dict.fromkeys(("held", "held_params"), "kv_ring, at_k" if looked_up else "k, v"),
        "looked_up": looked_up,
        "at_the_end": "As in dq, no product may be under way where the loop closes.",
    }


def _with_keys_masked(fields: Mapping[str, Any]) -> Fields:
    """The kernel of dk and dv where keys past the end, which it does not store, are masked, too: they add to dq."""
    ends = "(kv_idx < SK)[:, None]"
    lines = [re.sub(r"^mask = (.*)", rf"mask = {ends} & \1", line) for line in fields["mask_lines"]]
    return {**fields, "mask_lines": lines}


def _of_keys(fields: Fields, problem: list[str], tile: HopperTile) -> Fields:
    """The kernel whose tiles are keys, of dk and dv; its loop over query heads has a prologue of its own."""
    shared, by_head = ([_of_half(line, "kv") for line in fields[x]] for x in ("shared_prologue", "prologue"))
    by_row = re.compile(r"lse = lse - (\w+) \* \(q_start - q_idx\)")
    lse_lines = [by_row.sub(r"lse = _linear(lse, \1, offs_m)", line) for line in fields["lse_lines"]]
    mask = next((line for line in fields["mask_lines"] if line.startswith("mask = ")), "")
    fields = fields | {"lse_lines": lse_lines}
    loop = tile_loop(fields, [*shared, *by_head], ["b", "h", "kv_idx"], problem)
    needed = lines_needed([*shared, *by_head], [*tile_lines(fields), *lse_lines, fields["dqk_scale"]])
    own = own_range(fields, [*shared, *by_head], needed, "q", tile.BLOCK_M)
    lines, rest = [*own.lines], "gl.maximum(n_masked - 1, 0)"
    if own.ahead:
        lines.append(f"n_ahead = gl.minimum((own_lo - q_lo) // BLOCK_M, {rest})")
    if own.past:
        left = f"{rest} - n_ahead" if own.ahead else rest
        lines.append(f"n_past = gl.minimum(n_tiles - gl.cdiv(own_hi - q_lo, BLOCK_M), {left})")
    return loop | {
        "tile_args": textwrap.indent(loop["tile_args"], " " * 4),
        "half_args": loop["tile_args"],
        "shared_prologue": [line for line in needed if line in shared],
        "prologue": [line for line in needed if line in by_head],
        "linear": any("_linear(" in line for line in lse_lines),
        "own_bounds": lines,
        "past": own.past,
        "ahead": own.ahead,
        "first": "n_ahead" if own.ahead else "0",
        "end": "n_masked - n_past" if own.past else "n_masked",
        "mask_lines": [line for line in fields["mask_lines"] if line != mask],
        "mask": mask,
    }


def _in_gluon(value: Any) -> Any:
    """Text that Triton would compile, as Gluon has it."""
    if isinstance(value, str):
        value = re.sub(r"\btl\.sigmoid\(", "_sigmoid(", value)
        value = re.sub(r"\b(_first_at_least|_tanh|_sigmoid|_silu)\(", r"\1_hopper(", value)
        return re.sub(r"\btl\.", "gl.", value)
    if isinstance(value, list):
        return [_in_gluon(v) for v in value]
    return {k: _in_gluon(v) for k, v in value.items()} if isinstance(value, dict) else value
