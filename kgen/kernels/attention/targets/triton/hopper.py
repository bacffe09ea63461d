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
    NO_OWN,
    Own,
    own_range,
    passed_names,
    tile_lines,
    tile_loop,
)
from kgen.kernels.attention.targets.triton.hopper_operands import (
    begins,
    operands,
    start_of_keys,
    start_of_queries,
)
from kgen.kernels.attention.targets.triton.hopper_reads import (
    NO_PAGES,
    columns,
    documents,
    from_first_key,
    pages,
)
from kgen.kernels.attention.targets.triton.hopper_streams import streams_of
from kgen.kernels.attention.targets.triton.kernels import KernelFields
from kgen.targets.code import (
    GLUON,
    Assign,
    Code,
    Name,
    Op,
    Statement,
    assign,
    calls,
    cdiv,
    codes,
    helpers_of,
    maximum,
    minimum,
    needed,
    op,
    over,
    printed,
    renamed,
    rewritten,
    row,
    text,
    times,
    uses_of,
    walk,
)

Fields = dict[str, Any]


MASKED_TILES = ("n_first_masked", "n_last_masked")
"""Of the tiles that a tile meets, how many need masking at the start of the range, and at its end."""


def hopper_fields(plan: AttentionPlan, kernels: KernelFields, context: Mapping[str, Any]) -> Fields | None:
    """The names under `hopper`, from those of the portable kernels in `context`; None without such a kernel."""
    hopper = plan_hopper(plan)
    if hopper is None:
        return None
    problem, programs = list(kernels.problem), context["programs"]
    listed = plan.forward.listed
    # Lengths of packed sequences are told with each tile.
    known = [*problem, *("SQ", "SK") * kernels.packed]
    loops: dict[str, Fields] = {}
    streams = streams_of(hopper, kernels) if hopper.forward is not None else []
    if hopper.forward is not None:
        fields = context["forward"]
        if streams:
            given = [s.binding for s in streams]
            scores = kernels.tile_fields(plan.forward, kernels.printer(plan.forward), given=given)
            fields = fields | {"score_lines": [*(s.line for s in streams), *scores["score_lines"]]}
        rings = [f"{s.name}_ring" for s in streams]
        loops["forward"] = _forward(fields, plan.forward, kernels, [*known, *rings], hopper)
    if hopper.dq is not None:
        assert plan.dq is not None
        fields, found = context["dq"], hopper.idioms["dq"]
        if found.documents is not None:
            fields = fields | from_first_key(fields, found.documents, plan.dq, kernels)
        begun, roped = not hopper.wide, hopper.rope > 0
        bias = _bias(found.bias, plan.dq, kernels)
        loops["dq"] = _of_queries(fields, known, hopper.dq, bias, split=False, begun=begun, roped=roped)
        loops["dq"] |= _rings_of_dq(hopper, fields)
        # Which tiles need a mask is known as it runs: it is made once, where all that it hides is there.
        late = fields["masked"] and (kernels.packed or fields["open_ended"])
        loops["dq"] |= {"late": late} | ({"dqk": fields["dqk"]} if late else {})
    if hopper.dkdv is not None:
        keys = _with_keys_masked(context["dkdv"]) if hopper.fused else context["dkdv"]
        hidden = loops["forward"]["hidden_keys"] if hopper.hidden_keys else None
        loops["dkdv"] = _of_keys(keys, known, hopper, set(hidden["names"]) if hidden else set())
        loops["dkdv"] |= _key_products(hopper, looked_up=bool(loops["dkdv"]["factor_lines"]))
    for name, fields in loops.items():
        begin = _begin_of_keys if name == "dkdv" else _begin_of_queries
        fields |= {"begin": begin(fields, kernels)}
        if late := fields.get("late_consumer"):
            fields |= {"late": late | {"begin": begin(late, kernels)}}
    accumulated = min(HALF * hopper.width // 128, 64)
    of_pages = pages(hopper, plan.spec.paged_kv.page_size) if plan.spec.paged_kv is not None else NO_PAGES
    shared = {"streams": streams, "pages": of_pages, "sinks": context["sinks"]}
    told = operands(hopper, kernels, loops, shared)
    tiles = [told[name] for name in ("query_tile", "key_tile") if name in told]
    return {
        **dict.fromkeys(("forward", "dq", "dkdv", "fused")),
        **told,
        **{name: printed(fields, GLUON) | {"tile": getattr(hopper, name)} for name, fields in loops.items()},
        "listed": listed,
        "axes": 5 if kernels.packed else 4,
        "item_size": max(tile["size"] for tile in tiles),
        "uses_torch": hopper.forward is not None or not kernels.packed,
        "shared": _shared(loops, kernels, plan),
        "others": "two others" if hopper.forward is None or hopper.forward.chained else "the others",
        "biased": any(loops[name]["linear"] for name in loops if name != "dkdv"),
        "wide": hopper.wide,
        "split_dkdv": hopper.split_dkdv,
        "hidden_keys": hopper.hidden_keys,
        "one": _one_kernel(hopper, programs["kv"].replace('tile["BLOCK_N"]', str(2 * HALF)), plan.grouped),
        "q_tiles": programs["q"].replace('tile["BLOCK_M"]', str(HALF)),
        "short_dkdv": hopper.dkdv is not None and hopper.dkdv.BLOCK_M < HALF,
        "helpers": in_order(helpers_of(_codes(loops), GLUON) - kernels.helpers),
        "streams_keys": hopper.forward is not None or hopper.dq is not None,
        "skips": any(fields["past"] or fields["ahead"] for fields in loops.values()),
        "linear": any(fields["linear"] for fields in loops.values()),
        "seldom_rescaled": hopper.forward is not None and hopper.forward.seldom_rescaled,
        # Elements of acc that a thread takes at a time; and where alpha of its two rows is among operands.
        "accumulated": accumulated,
        "alpha_at": accumulated * 2,
        "next_alpha_at": accumulated * 2 + 2,
        "sink_load": printed(context["sinks"]["load"], GLUON),
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
        "streams": streams,
        "streamed": [s.tensor for s in streams],
        "of_heads": bool(streams) and all(s.of_heads for s in streams),
        "head_columns": plan.spec.head_dim.qk,
        "columns": columns(hopper, plan.spec.head_dim.v),
        "in_registers": hopper.forward is not None and hopper.forward.queries_in_registers,
        "pages": of_pages,
        "group": max(hopper.heads, context["group"]),
        "searches": any(fields["searches"] for fields in loops.values()),
        "searches_once": any(fields.get("from_first_key") for fields in loops.values()),
        # Tiles of one length need no counter.
        "dynamic": hopper.dynamic,
    }


def _shared(loops: Fields, kernels: KernelFields, plan: AttentionPlan) -> list[str]:
    """What `hopper.py` has from `triton.py`."""
    used = {name for code in _codes(loops) for name in code.names}
    spelled = [p.spelled[GLUON] for code in _codes(loops) for p in walk(code) if isinstance(p, Op)]
    # What Gluon has of its own is in `hopper.py`.
    helpers = [s.form.partition("(")[0] for s in spelled if s.helper in kernels.helpers]
    launcher = ["_launch", "_multiprocessors", "_by_ends" if kernels.packed else "_cdiv"]
    constants = ["LOG2E", *["FAR"] * kernels.packed, *["BLOCK_SIZE"] * plan.forward.listed]
    constants += [name.upper() for name in kernels.constants if name.upper() in used]
    return sorted({*constants, *launcher, "_tile_and_head", *helpers})


def _one_kernel(hopper: HopperPlan, tiles: str, grouped: bool) -> Fields:
    """When one backward kernel is ahead of two. Its zeros and sums cost the same for every query, whatever it sees. And
    where tiles differ in length, few of them end far apart, and dq fills what the kernel of dk and dv leaves."""
    enough = f"SK >= {hopper.least_keys}"
    if not hopper.dynamic:
        return {"params": "SK", "given": "SK", "enough": enough, "sizes": ["SK = k.shape[2]"]}
    enough += " and 2 * n_tiles >= 3 * _multiprocessors(device)"
    sizes = ["HKV, SK = k.shape[1], k.shape[2]"] if grouped else ["SK = k.shape[2]"]
    given = f"SK, {tiles}, q.device"
    return {"params": "SK, n_tiles, device", "given": given, "enough": enough, "sizes": sizes}


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
    chained = tile.chained
    found = hopper.idioms["forward"]
    if found.documents is not None:
        fields = fields | from_first_key(fields, found.documents, of, kernels)
        fields = fields | documents(fields, found.documents, of, kernels)
    bias = _bias(found.bias, of, kernels)
    loop = _of_queries(fields, problem, tile, bias, split=True, begun=chained, roped=hopper.rope > 0)
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


def _of_queries(
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
    before = [_of_half(line, "q") for line in fields["prologue"] if "offs_n" not in line.defines]
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
        lines.append(assign("n_ahead", minimum(over(row("sub", "own_lo", "kv_lo"), "BLOCK_N"), left)))
    if own.full_past:
        rest: Code = row("sub", "n_tiles", over(row("sub", "own_full_hi", "kv_lo"), "BLOCK_N"))
        if loop["from_first_key"]:
            rest = op("{tl}.where({0}, {1}, {2})", row("gt", "n_first_masked", 0), "n_tiles", rest)
        lines.append(assign("n_last_masked", rest))
    if own.full_ahead:
        lines.append(assign("n_first_masked", over(row("sub", "own_full_lo", "kv_lo"), "BLOCK_N")))
    if loop["lo"] == text("0"):
        lines = [line.map(lambda code: _from_zero(code)) for line in lines]
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
        "offs_n": _offsets("BLOCK_N", 0) if "offs_n" in uses_of(prologue) else [],
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


def _key_loops(loop: Fields, masked: str, own: Own) -> list[Fields]:
    """The loops over the tiles of queries that a tile of keys meets, of which `masked` need masking; and how many tiles
    `ahead` of each and `past` it are left out."""
    ahead, past = "n_ahead" if own.ahead else None, "n_past" if own.past else None
    first = {"masked": True, "lo": ahead or "0", "hi": f"{masked} - {past}" if past else masked}
    rest = {"masked": False, "lo": masked, "hi": "n_tiles", "ahead": None, "past": None}
    return [first | {"ahead": ahead, "past": past}] * loop["masked"] + [rest] * loop["has_full"]


def _from_zero(code: Code, lo: str = "kv_lo") -> Code:
    """A bound of a range that begins with the first position."""

    def change(part: Code) -> Code | None:
        match part:
            case Op(fn="sub", args=(end, Name(name=begin))) if begin == lo:
                return end
        return None

    return rewritten(code, change)


def _of_half(line: Statement, x: str) -> Statement:
    """A line of a tile, as the half of one has it that may begin past the end: what it reads there is not stored."""
    if not any(calls(code, "load") for code in codes([line])):
        return line
    first = minimum(f"{x}_start", row("sub", f"S{x[0].upper()}", 1))
    return line.map(lambda code: renamed(code, {f"{x}_start": first}))


def _rings_of_dq(hopper: HopperPlan, fields: Fields) -> Fields:
    """Where dq has K and V, and what its loop carries: the dS of the tile before too, where there is room for its K."""
    sums = fields.get("accumulators", [])
    if hopper.wide:
        return {
            "rings": ["k_ring", "v_ring"],
            "held": ["q_ring", "do_ring", "CONSUMER"],
            "carried": ", ".join(["dq", "n_used", *sums]),
        }
    own = ["dq", *["dq_rope"] * (hopper.rope > 0)]
    return {
        "rings": ["kv_ring"],
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


def _begin_of_queries(loop: Fields, kernels: KernelFields) -> list[Statement]:
    """What a consumer makes of a tile of queries that it was told of."""
    end = [assign("q_end", row("add", "q_begin", "SQ"))] * kernels.packed
    q_idx = assign("q_idx", row("add", "q_start", "offs_m"))
    return [_head_of(loop["used"], kernels.packed), *loop["blocks"], *end, q_idx, *loop["prologue"]]


def _begin_of_keys(loop: Fields, kernels: KernelFields) -> list[Statement]:
    """What a consumer makes of a tile of keys that it was told of."""
    found = [_head_of(loop["used"], kernels.packed)]
    found += [assign("h_kv", over("h", "GQA"))] * kernels.plan.grouped
    found += [assign("kv_idx", row("add", "kv_start", "offs_n"))] * bool(loop["offs_n"])
    found += loop["shared_prologue"]
    if kernels.packed:
        first = row("add", row("sub", "FAR", "SK"), "kv_start")
        found.append(Assign(("kv_end", "kv_row"), (row("add", "kv_begin", "SK"), first)))
    return found


def _offsets(length: str, dim: int) -> list[Statement]:
    """Keys of a tile, in the layout of scores without a dimension."""
    form = f"gl.arange(0, {{0}}, layout=gl.SliceLayout({dim}, SCORES))"
    return [assign("offs_n", op(form, length, fn="arange"))]


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
    prologue = needed(
        [*shared, *by_head], (of_tiles if hopper.split_dkdv else of_tiles | at_the_end) | hidden
    )
    # The consumer that has dk alone multiplies it at the end, and knows nothing of tiles.
    late = needed(shared, at_the_end | hidden)
    used_late = uses_of(late) | at_the_end | hidden
    before = [*shared, *by_head]
    # Where one consumer has dv and the other dk, both have all keys of a tile.
    own = NO_OWN if hopper.split_dkdv else own_range(fields, before, prologue, "q", tile.BLOCK_M)
    lines = [*own.lines]
    masked = "n_masked" if loop["has_full"] else "n_tiles"
    rest: Code = maximum(row("sub", masked, 1), 0)
    if own.ahead:
        lines.append(assign("n_ahead", minimum(over(row("sub", "own_lo", "q_lo"), "BLOCK_M"), rest)))
    if own.past:
        left = row("sub", rest, "n_ahead") if own.ahead else rest
        left_out = row("sub", "n_tiles", cdiv(row("sub", "own_hi", "q_lo"), "BLOCK_M"))
        lines.append(assign("n_past", minimum(left_out, left)))
    if loop["lo"] == text("0"):
        lines = [line.map(lambda code: _from_zero(code, "q_lo")) for line in lines]
    used = uses_of([*prologue, *own.lines]) | {*loop["passed"]} | at_the_end | hidden
    listed = fields["listed"]
    q_start = start_of_queries(loop, begins(loop, "q_lo"), listed)
    of_tiles = uses_of([q_start])
    offs_n = _offsets("BLOCK_N" if hopper.split_dkdv else "OWN_N", 1)
    return loop | {
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
