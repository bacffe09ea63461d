"""Obligations of the Hopper kernels: the tiles that each half of a program's tile processes, masks
and scores.

TMA loads Q, K and V, and never reads past the end of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import z3

from kgen.kernels.attention.lowered.kernels import accumulators, loop_kernel
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.prove.claims import INT32, LOADS, MASK, ONCE, SCORE, SKIPPED, WHOLE
from kgen.kernels.attention.prove.list_order import each_tile_once
from kgen.kernels.attention.prove.loops import beyond_all, in_32_bits, loads_inside, masks, row_rest
from kgen.kernels.attention.prove.setting import ALL, Extent, Setting
from kgen.kernels.attention.schedules.hopper.keys import KeysLoop
from kgen.kernels.attention.schedules.hopper.loops import FIRST_KEY, TileRange
from kgen.kernels.attention.schedules.hopper.lowering import hopper_loops
from kgen.kernels.attention.schedules.hopper.plan import HopperPlan, HopperTile, plan_hopper
from kgen.kernels.attention.schedules.hopper.portable import portable_of
from kgen.kernels.attention.schedules.hopper.queries import QueriesLoop
from kgen.prove.functions import Beyond, toward_zero
from kgen.prove.obligations import Obligation
from kgen.prove.statements import Machine
from kgen.spec.load import Loaded
from kgen.targets.code import Code, Name, Op, Statement, op, rewritten
from kgen.targets.triton.printer import first_at_least


def obligations(loaded: Loaded, extent: Extent = ALL) -> Iterator[Obligation]:
    """Yield the obligations of the Hopper kernels of a spec."""
    free = without_promises(loaded)
    yield from of_hopper(
        loaded, plan_attention(loaded if free.spec == loaded.spec else free), extent
    )


def of_hopper(loaded: Loaded, plan: AttentionPlan, extent: Extent = ALL) -> Iterator[Obligation]:
    """Yield the obligations of `hopper.py`, whose plan ignores promises about lengths."""
    hopper = plan_hopper(plan)
    if hopper is None:
        return
    kernels = Lowering(plan)
    whole = {"forward": plan.forward, "dq": plan.dq, "dkdv": plan.dkdv}
    portable = portable_of(
        {
            name: loop_kernel(kernels, of, accumulators(of))
            for name, of in whole.items()
            if of is not None
        }
    )
    loops = hopper_loops(hopper, plan, kernels, portable)

    def named(name: str, loop: TileLoop, tile: HopperTile) -> tuple[str, Setting]:
        setting = Setting(
            loaded, plan, loop.outer, (tile.BLOCK_M, tile.BLOCK_N), memory=extent.memory
        )
        return f"{name} on Hopper {tile.BLOCK_M}x{tile.BLOCK_N}", setting

    of_queries = (("forward", loops.forward, plan.forward), ("dq", loops.dq, plan.dq))
    for name, made, loop in of_queries:
        if made is not None and loop is not None:
            assert loops.forward is not None
            tile = getattr(hopper, name)
            ranges, last = loops.forward.range, loops.last_masked
            yield from QueryTile(
                *named(name, loop, tile), loop, hopper, tile, ranges, made, last
            ).obligations()
    if loops.dkdv is not None and plan.dkdv is not None and hopper.dkdv is not None:
        title, setting = named("dkdv", plan.dkdv, hopper.dkdv)
        made_of_keys = KeyTile(
            title, setting, plan.dkdv, hopper, hopper.dkdv, loops.dkdv.range, loops.dkdv
        )
        yield from made_of_keys.obligations()


@dataclass(frozen=True)
class _Numbered:
    """The j-th tile: its start, and if it is loaded, processed by a half, and processed without the
    mask.
    """

    start: Any
    loaded: Any
    taken: Any
    unmasked: Any

    @property
    def visited(self) -> Any:
        """The condition that the tile is loaded and a half processes it."""
        return z3.And(self.loaded, self.taken)

    @property
    def whole(self) -> Any:
        """The condition that a half processes the tile without the mask."""
        return z3.And(self.visited, self.unmasked)


@dataclass(frozen=True)
class HopperKernel:
    """A kernel: `ranges` of a tile in its producer, and the loop of a half in its consumers
    (`made`).
    """

    name: str
    setting: Setting
    loop: TileLoop
    hopper: HopperPlan
    tile: HopperTile
    ranges: TileRange
    made: QueriesLoop | KeysLoop

    def obligations(self) -> Iterator[Obligation]:
        """Yield the obligations of the kernel."""
        producer, number, listed = self.setting.machine(), z3.Int("number"), self.loop.listed
        try:
            producer.run([] if listed else (line.map(_searched) for line in self.ranges.bounds))
            consumer = self._half(producer)
            tiles = self._of_lists(consumer) if listed else self._tiles(producer, consumer)
            one = tiles(number)
        except Beyond as beyond:
            yield from beyond_all(self.name, self.setting, str(beyond))
            return
        at = one.start + self.setting.lane
        inner = self.setting.inner.index.name
        self.setting.world.shown |= {inner: at, f"{inner.removesuffix('_idx')}_start": one.start}
        if listed:
            yield each_tile_once(self.name, ONCE, self.setting.inner_block, self.made.body.masked)
        else:
            yield from self._covers(producer, consumer, tiles)
        yield from self._of_a_tile(producer, consumer, one, at)

    def _covers(self, producer: Machine, consumer: Machine, tiles: Any) -> Iterator[Obligation]:
        setting, position, one = self.setting, z3.Int("position"), tiles(z3.Int("number"))
        there = [setting.there, *setting.promises, position >= 0, position < setting.inner_size]
        visited = tiles(self._number(producer, consumer, position)).visited
        found = self._obligation(
            SKIPPED, z3.Implies(setting.allowed(*self._pair(position)), visited), there
        )
        yield replace(found, values={**found.values, setting.inner.index.name: position})
        # A half would wait forever for a tile that is not loaded.
        loaded = z3.Implies(one.taken, one.loaded)
        yield self._obligation(ONCE, z3.And(loaded, self._once(producer, tiles)))

    def _of_a_tile(
        self, producer: Machine, consumer: Machine, one: _Numbered, at: Any
    ) -> Iterator[Obligation]:
        """Yield the obligations for an arbitrary tile.

        They also cover consumers that process its columns in parts, because the column is
        arbitrary.
        """
        setting, size, lane, pair = (
            self.setting,
            self.setting.inner_size,
            self.setting.lane,
            self._pair(at),
        )
        path = (one.visited, lane >= 0, lane < setting.inner_block)
        body = self._body(consumer, one, at, path)
        possible = setting.possible(*pair)
        known = [*path, *setting.promises]
        if not z3.is_false(one.unmasked):
            inside = z3.And(at >= 0, at < size, possible)
            yield self._obligation(
                WHOLE, z3.Implies(z3.And(one.whole, setting.there), inside), known
            )
        yield from self._memory(producer, body)
        if self.made.body.masked:

            def masked() -> Any:
                return z3.Implies(setting.there, masks(setting, self._mask(body), at < size, pair))

            yield self._stated(MASK, masked, known)
        yield self._score(body, pair, one.start, [*known, setting.there, at < size, possible])

    def _memory(self, producer: Machine, body: Machine) -> Iterator[Obligation]:
        try:
            yield self._obligation(LOADS, parts=loads_inside([*producer.loads, *body.loads]))
        except Beyond as beyond:
            yield self._obligation(LOADS, beyond=str(beyond))
        if not self.setting.memory:
            return
        yield self._obligation(INT32, parts=in_32_bits([*producer.computed, *body.computed]))

    def _pair(self, inner: Any) -> tuple[Any, Any]:
        """Return the query and the key of a position of the inner axis."""
        outer = self.setting.names[self.loop.outer.index.name]
        return (outer, inner) if self.setting.by_query else (inner, outer)

    def _of_lists(self, consumer: Machine) -> Any:
        """Return arbitrary tiles, for the blocks of a list."""
        block = self.setting.inner_block
        consumer.wraps = True
        consumer.run(self._prologue())
        consumer.wraps = False
        end = (self.setting.inner_size + BLOCK_SIZE - 1) / BLOCK_SIZE * BLOCK_SIZE

        def numbered(j: Any) -> _Numbered:
            start = block * j
            return _Numbered(
                start, z3.And(j >= 0, start < end), z3.BoolVal(True), z3.BoolVal(False)
            )

        return numbered

    # --- parts ------------------------

    def _obligation(
        self, what: str, claim: Any = None, facts: Sequence[Any] = (), **more: Any
    ) -> Obligation:
        world = self.setting.world
        return Obligation(self.name, what, claim, [*world.facts, *facts], dict(world.shown), **more)

    def _stated(self, what: str, claim: Any, facts: Sequence[Any] = ()) -> Obligation:
        try:
            return self._obligation(what, claim(), facts)
        except Beyond as beyond:
            return self._obligation(what, None, beyond=str(beyond))

    def _half(self, producer: Machine) -> Machine:
        """Return the state of a consumer, with its own rows of the tile."""
        setting = self.setting
        axis, block = self.loop.outer, setting.blocks[0 if setting.by_query else 1]
        parts = self.tile.consumers if setting.by_query else 1 if self.hopper.split_dkdv else 2
        own = block // parts
        part = setting.world.integer("consumer", 0, parts - 1)
        start = setting.names[axis.start.name] + own * part
        at = setting.names[axis.index.name]
        setting.world.facts += [at >= start, at < start + own]
        consumer = setting.machine()
        lane = "BLOCK_M" if setting.by_query else "BLOCK_N"
        rows = {"OWN_M" if setting.by_query else "OWN_N": z3.IntVal(own)}
        consumer.lanes = {**consumer.lanes, lane: at - start, **dict.fromkeys(rows, at - start)}
        return consumer.given(
            **{axis.start.name: start, "offs_m" if setting.by_query else "offs_n": at - start},
            **rows,
        )

    def _body(self, consumer: Machine, one: _Numbered, at: Any, path: tuple[Any, ...]) -> Machine:
        inner = self.setting.inner.index.name.removesuffix("_idx")
        consumer.path = path
        offsets = {"kv": "offs_n", "q": "offs_m"}[inner]
        consumer.given(
            **{
                f"{inner}_start": one.start,
                f"{inner}_idx": at,
                offsets: self.setting.lane,
                "MASKED": True,
            }
        )
        body = self.made.body
        consumer.run([load.line for load in body.mask_loads])
        consumer.run(body.mask_lines)
        if body.mask is not None:
            consumer.run([body.mask])
        consumer.wraps = True
        consumer.run(body.score_lines)
        return consumer

    def _mask(self, body: Machine) -> Any:
        mask = body.value(Name("mask"))
        if (documents := self.made.body.documents) is not None:
            several = body.value(documents.several)
            body.run([documents.load])
            return z3.And(mask, z3.Implies(several, body.value(documents.same)))
        return mask

    def _score(
        self, body: Machine, pair: tuple[Any, Any], start: Any, facts: Sequence[Any]
    ) -> Obligation:
        setting, tile = self.setting, self.made.body
        try:
            logits = body.value(Name(tile.logits)) + self._begun(body)
            if tile.scaled is not None:
                logits = logits * body.value(tile.scaled)
            names = {self.loop.outer.start.name: body.value(Name(self.loop.outer.start.name))}
            names |= {self.loop.inner.start.name: start}
            logits = logits + row_rest(setting, self.loop, body, pair, names)
            written = setting.names["LOG2E"] * setting.score(*pair)
            return self._obligation(SCORE, None, facts, equal=(logits, written))
        except Beyond as beyond:
            return self._obligation(SCORE, None, beyond=str(beyond))

    def _prologue(self) -> list[Statement]:
        """Return the statements of a consumer before its loop."""
        raise NotImplementedError

    def _begun(self, body: Machine) -> Any:
        """Return the value with which the product of queries and keys begins."""
        return z3.RealVal(0)

    def _tiles(self, producer: Machine, consumer: Machine) -> Any:
        raise NotImplementedError

    def _number(self, producer: Machine, consumer: Machine, position: Any) -> Any:
        """Return the number of the tile that would contain a position."""
        raise NotImplementedError

    def _once(self, producer: Machine, tiles: Any) -> Any:
        """State that tiles of different numbers do not overlap."""
        raise NotImplementedError


def _searched(code: Code) -> Code:
    """Replace the producer's search for one key by the search for two keys."""

    def change(part: Code) -> Code | None:
        match part:
            case Op(fn=found, args=(at, stride, size, first)) if found == FIRST_KEY:
                return op("{0}[0]", first_at_least(at, str(stride), str(size), first, first))
        return None

    return rewritten(code, change)


