"""The kernels for Hopper: what `_forward_hopper.j2` and `_backward_hopper.j2` name, from the fields of the kernels for
every chip.

They are written in Gluon, which has Triton's functions under its own name; whatever has positions gets its layout from
the index vectors that the templates make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from kgen.expr.functions import in_order
from kgen.expr.spelling import MUL
from kgen.kernels.attention.plan.hopper import HALF, HopperPlan, HopperTile, plan_hopper
from kgen.kernels.attention.plan.idioms import LinearBias
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.targets.triton.hopper_loops import (
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
from kgen.targets.code import (
    GLUON,
    Assign,
    Code,
    Name,
    Op,
    Statement,
    assign,
    calls,
    codes,
    helpers_of,
    minimum,
    needed,
    op,
    over,
    printed,
    renamed,
    row,
    times,
    uses_of,
    walk,
)

Fields = dict[str, Any]


def hopper_fields(plan: AttentionPlan, kernels: KernelFields, context: Mapping[str, Any]) -> Fields | None:
    """The names under `hopper`, from those of the kernels for every chip in `context`; None without such a kernel."""
    hopper = plan_hopper(plan)
    if hopper is None:
        return None
    problem, sinks, programs = list(kernels.problem), context["sinks"], context["programs"]
    # Lengths of packed sequences are told with each item of work.
    known = [*problem, *("SQ", "SK") * kernels.packed]
    loops = {}
    paired = pair(hopper, kernels) if hopper.pair is not None else NO_PAIR
    if hopper.forward is not None:
        fields = context["forward"]
        if hopper.pair is not None:
            scores = kernels.tile_fields(plan.forward, kernels.printer(plan.forward), given=hopper.pair)
            fields = fields | {"score_lines": [paired["line"], *scores["score_lines"]]}
        loops["forward"] = _forward(fields, plan.forward, kernels, known, hopper)
    if hopper.dq is not None:
        assert plan.dq is not None
        fields, found = context["dq"], hopper.idioms["dq"]
        if found.documents is not None:
            fields = fields | from_first_key(fields, found.documents, plan.dq, kernels)
        begun, tailed = not hopper.broad, hopper.tail > 0
        bias = _bias(found.bias, plan.dq, kernels)
        loops["dq"] = _of_queries(fields, known, hopper.dq, bias, apart=False, begun=begun, tailed=tailed)
        loops["dq"] |= _rings_of_dq(hopper, fields)
        # Which tiles want a mask is known as it runs: it is made once, where all that it hides is there.
        late = fields["masked"] and (kernels.packed or fields["open_ended"])
        loops["dq"] |= {"late": late} | ({"dqk": fields["dqk"]} if late else {})
    if hopper.dkdv is not None:
        keys = _with_keys_masked(context["dkdv"]) if hopper.fused else context["dkdv"]
        hidden = loops["forward"]["hidden_keys"] if hopper.hidden_keys else None
        loops["dkdv"] = _of_keys(keys, known, hopper, set(hidden["passed"]) if hidden else set())
        loops["dkdv"] |= _key_products(hopper, looked_up=bool(loops["dkdv"]["factor_lines"]))
    gradients = "dq, dk, dv" if hopper.dq else "dk, dv"
    tails = tail(hopper.tail) if hopper.tail else NO_TAIL
    descs = f"q_desc, {tails['q_desc']}k_desc, {tails['k_desc']}v_desc, do_desc"
    short = hopper.dkdv is not None and hopper.dkdv.BLOCK_M < HALF
    accumulated = min(HALF * hopper.width // 128, 64)
    ranges = BY_LISTS if plan.forward.listed else BY_RANGES
    for fields in loops.values():
        fields |= {
            "head_of": _head_of(fields["used"], kernels.packed),
            **(
                {"late": late | {"head_of": _head_of(late["used"], kernels.packed)}}
                if (late := fields.get("late_consumer"))
                else {}
            ),
            "kv_start": ranges["kv_start"].replace("kv_lo", str(fields["lo"])),
            "q_start": ranges["q_start"].replace("q_lo", str(fields["lo"])),
            "first_start": ranges["kv_start"].replace("(j,", f"({fields['first']},"),
        }
    return {
        **dict.fromkeys(("forward", "dq", "dkdv")),
        **ranges,
        **{name: printed(fields, GLUON) | {"tile": getattr(hopper, name)} for name, fields in loops.items()},
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
        "dkdv_operands": descs.replace("q_desc", "short_q_desc").replace("do_desc", "short_do_desc")
        if short
        else descs,
        "helpers": in_order(helpers_of(_codes(loops), GLUON) - kernels.helpers),
        "streams_keys": hopper.forward is not None or hopper.dq is not None,
        "passes_over": any(fields["past"] or fields["ahead"] for fields in loops.values()),
        "lag": _lag(hopper),
        "linear": any(fields["linear"] for fields in loops.values()),
        "seldom_rescaled": hopper.forward is not None and hopper.forward.seldom_rescaled,
        # Elements of acc that a thread takes at a time; and where alpha of its two rows is among operands.
        "accumulated": accumulated,
        "alpha_at": accumulated * 2,
        "next_alpha_at": accumulated * 2 + 2,
        "sink_load": printed(sinks["load"], GLUON),
        **in_items(kernels.packed, hopper.dkdv.BLOCK_M if hopper.dkdv else 0),
        "vectors": printed(context["rows"], GLUON),
        "programs": {
            "forward": programs["q"].replace('tile["BLOCK_M"]', "BLOCK_M"),
            "dq": programs["q"].replace('tile["BLOCK_M"]', str(2 * HALF)),
            "dkdv": programs["kv"].replace('tile["BLOCK_N"]', str(hopper.dkdv.BLOCK_N if hopper.dkdv else 0)),
        },
        "width": hopper.width,
        # Threads of a warp beside each other in a row, eight elements each, and rows.
        "lanes": [256 // hopper.width, hopper.width // 8],
        "half": HALF,
        "problem_params": [f"{n}{': tl.constexpr' if n == 'GQA' else ''}" for n in problem],
        "problem_args": problem,
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


def _codes(value: Any) -> Iterator[Code]:
    """Every value in what a template is given."""
    if isinstance(value, Code):
        yield value
    elif isinstance(value, Statement):
        yield from codes([value])
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _codes(part)


@dataclass(frozen=True)
class _Bias:
    """A linear bias as a kernel has it."""

    distance: Code
    slope: Code
    scale: Code


def _bias(found: LinearBias | None, loop: TileLoop, kernels: KernelFields) -> _Bias | None:
    if found is None:
        return None
    printer = kernels.printer(loop)
    return _Bias(*(printer.own(node) for node in (found.distance, found.slope, found.scale)))


def _forward(
    fields: Fields,
    of: TileLoop,
    kernels: KernelFields,
    problem: list[str],
    hopper: HopperPlan,
) -> Fields:
    """Forward, and who computes it."""
    tile = hopper.forward
    assert tile is not None
    chained, others = tile.chained, tile.consumers - 1
    registers = [tile.consumer_registers] * others + [tile.producer_registers]
    found = hopper.idioms["forward"]
    if found.documents is not None:
        fields = fields | from_first_key(fields, found.documents, of, kernels)
        fields = fields | documents(fields, found.documents, of, kernels)
    bias = _bias(found.bias, of, kernels)
    loop = _of_queries(fields, problem, tile, bias, apart=True, begun=chained, tailed=hopper.tail > 0)
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


def _hidden_keys(fields: Fields, bounds: list[Statement], problem: list[str]) -> Fields:
    """How forward knows which keys of the first tile that it takes are past the end; its producer has `bounds`."""
    (live,) = (line for line in fields["mask_lines"] if line.defines == {"kv_live"})
    passed = passed_names([live], ["b", "h", *fields["prologue"]], problem)
    return {
        "live": live,
        "needed": [line for line in needed(fields["prologue"], live.uses) if line not in bounds],
        "last_live": assign("last_live", renamed(live.value, {"kv_idx": Name("kv_last")})),
        "passed": passed,
        "names": ", ".join(passed),
        "params": passed,
        "args": passed,
        "of_scores": any(calls(code, "tanh") for code in codes(fields["score_lines"])),
    }


def _of_queries(
    fields: Fields,
    problem: list[str],
    tile: HopperTile,
    bias: _Bias | None,
    apart: bool,
    begun: bool,
    tailed: bool = False,
) -> Fields:
    """A kernel whose tiles are queries: forward, and dq.

    Where scores are q @ k^T times a positive number, a `bias` that is linear in the key, over that number, is where the
    product begins. `apart` gives masked tiles a loop of their own, if they lie at one end alone. `begun` has
    the first tile ahead of the loops. `tailed` keys have tiles of their last columns.
    """
    # Where dq has K and V in rings of their own, it begins with no tile.
    keys = "_keys(kv_ring, n_used)" if apart or begun else "k"
    product = op("_times_transposed(q, {0}, SCORES)", keys)
    if bias is not None:
        distance = times("slope", bias.distance)
        product = op("_biased_product(q, {0}, {1}, {2}, SCORES)", keys, distance, "slope")
        fields = fields | {
            "prologue": [*fields["prologue"], assign("slope", row("div", bias.slope, bias.scale))],
            "score_lines": [],
            "logits": "qk",
            "scaled": bias.scale,
        }
    before = [_of_half(line, "q") for line in fields["prologue"] if "offs_n" not in line.defines]
    outside = ["b", "h", "q_idx", "q_start", "pair_ring", "item"]
    loop = tile_loop(fields, [*before, *fields["searches"]], [*outside, "n_head"], problem)
    after = [fields["row_rest"], fields["sink"], *fields["lse_lines"], fields["vector_load"]]
    after += [fields.get("dqk_scale", product), *(g["value"] for g in fields.get("row_gradients", []))]
    prologue = needed(before, uses_of([*tile_lines(fields), *after, product]))
    own = own_range(fields, [*before, *fields["searches"]], prologue, "kv", tile.BLOCK_N)
    lines: list[Statement | str] = [*own.lines]
    last = "n_tiles - 1"
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
        "offs_n": "offs_n" in uses_of(prologue),
        **{name: fields[name] for name in ("row_rest", "sink", "vector_load", "vector_guard")},
        "row_gradients": fields.get("row_gradients", []),
        "row_sums": _row_sums(fields),
        "row_sum_ptrs": _row_sums(fields, "_ptr"),
        "product": op("_plus_times_transposed({0}, q_tail, _key_tails(kv_ring, n_used))", product)
        if tailed
        else product,
        "linear": bias is not None,
        "alpha": "" if tile.bounded else ", alpha",
        # Of bounded logits m_i is a number where no key is seen, too.
        "sum": "l_i" if tile.bounded else "l_safe",
        "range_params": passed,
        "range_args": passed,
        "own_bounds": lines,
        "used": uses_of([*prologue, *own.lines, *after]) | {*passed},
        "past": own.past,
        "ahead": own.ahead,
        "first": first,
        **_masked_loops(loop, first, "n_tiles - n_ahead" if own.ahead else "n_tiles", apart, begun),
        **_loads_ahead(loop["mask_lines"]),
    }


def _of_half(line: Statement, x: str) -> Statement:
    """A line of a tile, as the half of one has it that may begin past the end: what it reads there is not stored."""
    if not any(calls(code, "load") for code in codes([line])):
        return line
    first = minimum(f"{x}_start", row("sub", f"S{x[0].upper()}", 1))
    return line.map(lambda code: renamed(code, {f"{x}_start": first}))


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


def _head_of(used: Set[str], packed: bool) -> Statement:
    """The head of a consumer's item, and its batch, which finds the rows of tensors that are not packed."""
    batch, head = over("b_h", "HQ"), op("{0} % {1}", "b_h", "HQ", binds=MUL, operand=MUL)
    return assign("h", head) if packed and "b" not in used else Assign(("b", "h"), (batch, head))


