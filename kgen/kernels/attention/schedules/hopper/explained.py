"""Explain the Hopper kernels for `kgen explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kgen.kernels.attention.explaining.explained import Explained
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.schedules.hopper.conditions import without_kernels
from kgen.kernels.attention.schedules.hopper.plan import HopperPlan, HopperTile, plan_hopper
from kgen.pages.model import Words, quoting, words
from kgen.spec.load import Loaded

CHIP = "sm_90"


def explained(loaded: Loaded, plan: AttentionPlan) -> Explained:
    """Return the kernels of each pass, or the condition that fails."""
    missing, hopper = without_kernels(plan), plan_hopper(plan)
    passes = [name for name in plan.spec.passes if name in ("forward", "backward")]
    return Explained(
        chip=CHIP,
        passes={name: _words(missing.get(name)) for name in passes},
        language=f"Kernels in Gluon run only on {CHIP}.",
        tiles=[*_tiles(hopper)] if hopper is not None else (),
        remarks=[*_remarks(hopper)] if hopper is not None else (),
        facts={"hopper": _facts(passes, missing, hopper)},
    )


def _words(missing: str | None) -> Words:
    if missing is not None:
        return quoting(f"portable. No kernels for Hopper: {missing}.")
    return words(
        "its own kernels in Gluon, if TMA can load the tensors; otherwise portable kernels"
    )


def _tiles(hopper: HopperPlan) -> Iterator[tuple[str, str, str]]:
    order = "from a counter" if hopper.dynamic else "in turn"
    found = {
        "forward": hopper.forward,
        "dq, dk, dv": hopper.fused,
        "dq": hopper.dq,
        "dk and dv": hopper.dkdv,
    }
    for kernel, tile in found.items():
        if tile is not None:
            sizes = f"{tile.BLOCK_M} x {tile.BLOCK_N}"
            least = f", from {hopper.least_keys} keys on" if tile is hopper.fused else ""
            yield kernel, f"{CHIP}, Gluon", f"{sizes}, each program takes tiles {order}{least}"


def _remarks(hopper: HopperPlan) -> Iterator[str]:
    compute = "two" if hopper.forward is None or hopper.forward.chained else "three or two"
    yield (
        f"If TMA can load the tensors, {CHIP} runs its own kernels: one warpgroup loads, "
        f"{compute} compute."
    )
    idioms = hopper.idioms.values()
    if any(found.bias for found in idioms):
        yield "The bias is linear in the key, so the products of queries and keys begin with it."
    if any(found.documents for found in idioms):
        yield (
            "Documents are sorted, so the tiles of keys begin with the document of the first query."
        )


def _facts(
    passes: Sequence[str], missing: Mapping[str, str], found: HopperPlan | None
) -> dict[str, Any]:
    """Return facts for programs: passes with Hopper kernels or the reason for none, and tiles."""
    tiles: dict[str, HopperTile | None] = {}
    if found is not None:
        tiles = {
            "forward": found.forward,
            "dq": found.dq,
            "dkdv": found.dkdv,
            "fused_backward": found.fused,
        }
    return {
        "passes": {
            name: {"kernels": name not in missing, "reason": missing.get(name)} for name in passes
        },
        "tiles": {
            kernel: {"block_m": tile.BLOCK_M, "block_n": tile.BLOCK_N}
            for kernel, tile in tiles.items()
            if tile is not None
        },
    }
