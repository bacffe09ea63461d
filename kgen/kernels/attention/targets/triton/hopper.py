"""The kernels for Hopper: what `_forward_hopper.j2` and `_backward_hopper.j2` name, from the fields of the kernels for
every chip.

They are written in Gluon, which has Triton's functions under its own name; whatever has positions gets its layout from
the index vectors that the templates make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kgen.expr.functions import in_order
from kgen.kernels.attention.plan.hopper import HALF, HopperPlan, plan_hopper
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.targets.triton.hopper_keys import (
    begin_of_keys,
    key_products,
    keys_loop,
    with_keys_masked,
)
from kgen.kernels.attention.targets.triton.hopper_operands import (
    operands,
)
from kgen.kernels.attention.targets.triton.hopper_queries import (
    begin_of_queries,
    bias_of,
    forward_loop,
    last_masked,
    queries_loop,
    rings_of_dq,
)
from kgen.kernels.attention.targets.triton.hopper_reads import (
    NO_PAGES,
    columns,
    from_first_key,
    pages,
)
from kgen.kernels.attention.targets.triton.hopper_streams import Stream, streams_of
from kgen.kernels.attention.targets.triton.kernels import KernelFields
from kgen.kernels.attention.targets.triton.placement import programs
from kgen.targets.code import (
    GLUON,
    Code,
    Op,
    Statement,
    codes,
    helpers_of,
    printed,
    walk,
)

Fields = dict[str, Any]


def hopper_fields(plan: AttentionPlan, kernels: KernelFields, context: Mapping[str, Any]) -> Fields | None:
    """The names under `hopper`, from those of the portable kernels in `context`; None without such a kernel."""
    hopper = plan_hopper(plan)
    if hopper is None:
        return None
    tiles_of = partial(programs, kernels.packed, plan.grouped)
    listed = plan.forward.listed
    streams = streams_of(hopper, kernels) if hopper.forward is not None else []
    loops = hopper_loops(hopper, plan, kernels, context, streams)
    for name, fields in loops.items():
        begin = begin_of_keys if name == "dkdv" else begin_of_queries
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
        "one": _one_kernel(hopper, tiles_of("kv", str(2 * HALF)), plan.grouped),
        "q_tiles": tiles_of("q", str(HALF)),
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
            "forward": tiles_of("q", "BLOCK_M"),
            "dq": tiles_of("q", str(2 * HALF)),
            "dkdv": tiles_of("kv", str(hopper.dkdv.BLOCK_N if hopper.dkdv else 0)),
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


def hopper_loops(
    hopper: HopperPlan,
    plan: AttentionPlan,
    kernels: KernelFields,
    context: Mapping[str, Any],
    streams: Sequence[Stream],
) -> dict[str, Fields]:
    """What each kernel's loop is made of, from the fields of the portable ones in `context`."""
    problem = list(kernels.problem)
    # Lengths of packed sequences are told with each tile.
    known = [*problem, *("SQ", "SK") * kernels.packed]
    loops: dict[str, Fields] = {}
    if hopper.forward is not None:
        fields = context["forward"]
        if streams:
            given = [s.binding for s in streams]
            scores = kernels.tile_fields(plan.forward, kernels.printer(plan.forward), given=given)
            fields = fields | {"score_lines": [*(s.line for s in streams), *scores["score_lines"]]}
        rings = [f"{s.name}_ring" for s in streams]
        loops["forward"] = forward_loop(fields, plan.forward, kernels, [*known, *rings], hopper)
        loops["forward"] |= {
            "ring": "kv_ring",
            "beside": [{"name": ring, "at": "n_used - i"} for ring in rings],
        }
    if hopper.dq is not None:
        assert plan.dq is not None
        fields, found = context["dq"], hopper.idioms["dq"]
        if found.documents is not None:
            fields = fields | from_first_key(fields, found.documents, plan.dq, kernels)
        begun, roped = not hopper.wide, hopper.rope > 0
        bias = bias_of(found.bias, plan.dq, kernels)
        loops["dq"] = queries_loop(fields, known, hopper.dq, bias, split=False, begun=begun, roped=roped)
        loops["dq"] |= rings_of_dq(hopper, fields)
        # Which tiles need a mask is known as it runs: it is made once, where all that it hides is there.
        late = fields["masked"] and (kernels.packed or fields["open_ended"])
        loops["dq"] |= {"late": late} | ({"dqk": fields["dqk"]} if late else {})
    if "forward" in loops:
        loops["forward"]["last_masked"] = last_masked(loops)
    if hopper.dkdv is not None:
        keys = with_keys_masked(context["dkdv"]) if hopper.fused else context["dkdv"]
        hidden = loops["forward"]["hidden_keys"] if hopper.hidden_keys else None
        loops["dkdv"] = keys_loop(keys, known, hopper, set(hidden["names"]) if hidden else set())
        loops["dkdv"] |= key_products(hopper, looked_up=bool(loops["dkdv"]["factor_lines"]))
    return loops


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
