"""The facts of `kgen explain --format json` for attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kgen.expr.nodes import Node
from kgen.expr.softmax_form import QK
from kgen.expr.unparse import show
from kgen.kernels.attention.explaining.explained import Explained
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop

PORTABLE = 0
"""The key of the tiles for all chips without their own row."""


def facts(
    plan: AttentionPlan, written: Mapping[str, Node], explained: Sequence[Explained]
) -> dict[str, Any]:
    """Return the fields that docs/commands.md lists for attention."""
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
            name: {
                "shape": list(one.shape),
                "dtype": one.dtype,
                "grad": one.grad,
                "sorted": one.sorted,
            }
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
        "loops": [_loop(kernel, loop) for of in explained for kernel, loop in of.loops.items()],
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
        "tiles": _tiles(explained),
        **{name: value for of in explained for name, value in of.facts.items()},
    }


def _shown(node: Node | None) -> str | None:
    return None if node is None else show(node)


def _loop(kernel: str, loop: TileLoop) -> dict[str, Any]:
    """Return the facts of a loop over tiles. `ranges` is None for the lists of a block mask."""
    ranges = [
        {
            "low": show(span.lo),
            "high": show(span.hi),
            "unmasked": {"low": show(span.full_lo), "high": show(span.full_hi)}
            if span.has_full
            else None,
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


def _tiles(explained: Sequence[Explained]) -> list[dict[str, Any]]:
    return [
        {"kernel": kernel, "chip": None if chip == PORTABLE else f"sm_{chip}"}
        | {name.lower(): value for name, value in dataclasses.asdict(tile).items()}
        for of in explained
        for kernel, table in of.tables.items()
        for chip in sorted(table, reverse=True)
        for tile in table[chip]
    ]