def _down(a: Any, b: int) -> Any:
    return toward_zero(a, z3.IntVal(b))


def _up(a: Any, b: int) -> Any:
    """Return the quotient as `cdiv` computes it, also for negative numbers."""
    return _down(a + b - 1, b)


def _least(a: Any, b: Any) -> Any:
    return z3.If(a <= b, a, b)


def _most(a: Any, b: Any) -> Any:
    return z3.If(a >= b, a, b)


@dataclass(frozen=True)
class QueryTile(HopperKernel):
    """Forward and dq: the last tile of keys comes first, and masked tiles are at the ends."""

    made: QueriesLoop
    last_masked: Code
    """The number of masked tiles at the end."""

    def _prologue(self) -> list[Statement]:
        return self.made.prologue

    def _tiles(self, producer: Machine, consumer: Machine) -> Any:
        ranges, made, block = self.ranges, self.made, self.setting.inner_block
        lo = producer.value(ranges.lo)
        count = _most(_up(producer.value(ranges.length), block), z3.IntVal(1))
        first = z3.IntVal(0)
        last = count
        if (found := ranges.from_first_key) is not None:
            first = z3.If(
                producer.value(Name(found.first)) != producer.value(Name(found.last)), 1, 0
            )
            left = _down(producer.value(Name("kv_full_hi")) - lo, block)
            last = z3.If(first > 0, count, count - left)
        else:
            if ranges.head is not None:
                first = _down(producer.value(ranges.head), block)
            producer.given(n_tiles=count, n_first_masked=first)
            last = producer.value(self.last_masked)
        consumer.given(kv_lo=lo, n_tiles=count, n_first_masked=first, n_last_masked=last)
        consumer.wraps = True
        consumer.run(self._prologue())
        consumer.wraps = False
        consumer.run(made.own_bounds)
        past = consumer.value(Name("n_past")) if made.past else z3.IntVal(0)
        end = count - (consumer.value(Name("n_ahead")) if made.ahead else 0)
        first, last = (consumer.value(Name(f"n_{which}_masked")) for which in ("first", "last"))
        at_both_ends = ranges.head is not None
        splits = ranges.has_full or ranges.from_first_key is not None

        def numbered(j: Any) -> _Numbered:
            whole = z3.And(j >= last, j < count - first) if at_both_ends else j >= last
            if not made.body.masked:
                whole = z3.BoolVal(True)
            elif not splits:
                whole = z3.BoolVal(False)
            loaded, taken = z3.And(j >= 0, j < count), z3.And(j >= past, j < end)
            return _Numbered(lo + block * (count - 1 - j), loaded, taken, whole)

        return numbered

    def _number(self, producer: Machine, consumer: Machine, position: Any) -> Any:
        lo, count = (consumer.value(Name(name)) for name in ("kv_lo", "n_tiles"))
        return count - 1 - (position - lo) / self.setting.inner_block

    def _once(self, producer: Machine, tiles: Any) -> Any:
        a, b = z3.Ints("number other")
        return z3.Implies(a < b, tiles(b).start + self.setting.inner_block <= tiles(a).start)

    def _begun(self, body: Machine) -> Any:
        if (bias := self.made.bias) is None:
            return z3.RealVal(0)
        return body.value(bias.start) + body.value(bias.slope) * z3.ToReal(self.setting.lane)


