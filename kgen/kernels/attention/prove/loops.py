"""Obligations of a loop over tiles, from the printed statements of its kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import z3

from kgen.expr.mask_form import TRUE
from kgen.kernels.attention.lowered.model import LoopKernel, Part, SpanLoops, TileBody
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE
from kgen.kernels.attention.plan.model import TileLoop
from kgen.kernels.attention.prove.claims import (
    INT32,
    LOADS,
    MASK,
    ONCE,
    SCORE,
    SKIPPED,
    STORES,
    WHOLE,
)
from kgen.kernels.attention.prove.list_order import each_tile_once
from kgen.kernels.attention.prove.list_planes import of_planes
from kgen.kernels.attention.prove.setting import Setting
from kgen.prove.functions import Beyond
from kgen.prove.obligations import Obligation
from kgen.prove.statements import Computed, Load, Machine
from kgen.prove.trees import term
from kgen.targets.code import Code, Name, Statement


@dataclass(frozen=True)
class Visit:
    """A loop over the tiles of `[lo, hi)`. If it has a gap, it skips `[gap_lo, gap_lo + gap)`."""

    lo: Any
    hi: Any
    masked: bool
    block: int
    gap_lo: Any = None
    gap: Any = None

    def start(self, number: Any) -> tuple[Any, Any]:
        """Return the first position of a tile by its number, and the condition that the tile
        exists.
        """
        at = self.lo + self.block * number
        if self.gap is None:
            return at, z3.And(number >= 0, at < self.hi)
        return z3.If(at < self.gap_lo, at, at + self.gap), z3.And(
            number >= 0, at < self.hi - self.gap
        )

    def known(self, setting: Setting, q: Any, kv: Any) -> list[Any]:
        """Return the facts about its pairs that the lists of a block mask guarantee."""
        return []

    def times(self, position: Any) -> list[Any]:
        """Return conditions, of which as many hold as there are tiles that contain a position."""
        if self.gap is None:
            return [self._at(position, self.hi)]
        end = self.hi - self.gap
        before = z3.And(self._at(position, end), self._first(position) < self.gap_lo)
        moved = position - self.gap
        return [before, z3.And(self._at(moved, end), self._first(moved) >= self.gap_lo)]

    def _first(self, position: Any) -> Any:
        return self.lo + self.block * ((position - self.lo) / self.block)

    def _at(self, position: Any, end: Any) -> Any:
        return z3.And(position >= self.lo, self._first(position) < end)


@dataclass(frozen=True)
class Listed(Visit):
    """A loop over the blocks of a list, in tiles that divide a block.

    `hi` is the end of the last block.
    """

    def known(self, setting: Setting, q: Any, kv: Any) -> list[Any]:
        if self.masked:
            return []
        names = setting.names
        return [q < names["SQ"], kv < names["SK"], setting.possible(q, kv)]


@dataclass(frozen=True)
class Kernel:
    """A loop of a kernel: the statements before it, the tiles that it visits, and the statements
    for one tile.

    `spans` are the loops, each with the statements before them.
    """

    name: str
    setting: Setting
    loop: TileLoop
    before: Sequence[Statement]
    spans: Sequence[SpanLoops]
    body: TileBody
    store_guard: Code | None
    given: Mapping[str, Any] = field(default_factory=dict)
    """Values of further names."""

    def obligations(self) -> Iterator[Obligation]:
        """Yield the obligations of the kernel."""
        machine = self.setting.machine()
        machine.values |= self.given
        outer, inner = (
            axis.index.name.removesuffix("_idx") for axis in (self.loop.outer, self.loop.inner)
        )
        machine.wraps = True  # operands of scores are also computed here
        machine.run(self.before)
        machine.wraps = False
        try:
            visits = self._listed(machine) if self.loop.listed else self._visits(machine)
        except Beyond as beyond:
            yield from beyond_all(self.name, self.setting, str(beyond))
            return
        if self.loop.listed:
            yield each_tile_once(self.name, ONCE, self.setting.inner_block, self.loop.masked)
            mask = self.setting.plan.block_mask
            assert mask is not None
            yield of_planes(self.name, mask, self.loop, self.setting.outer_block)
        else:
            yield from self._covers(visits)
        bodies = [self._body(machine, visit, inner) for visit in visits]
        if not self.loop.listed:
            yield from self._whole(bodies)
        if self.setting.addresses:
            yield self._loads(machine, bodies, inner, outer)
            yield self._stores(machine)
        if self.setting.memory:
            yield self._int32(machine, bodies)
        if self.setting.values:
            yield from self._masks(bodies)
            yield self._scores(bodies[-1])

    def _visits(self, machine: Machine) -> list[Visit]:
        visits: list[Visit] = []
        for span in self.spans:
            machine.run(span.bounds)
            visits += [self._visit(machine, part) for part in span.loops]
        return visits

    def _listed(self, machine: Machine) -> list[Visit]:
        """Return the loops over partial and full blocks.

        Other obligations prove the contents of the lists.
        """
        size, block = self.setting.inner_size, self.setting.inner_block
        end = (size + BLOCK_SIZE - 1) / BLOCK_SIZE * BLOCK_SIZE
        return [Listed(z3.IntVal(0), end, masked, block) for masked in (self.loop.masked, False)]

    def _visit(self, machine: Machine, part: Part) -> Visit:
        gap = [machine.value(end) for end in part.gap] if part.gap is not None else [None, None]
        block = self.setting.inner_block
        return Visit(machine.value(part.lo), machine.value(part.hi), part.masked, block, *gap)

    def _body(self, before: Machine, visit: Visit, inner: str) -> _Body:
        """Run the statements for one lane of one tile."""
        setting, machine = self.setting, before.copy()
        loads, computed = len(machine.loads), len(machine.computed)
        number, lane = z3.Int(f"{inner}_tile"), setting.lane
        start, visited = visit.start(number)
        position = start + lane
        q, kv = (
            (setting.names["q_idx"], position)
            if inner == "kv"
            else (position, setting.names["kv_idx"])
        )
        facts = [visited, lane >= 0, lane < visit.block, *visit.known(setting, q, kv)]
        # Loads in the tile run under the facts about the tile.
        of_tile = replace(machine, path=tuple(facts))
        offsets = {"kv": "offs_n", "q": "offs_m"}[inner]
        of_tile.given(
            **{
                f"{inner}_start": start,
                f"{inner}_idx": position,
                offsets: lane,
                "MASKED": visit.masked,
            }
        )
        if visit.masked:
            of_tile.run(self.body.mask_lines)
        of_tile.wraps = True
        # Addresses of the first tile are computed before the loop, for the same lane.
        of_tile.run([*self.body.row_lines, *self.body.read_lines, *self.body.score_lines])
        setting.world.shown |= {f"{inner}_start": start, f"{inner}_idx": position}
        return _Body(visit, of_tile, q, kv, start, position, facts, loads, computed)

    def _obligation(
        self, what: str, claim: Any = None, facts: Sequence[Any] = (), **more: Any
    ) -> Obligation:
        world = self.setting.world
        return Obligation(self.name, what, claim, [*world.facts, *facts], dict(world.shown), **more)

    # --- which tiles ------------------------

    def _covers(self, visits: Sequence[Visit]) -> Iterator[Obligation]:
        setting = self.setting
        inner = setting.inner.index.name
        position = z3.Int(inner)
        q, kv = (
            (setting.names["q_idx"], position)
            if setting.by_query
            else (position, setting.names["kv_idx"])
        )
        allowed = setting.allowed(q, kv)
        there = [setting.there, *setting.promises, position >= 0, position < setting.inner_size]
        setting.world.shown[inner] = position
        times = [once for visit in visits for once in visit.times(position)]
        yield self._obligation(SKIPPED, z3.Or(*times), [*there, allowed])
        several = [z3.And(a, b) for i, a in enumerate(times) for b in times[:i]]
        yield self._obligation(ONCE, z3.Not(z3.Or(*several)), there)

    def _whole(self, bodies: Sequence[_Body]) -> Iterator[Obligation]:
        for body in bodies:
            if not body.visit.masked:
                inside = z3.And(body.position >= 0, body.position < self.setting.inner_size)
                possible = self.setting.possible(body.q, body.kv)
                claim = z3.Implies(self.setting.there, z3.And(inside, possible))
                yield self._obligation(WHOLE, claim, [*body.facts, *self.setting.promises])

    # --- memory ------------------------

    def _loads(
        self, machine: Machine, bodies: Sequence[_Body], inner: str, outer: str
    ) -> Obligation:
        live = f"{outer}_live"
        loads = [
            *machine.loads,
            *(load for body in bodies for load in body.machine.loads[body.loads :]),
        ]
        try:
            guard = machine.value(Name(live)) if live in machine.values else z3.BoolVal(True)
            parts = [(f"rows of {outer}", z3.Implies(guard, self.setting.there))]
            for body in bodies:
                streamed = z3.Implies(z3.And(*body.facts), self._tile_load(body, inner))
                parts.append((f"tiles of {inner}", streamed))
            return self._obligation(LOADS, parts=[*parts, *loads_inside(loads)])
        except Beyond as beyond:
            return self._obligation(LOADS, beyond=str(beyond))

    def _tile_load(self, body: _Body, inner: str) -> Any:
        """State that loads of keys or queries are in bounds."""
        inside = z3.And(body.position >= 0, body.position < self.setting.inner_size)
        if not body.visit.masked or self.loop.inner_live == TRUE:
            return inside
        return z3.Implies(body.machine.value(Name(f"{inner}_live")), inside)

    def _stores(self, machine: Machine) -> Obligation:
        there = self.setting.there
        if self.store_guard is None:
            return self._obligation(STORES, there)
        try:
            return self._obligation(STORES, machine.value(self.store_guard) == there)
        except Beyond as beyond:
            return self._obligation(STORES, None, beyond=str(beyond))

    # --- numbers ------------------------

    def _int32(self, machine: Machine, bodies: Sequence[_Body]) -> Obligation:
        computed = list(machine.computed)
        for body in bodies:
            computed += body.machine.computed[body.computed :]
        return self._obligation(INT32, parts=in_32_bits(computed))

    def _masks(self, bodies: Sequence[_Body]) -> Iterator[Obligation]:
        for body in bodies:
            if not body.visit.masked:
                continue
            inside = body.position < self.setting.inner_size
            try:
                mask = body.machine.value(Name("mask"))
                claim = z3.Implies(
                    self.setting.there, masks(self.setting, mask, inside, (body.q, body.kv))
                )
                yield self._obligation(MASK, claim, [*body.facts, *self.setting.promises])
            except Beyond as beyond:
                yield self._obligation(MASK, None, beyond=str(beyond))

    def _scores(self, body: _Body) -> Obligation:
        """State that base-2 logits plus the term `row_rest` equal log2(e) times the score."""
        setting, lowered = self.setting, self.body
        try:
            logits = body.machine.value(Name(lowered.logits))
            if lowered.scaled is not None:
                logits = logits * body.machine.value(lowered.scaled)
            start = {self.loop.inner.start.name: body.start}
            logits = logits + row_rest(setting, self.loop, body.machine, (body.q, body.kv), start)
            written = setting.names["LOG2E"] * setting.score(body.q, body.kv)
            inside = z3.And(setting.there, body.position < setting.inner_size)
            facts = [*body.facts, *setting.promises, inside, setting.possible(body.q, body.kv)]
            return self._obligation(SCORE, None, facts, equal=(logits, written))
        except Beyond as beyond:
            return self._obligation(SCORE, None, beyond=str(beyond))


def masks(setting: Setting, mask: Any, there: Any, pair: tuple[Any, Any]) -> Any:
    """State that a mask is true for all allowed pairs, and false if a kernel must not compute the
    score.
    """
    allowed = z3.And(there, setting.allowed(*pair))
    if not setting.hides_by_score:
        return mask == allowed
    possible = z3.And(there, setting.possible(*pair))
    return z3.And(z3.Implies(allowed, mask), z3.Implies(mask, possible))


def beyond_all(kernel: str, setting: Setting, why: str) -> Iterator[Obligation]:
    """Yield every obligation of a kernel as unknown, because its bounds have no encoding."""
    memory = (*(LOADS,) * setting.addresses, *(INT32,) * setting.memory)
    for what in (SKIPPED, WHOLE, ONCE, *memory, MASK, SCORE):
        yield Obligation(kernel, what, beyond=why)


@dataclass(frozen=True)
class _Body:
    """One lane of one tile of a loop."""

    visit: Visit
    machine: Machine
    q: Any
    kv: Any
    start: Any
    position: Any
    facts: Sequence[Any]
    loads: int
    computed: int


def in_32_bits(computed: Sequence[Computed]) -> list[tuple[str, Any]]:
    """Return the claims that integers fit 32 bits, each with its code as text."""
    least, most = -(2**31), 2**31
    distinct = {(c.when.get_id(), c.term.get_id()): c for c in computed}
    return [
        (c.text, z3.Implies(c.when, z3.And(c.term >= least, c.term < most)))
        for c in distinct.values()
    ]


def loads_inside(loads: Iterable[Load]) -> list[tuple[str, Any]]:
    """Return the claims that loads are in bounds.

    Raise `Beyond` for an address without an encoding.
    """
    found = []
    for load in loads:
        if load.inside is None:
            raise Beyond(load.why)
        found.append((load.text, z3.Implies(load.when, load.inside)))
    return found


def row_rest(
    setting: Setting,
    loop: TileLoop,
    machine: Machine,
    pair: tuple[Any, Any],
    more: Mapping[str, Any],
) -> Any:
    """Return `row_rest`, which `lse` adds: a tree of the plan, with the names that its program
    binds.
    """
    rest = loop.program.results.get("row_rest")
    if rest is None:
        return z3.RealVal(0)
    names = {**setting.names, "q_idx": pair[0], "kv_idx": pair[1], **more}
    for binding in loop.program.bindings:
        with suppress(Beyond):
            names[binding.name] = machine.value(Name(binding.name))
    return term(setting.world, rest, names)


def kernel_of(name: str, setting: Setting, loop: TileLoop, kernel: LoopKernel) -> Kernel:
    """Return a kernel for proofs from the kernel that its template prints."""
    return Kernel(
        name,
        setting,
        loop,
        [*kernel.shared_prologue, *kernel.prologue, *kernel.ranges.searches],
        kernel.ranges.spans,
        kernel.body,
        kernel.store_guard,
    )
