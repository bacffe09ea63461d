"""How sequences would be spread over ranks: what each would do, and what would go from one to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.kernels.attention.explaining.drawing import given_params
from kgen.kernels.attention.parallel.planning import SHARDINGS, Mask, Plan, chosen, planned, sharded, work
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.plan.picture import Row, Run, usual, value
from kgen.pages.model import Block, Drawing, Prose, Table, quoting, words

LENGTH = 131072
"""Of the sequence, where none is asked for."""
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
MOST_RANKS, MOST_KINDS = 16, 16
"""Ranks whose links are listed one by one, and kinds of links of more ranks that are told apart by where they go."""


def over_ranks(plan: AttentionPlan, drawing: Drawing) -> Iterator[Block]:
    """Each sharding with its work and what it sends, and the links of the one that is chosen."""
    assert drawing.ranks is not None
    if plan.spec.paged_kv is not None:
        yield Prose(
            quoting("Its keys are in pages, which no rank has a part of: it does not go over several ranks.")
        )
        return
    length, ranks = drawing.length or LENGTH, drawing.ranks
    mask, assumed = mask_of(plan, length, drawing)
    name, sharding = chosen(mask, length, ranks)
    head = sum(BYTES[plan.spec.dtype] * n for n in (plan.spec.head_dim.qk, plan.spec.head_dim.v))
    said = f"SQ = SK = {length}, {ranks} ranks{''.join(f', {one}' for one in assumed)}."
    yield Prose(
        quoting(f"{said} Bytes are of keys and values, for each sequence and head of theirs, forward.")
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
    titles = ("sharding", "most work / mean", "least", "most bytes to a rank", "bytes in all", "how")
    yield Table(titles, tuple(rows))
    yield from _of_ranks(planned(sharding, sharding, mask), mask, length, head)


def _of_ranks(plan: Plan, mask: Mask, length: int, head: int) -> Iterator[Block]:
    rows = []
    for rank in range(plan.ranks):
        runs = ", ".join(f"[{lo}, {hi})" for lo, hi in plan.q.parts[rank])
        done = sum(work(mask, length, *run) for run in plan.q.parts[rank])
        rows.append(
            (words(str(rank)), words(runs), words(f"{done:.4g}"), words(_size(plan.received(rank) * head)))
        )
    yield Table(("rank", "positions", "pairs to look at", "bytes received"), tuple(rows))
    if plan.gathered:
        yield Prose(quoting("What a rank needs of all others comes at once."))
    if plan.shared:
        n = sum(hi - lo for _, (lo, hi) in plan.shared)
        yield Prose(quoting(f"{n} keys are needed by all ranks, and sent to all at once."))
    yield from _links(plan, head)


def _links(plan: Plan, head: int) -> Iterator[Block]:
    """The bytes of each link: a row for each rank that sends; of many ranks those of as many bytes together."""
    ranks = range(plan.ranks)
    sizes = {(a, b): head * sum(hi - lo for lo, hi in plan.sent(a, b)) for a in ranks for b in ranks}
    if not any(sizes.values()):
        yield Prose(quoting("Nothing goes from one rank to another alone."))
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
        rows = [[f"r to r {'-+'[step > 0]} {abs(step)}", str(count), _size(n)] for (step, n), count in found]
    yield Table(
        ("links", "how many", "bytes of each"), tuple(tuple(words(cell) for cell in row) for row in rows)
    )


def mask_of(plan: AttentionPlan, length: int, drawing: Drawing) -> tuple[Mask, tuple[str, ...]]:
    """What queries see at a length, and what was assumed. Raises `KgenError` where that cannot be said."""
    heads = drawing.heads or 1
    scalars, buffers, assumed = usual(plan, Run(length, given_params(plan, drawing), heads))
    keys = _ranges(plan.forward, scalars, buffers)
    queries = None if plan.dkdv is None else _ranges(plan.dkdv, scalars, buffers)
    mask = Mask(keys, queries, {})
    try:
        list(mask.keys_of(0, 1))
    except (ArithmeticError, ValueError, KeyError) as error:
        message = f"what ranks need of `{plan.spec.name}` cannot be said: {error}"
        hint = "give other values with `--set`, or another `--length`"
        raise KgenError(Diagnostic("usage", message, hint=hint)) from None
    return mask, assumed


def _ranges(loop: TileLoop, scalars: Mapping[str, Any], buffers: Mapping[str, Row]) -> Any:
    def ranges(b: int, h: int, **tile: int) -> list[tuple[int, int]]:
        env = {**scalars, **tile}
        return [(value(span.lo, env, buffers), value(span.hi, env, buffers)) for span in loop.spans]

    return ranges


def _steps(plan: Plan) -> int:
    """How many of the steps carry anything."""
    ranks = range(plan.ranks)
    return sum(any(plan.sent((r - n) % plan.ranks, r) for r in ranks) for n in range(1, plan.ranks))


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"