@dataclass(frozen=True)
class KeyTile(HopperKernel):
    """dk and dv: tiles of queries that need the mask come first."""

    made: KeysLoop

    def _prologue(self) -> list[Statement]:
        return [*self.made.shared_prologue, *self.made.of_head]

    def _tiles(self, producer: Machine, consumer: Machine) -> Any:
        ranges, made, block = self.ranges, self.made, self.setting.inner_block
        lo = producer.value(ranges.lo)
        zero = z3.IntVal(0)
        count = _most(_up(producer.value(ranges.length), block), zero)
        first = _down(producer.value(ranges.head), block) if ranges.head is not None else zero
        masked = count
        if ranges.has_full:
            full = _most(_up(producer.value(ranges.full_length), block), zero)
            masked = _least(_most(count - full, z3.IntVal(1)), count)
            if self.hopper.fused:
                ends = (
                    self.setting.names["kv_start"] + self.setting.blocks[1]
                    > self.setting.names["SK"]
                )
                masked = z3.If(ends, count, masked)
        consumer.given(q_lo=lo, n_tiles=count, n_first_masked=first, n_masked=masked)
        consumer.wraps = True
        consumer.run(self._prologue())
        consumer.wraps = False
        consumer.run(made.own_bounds)
        ahead = consumer.value(Name("n_ahead")) if made.ahead else zero
        past = consumer.value(Name("n_past")) if made.past else zero

        def numbered(j: Any) -> _Numbered:
            place = z3.If(j < first, j, z3.If(j < masked, j + count - masked, j - masked + first))
            rest = z3.And(j >= masked, j < count)
            taken = z3.Or(z3.And(j >= ahead, j < masked - past), rest)
            whole = rest if ranges.has_full else z3.BoolVal(False)
            return _Numbered(lo + block * place, z3.And(j >= 0, j < count), taken, whole)

        return numbered

    def _number(self, producer: Machine, consumer: Machine, position: Any) -> Any:
        lo, count, first, masked = (
            consumer.value(Name(name)) for name in ("q_lo", "n_tiles", "n_first_masked", "n_masked")
        )
        place = (position - lo) / self.setting.inner_block
        return z3.If(
            place < first,
            place,
            z3.If(place >= first + count - masked, place - count + masked, place - first + masked),
        )

    def _once(self, producer: Machine, tiles: Any) -> Any:
        a, b = z3.Ints("number other")
        block = self.setting.inner_block
        there = z3.And(a != b, tiles(a).loaded, tiles(b).loaded)
        apart = z3.Or(
            tiles(a).start + block <= tiles(b).start, tiles(b).start + block <= tiles(a).start
        )
        return z3.Implies(there, apart)
