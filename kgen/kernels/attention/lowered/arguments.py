"""Parameters of the function of a loop: the names of its kernel that the body uses."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.kernels.attention.lowered.loads import SIDES, tma_row
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import KEYS, QUERIES, Gradients, Param, TileBody, side_of
from kgen.kernels.attention.plan.model import TileLoop
from kgen.targets.code import Code, Statement, uses_of


def tile_params(
    lowering: Lowering,
    loop: TileLoop,
    body: TileBody,
    gradients: Gradients | None,
    vector_guard: Code | None,
    before: Sequence[Statement],
    descriptors: bool,
) -> tuple[Param, ...]:
    """Return the parameters of the function of a loop.

    `before` are the statements of the kernel before the loop. `descriptors` is true if TMA may load
    tiles.
    """
    known = [*_operands(lowering, loop), *_loads(lowering, loop, descriptors)]
    used = _used(loop, body, gradients, vector_guard)
    outside = [name for statement in before for name in statement.names_in_order]
    candidates = [
        "b",
        "h",
        loop.outer.index.name,
        loop.outer.start.name,
        loop.outer.last.name,
        *outside,
    ]
    candidates += [*lowering.problem, *(("SQ", "SK") if lowering.packed else ())]
    candidates += [p.name for p in gradients.gradient_params] if gradients is not None else []
    there = {p.name for p in known} | {loop.inner.start.name}
    asked = [name for name in dict.fromkeys(candidates) if name in used and name not in there]
    annotations = {"GQA": "tl.constexpr"}
    return (*known, *(Param(name, name, annotations.get(name, "")) for name in asked))


def _operands(lowering: Lowering, loop: TileLoop) -> list[Param]:
    """Return the parameters for the tiles that a kernel holds, and the pointers of the tiles that
    stream.
    """
    plan, outer = lowering.plan, side_of(loop.outer)
    backward, of_keys = loop is not plan.forward, outer is KEYS
    held = ("k", "v") if of_keys else ("q", "do") if backward else ("q",)
    chunks = {"q": plan.qk_chunks, "k": plan.qk_chunks, "v": plan.v_chunks, "do": plan.v_chunks}
    names = [f"{x}{c.tag}" for x in held for c in chunks[x]]
    if backward and not of_keys:
        names += ["lse", *(("lse_low",) if plan.exact else ()), "delta"]
    found = [Param(name, name) for name in names]
    # A tile of keys uses the tensors of one query head at a time.
    found += [Param(f"{x}_ptr", f"{x}_head" if of_keys else f"{x}_ptr") for x in _streamed(loop)]
    if of_keys:
        found += [Param(f"{x}_ptr", f"{x}_head") for x in ("lse", "delta")]
    return found


def _streamed(loop: TileLoop) -> tuple[str, ...]:
    return ("q", "do") if side_of(loop.inner) is QUERIES else ("k", "v")


def _loads(lowering: Lowering, loop: TileLoop, descriptors: bool) -> list[Param]:
    """Return the parameters for the loads of tiles that stream."""
    plan, streamed = lowering.plan, _streamed(loop)
    names = list[str]()
    if descriptors:
        chunks = {"q": plan.qk_chunks, "k": plan.qk_chunks, "v": plan.v_chunks, "do": plan.v_chunks}
        names += [f"{x}_desc{c.tag}" for x in streamed for c in chunks[x]]
        head = lowering.kv_head if side_of(loop.outer) is QUERIES else "h"
        names += tma_row(lowering.packed, SIDES[streamed[0]], head).names
    names += [f"stride_{x}{d}" for x in streamed for d in "sd"]
    return [Param(name, name) for name in names]


def _used(
    loop: TileLoop, body: TileBody, gradients: Gradients | None, vector_guard: Code | None
) -> frozenset[str]:
    """Return the names that the body of a loop uses."""
    lines = [*body.mask_lines, *body.read_lines, *body.score_lines, *body.row_lines]
    parts: list[Statement | Code | None] = [*lines, body.scaled]
    parts += gradients.gradient_lines if gradients is not None else []
    if side_of(loop.outer) is KEYS:
        parts += [*body.lse_lines, vector_guard]
    return uses_of(parts)
