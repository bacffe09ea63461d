"""Kernels for Hopper from C: when they serve, what TMA is told, and in which order they are launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kgen.kernels.attention.schedules.hopper.plan import HALF, HopperPlan
from kgen.kernels.attention.schedules.hopper.streams import Stream

Fields = dict[str, Any]


def hopper_fields(
    hopper: HopperPlan | None, streams: Sequence[Stream], buffers: Sequence[Fields], group: str
) -> Fields:
    """What templates name of both passes; `group` is how many heads the portable kernels take at a time."""
    forward = hopper is not None and hopper.forward is not None
    backward = hopper is not None and hopper.dkdv is not None
    counted = hopper is not None and hopper.dynamic
    given = {b["name"]: b for b in buffers}
    streamed = [given[s.buffer] | {"name": s.name, "at": i} for i, s in enumerate(streams)]
    counters = "kgen_pointer(workspace + m->counters, KGEN_I32)"
    return {
        "hopper_forward": forward,
        "hopper_backward": backward,
        "hopper_dq": backward and hopper is not None and hopper.dq is not None,
        "hopper_fused": backward and hopper is not None and hopper.fused is not None,
        "hopper_counter": forward and counted,
        "streams": streamed,
        "stream_checks": "".join(f" && kgen_by_tma(&{s['member']}, 4, {s['bytes']})" for s in streamed),
        "forward": _forward(hopper, len(streams), group) if forward and hopper else None,
        "hopper": _backward(hopper) if backward and hopper else None,
        "counters_or_none": f"p->on_hopper ? {counters} : kgen_nothing()"
        if backward and counted
        else "kgen_nothing()",
    }


def _forward(hopper: HopperPlan, streams: int, group: str) -> Fields:
    tile, pages = hopper.forward, hopper.page_rows
    assert tile is not None
    width = hopper.width
    out = width // 2 if tile.out_in_halves else width
    keys = "BLOCK_N" if pages is None else str(pages)
    rows = {"q": "ROWS", "k": keys, "v": keys, "o": "ROWS"}
    columns = {"q": width, "k": width, "v": width, "o": out}
    places = {"o": "a->out"} | ({x: f"{x}_pages" for x in "kv"} if pages is not None else {})
    descs = [_desc(x, places.get(x, f"a->{x}"), rows[x], columns[x]) for x in "qkvo"]
    roped = [*"qk"] if hopper.rope else []
    descs += [_desc(f"{x}_rope", f"{x}_rope", rows[x], hopper.rope) for x in roped]
    return {
        **asdict(tile),
        "rows": tile.BLOCK_M // tile.consumers,
        "descs": [d | {"at": streams + i} for i, d in enumerate(descs)],
        "ropes": [{"tensor": x, "first": width} for x in roped],
        "tiles": streams + len(descs),
        "dynamic": hopper.dynamic,
        "pdl": int(hopper.dynamic),
        "group": max(hopper.heads, int(group)),
    }


def _backward(hopper: HopperPlan) -> Fields:
    dkdv = hopper.dkdv
    assert dkdv is not None
    width, fused = hopper.width, hopper.fused
    stored = [*["dq"] * (hopper.dq is not None), "dk", "dv"]
    called = {"do": "dout"}
    descs = [_desc(x, f"a->{called.get(x, x)}", str(HALF), width) for x in ["q", "k", "v", "do", *stored]]
    roped = ["q", "k", *["dq"] * (hopper.dq is not None), "dk"] if hopper.rope else []
    descs += [_desc(f"{x}_rope", f"{x}_rope", str(HALF), hopper.rope) for x in roped]
    descs = [d | {"at": i} for i, d in enumerate(descs)]
    short = dkdv.BLOCK_M < HALF and fused is None
    short_descs = [_desc(x, f"a->{called.get(x, x)}", str(dkdv.BLOCK_M), width) for x in ("q", "do")]
    short_descs = [d | {"at": len(descs) + i} for i, d in enumerate(short_descs)] if short else []
    first = len(descs) + len(short_descs)
    keys = fused or dkdv
    enough = " && 2 * programs_of_keys(p, 128) >= 3 * (int64_t)p->device.multiprocessors"
    return {
        "descs": descs,
        "short_descs": short_descs,
        "again": [d for d in descs if d["name"] in ("q_desc", "do_desc")] if short else [],
        "tiles": first + 2,
        "at_lse": first,
        "at_delta": first + 1,
        "ropes": [{"tensor": x, "first": width} for x in roped],
        "stores": "".join(f" && by_tma(&a->{x})" for x in stored),
        "dynamic": hopper.dynamic,
        "fused": asdict(fused) if fused is not None else None,
        "of_keys": asdict(keys) | {"queries": keys.BLOCK_M, "SLOTS": dkdv.SLOTS, "programs": dkdv.BLOCK_N},
        "dq": asdict(hopper.dq) if hopper.dq is not None else None,
        "dq_rows": 2 * HALF,
        "half": HALF,
        "sums": HALF * width,
        "least_keys": hopper.least_keys,
        "enough": enough if hopper.dynamic else "",
    }


def _desc(name: str, of: str, rows: str, columns: int) -> Fields:
    return {"name": f"{name}_desc", "tensor": of, "rows": rows, "columns": columns}
