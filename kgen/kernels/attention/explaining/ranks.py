"""The section on several ranks: the work of each rank for a sharding, and the transfers between
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.kernels.attention.explaining.drawing import given_params
from kgen.kernels.attention.parallel.planning import (
    SHARDINGS,
    Mask,
    Plan,
    chosen,
    planned,
    sharded,
    work,
)
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.plan.picture import Row, Run, usual, value
from kgen.pages.model import Block, Drawing, Prose, Table, quoting, words

LENGTH = 131072
"""Default length of the sequence."""
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
MOST_RANKS, MOST_KINDS = 16, 16
"""Maximum number of ranks with a full matrix of links, and of rows by rank distance for more
ranks.
"""


def over_ranks(plan: AttentionPlan, drawing: Drawing) -> Iterator[Block]:
    """Yield the work and the bytes of each sharding, and the links of the chosen one."""
    assert drawing.ranks is not None
    if plan.spec.paged_kv is not None:
        yield Prose(quoting("Paged keys cannot be sharded over several ranks."))
        return
    length, ranks = drawing.length or LENGTH, drawing.ranks
    mask, assumed = mask_of(plan, length, drawing)
    name, sharding = chosen(mask, length, ranks)
    head = sum(BYTES[plan.spec.dtype] * n for n in (plan.spec.head_dim.qk, plan.spec.head_dim.v))
    said = f"SQ = SK = {length}, {ranks} ranks{''.join(f', {one}' for one in assumed)}."
    yield Prose(
        quoting(f"{said} Bytes count keys and values in forward, for each sequence and key head.")
    )
    rows = []
    for one in SHARDINGS:
        found = sharded(one, mask, length, ranks)
        spread = planned(found, found, mask)
        done = [sum(work(mask, length, *run) for run in part) for part in found.parts]
        mean = max(1, sum(done)) / ranks
        most = max(spread.received(rank) for rank in range(ranks))
        cells = (
            one + " (chosen)" * (one == name),
            f"{max(done) / mean:.3f}",
            f"{min(done) / mean:.3f}",
            _size(most * head),
            _size(sum(spread.received(rank) for rank in range(ranks)) * head),
            "gathered" if spread.gathered else f"{_steps(spread)} exchanges",
        )
        rows.append(tuple(words(cell) for cell in cells))
    titles = (
        "sharding",
        "most work / mean",
        "least",
        "most bytes to a rank",
        "bytes in all",
        "how",
    )
    yield Table(titles, tuple(rows))
    yield from _of_ranks(planned(sharding, sharding, mask), mask, length, head)


def _of_ranks(plan: Plan, mask: Mask, length: int, head: int) -> Iterator[Block]:
    rows = []
    for rank in range(plan.ranks):
        runs = ", ".join(f"[{lo}, {hi})" for lo, hi in plan.q.parts[rank])
        done = sum(work(mask, length, *run) for run in plan.q.parts[rank])
        rows.append(
            (
                words(str(rank)),
                words(runs),
                words(f"{done:.4g}"),
                words(_size(plan.received(rank) * head)),
            )
        )
    yield Table(("rank", "positions", "pairs to compute", "bytes received"), tuple(rows))
    if plan.gathered:
        yield Prose(quoting("Each rank receives all remote keys in one step."))
    if plan.shared:
        n = sum(hi - lo for _, (lo, hi) in plan.shared)
        yield Prose(quoting(f"All ranks need {n} keys, which are broadcast."))
    yield from _links(plan, head)


def _links(plan: Plan, head: int) -> Iterator[Block]:
    """Yield the bytes of each link: one row per sender, or for many ranks one row per kind of
    link.
    """
    ranks = range(plan.ranks)
    sizes = {
        (a, b): head * sum(hi - lo for lo, hi in plan.sent(a, b)) for a in ranks for b in ranks
    }
    if not any(sizes.values()):
        yield Prose(quoting("No other transfers."))
        return
    if plan.ranks <= MOST_RANKS:
        rows = [[str(a), *(_size(n) if (n := sizes[a, b]) else "" for b in ranks)] for a in ranks]
        titles = ("bytes from", *(f"to {b}" for b in ranks))
        yield Table(titles, tuple(tuple(words(cell) for cell in row) for row in rows))
        return
    alike: dict[tuple[int, int], int] = {}
    for (a, b), n in sizes.items():
        if n:
            alike[b - a, n] = alike.get((b - a, n), 0) + 1
    found = sorted(alike.items())
    if len(found) > MOST_KINDS:
        counts: dict[int, int] = {}
        for (_, n), count in found:
            counts[n] = counts.get(n, 0) + count
        rows = [["r to another", str(count), _size(n)] for n, count in sorted(counts.items())]
    else:
        rows = [
            [f"r to r {'-+'[step > 0]} {abs(step)}", str(count), _size(n)]
            for (step, n), count in found
        ]
    yield Table(
        ("links", "how many", "bytes of each"),
        tuple(tuple(words(cell) for cell in row) for row in rows),
    )


def mask_of(plan: AttentionPlan, length: int, drawing: Drawing) -> tuple[Mask, tuple[str, ...]]:
    """Return the keys that queries see at a length, and the assumptions.

    Raise `KgenError` if the bounds cannot be evaluated.
    """
    heads = drawing.heads or 1
    scalars, buffers, assumed = usual(plan, Run(length, given_params(plan, drawing), heads))
    keys = _ranges(plan.forward, scalars, buffers)
    queries = None if plan.dkdv is None else _ranges(plan.dkdv, scalars, buffers)
    mask = Mask(keys, queries, {})
    try:
        list(mask.keys_of(0, 1))
    except (ArithmeticError, ValueError, KeyError) as error:
        message = f"the transfers of `{plan.spec.name}` cannot be computed: {error}"
        hint = "pass other values with `--set`, or another `--length`"
        raise KgenError(Diagnostic("usage", message, hint=hint)) from None
    return mask, assumed


def _ranges(loop: TileLoop, scalars: Mapping[str, Any], buffers: Mapping[str, Row]) -> Any:
    def ranges(b: int, h: int, **tile: int) -> list[tuple[int, int]]:
        env = {**scalars, **tile}
        return [(value(span.lo, env, buffers), value(span.hi, env, buffers)) for span in loop.spans]

    return ranges


def _steps(plan: Plan) -> int:
    """Return the number of steps with a transfer."""
    ranks = range(plan.ranks)
    return sum(any(plan.sent((r - n) % plan.ranks, r) for r in ranks) for n in range(1, plan.ranks))


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"