def _of_keys(fields: Fields, problem: list[str], hopper: HopperPlan, hidden: set[str]) -> Fields:
    """The kernel whose tiles are keys, of dk and dv; its loop over query heads has a prologue of its own. `hidden` is
    what tells which keys are past an end."""
    tile = hopper.dkdv
    assert tile is not None
    shared, by_head = ([_of_half(line, "kv") for line in fields[x]] for x in ("shared_prologue", "prologue"))
    lse_lines = [_by_column(line) for line in fields["lse_lines"]]
    mask = [line for line in fields["mask_lines"] if line.defines == {"mask"}]
    fields = fields | {"lse_lines": lse_lines}
    loop = tile_loop(fields, [*shared, *by_head], ["b", "h", "kv_idx"], problem)
    of_tiles, at_the_end = uses_of([*tile_lines(fields), *lse_lines]), uses_of([fields["dqk_scale"]])
    prologue = needed([*shared, *by_head], (of_tiles if hopper.apart else of_tiles | at_the_end) | hidden)
    # The consumer that has dk alone multiplies it at the end, and knows nothing of tiles.
    late = needed(shared, at_the_end | hidden)
    used_late = uses_of(late) | at_the_end | hidden
    own = own_range(fields, [*shared, *by_head], prologue, "q", tile.BLOCK_M)
    lines: list[Statement | str] = [*own.lines]
    rest = "gl.maximum(n_masked - 1, 0)"
    if own.ahead:
        lines.append(f"n_ahead = gl.minimum((own_lo - q_lo) // BLOCK_M, {rest})")
    if own.past:
        left = f"{rest} - n_ahead" if own.ahead else rest
        lines.append(f"n_past = gl.minimum(n_tiles - gl.cdiv(own_hi - q_lo, BLOCK_M), {left})")
    used = uses_of([*prologue, *own.lines]) | {*loop["passed"]} | at_the_end | hidden
    return loop | {
        "used": used,
        "positions": "kv_idx" in used,
        "late_consumer": {
            "prologue": late,
            "positions": "kv_idx" in used_late,
            "used": used_late,
        },
        "half_args": loop["tile_args"],
        "shared_prologue": [line for line in prologue if line in shared],
        "prologue": [line for line in prologue if line in by_head],
        "linear": any(calls(code, "linear") for code in codes(lse_lines)),
        "own_bounds": lines,
        "past": own.past,
        "ahead": own.ahead,
        "first": "n_ahead" if own.ahead else "0",
        "end": "n_masked - n_past" if own.past else "n_masked",
        "mask_lines": [line for line in fields["mask_lines"] if line not in mask],
        "mask": mask[0] if mask else "",
    }
