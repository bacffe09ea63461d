"""Facts of an attention as data, for programs: `kgen explain --format json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kgen.expr.nodes import Node
from kgen.expr.softmax_form import QK
from kgen.expr.unparse import show
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.schedules.decode.plan import DecodePlan
from kgen.kernels.attention.schedules.hopper.conditions import without_kernels
from kgen.kernels.attention.schedules.hopper.plan import plan_hopper

PORTABLE = 0
"""The chip of tiles for every chip without a row of its own."""


def facts(plan: AttentionPlan, written: Mapping[str, Node], decode: DecodePlan | None) -> dict[str, Any]:
    """The fields that docs/commands.md lists for attention."""
    return {
        "expressions": {
            name: {"written": show(written[name]), "canonical": show(found)}
            for name, found in (("score_mod", plan.score_mod), ("mask_mod", plan.mask_mod))
            if found is not None and name in written
        },
        "params": {
            name: {"type": param.type, "value": param.value, "runtime": param.runtime}
            for name, param in plan.spec.params.items()
        },
        "buffers": {
            name: {"shape": list(one.shape), "dtype": one.dtype, "grad": one.grad, "sorted": one.sorted}
            for name, one in plan.spec.buffers.items()
        },
        "softmax": {
            "folded": plan.form.core == QK,
            "core": show(plan.form.core),
            "multiplier": show(plan.form.multiplier),
            "bias": _shown(plan.form.bias),
            "dropped": _shown(plan.form.row_rest),
            "finite": plan.form.finite,
        },
        "block_mask": plan.block_mask is not None,
        "loops": [_loop(kernel, loop) for kernel, loop in _loops(plan, decode)],
        "gradients": [
            {
                "buffer": one.buffer,
                "indices": list(map(show, one.indices)),
                "derivative": show(one.derivative),
                "kept_along": one.along,
                "summed_over_all_but": None if one.summed is None else list(one.summed),
            }
            for one in plan.gradients
        ],
        "tiles": _tiles(plan, decode),
        "hopper": _hopper(plan),
    }


def _shown(node: Node | None) -> str | None:
    return None if node is None else show(node)


def _loops(plan: AttentionPlan, decode: DecodePlan | None) -> Iterable[tuple[str, TileLoop]]:
    found = {"forward": plan.forward, "dq": plan.dq, "dkdv": plan.dkdv}
    found |= {"decode": decode.attention.forward} if decode is not None else {}
    return [(kernel, loop) for kernel, loop in found.items() if loop is not None]


def _loop(kernel: str, loop: TileLoop) -> dict[str, Any]:
    """A loop over tiles: by the lists of a block mask, or over ranges of positions."""
    ranges = [
        {
            "low": show(span.lo),
            "high": show(span.hi),
            "unmasked": {"low": show(span.full_lo), "high": show(span.full_hi)} if span.has_full else None,
        }
        for span in loop.spans
    ]
    return {
        "kernel": kernel,
        "tile_of": loop.outer.index.name,
        "visits": loop.inner.index.name,
        "masked": loop.masked,
        "ranges": None if loop.listed else ranges,
    }


def _tiles(plan: AttentionPlan, decode: DecodePlan | None) -> list[dict[str, Any]]:
    tables: dict[str, Mapping[int, Iterable[Any]]] = {"forward": plan.tiles.forward}
    tables |= {"dq": plan.tiles.dq, "dkdv": plan.tiles.dkdv} if plan.backward else {}
    tables |= {"decode": {chip: [tile] for chip, tile in decode.tiles.items()}} if decode is not None else {}
    return [
        {"kernel": kernel, "chip": None if chip == PORTABLE else f"sm_{chip}"}
        | {name.lower(): value for name, value in dataclasses.asdict(tile).items()}
        for kernel, table in tables.items()
        for chip in sorted(table, reverse=True)
        for tile in table[chip]
    ]


def _hopper(plan: AttentionPlan) -> dict[str, Any]:
    """For each pass except decode: true and its tiles, or the reason why there are no kernels for Hopper."""
    missing, found = without_kernels(plan), plan_hopper(plan)
    passes = [name for name in plan.spec.passes if name != "decode"]
    tiles = {} if found is None else {"forward": found.forward, "dq": found.dq, "dkdv": found.dkdv}
    tiles |= {} if found is None else {"fused_backward": found.fused}
    return {
        "passes": {name: {"kernels": name not in missing, "reason": missing.get(name)} for name in passes},
        "tiles": {
            kernel: {"block_m": tile.BLOCK_M, "block_n": tile.BLOCK_N}
            for kernel, tile in tiles.items()
            if tile is not None
        },
    }
