"""The setting of a proof: sizes that the launcher admits, a tile, a pair of positions, and the
written spec.

The spec states which pairs are allowed, and their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import z3

from kgen.expr.algebra import LOG2E
from kgen.expr.nodes import Node, measured, walk
from kgen.expr.softmax_form import INF
from kgen.expr.tile_ranges import Axis
from kgen.kernels.attention.plan.extents import named_extents
from kgen.kernels.attention.plan.model import KV_AXIS, Q_AXIS, AttentionPlan
from kgen.kernels.attention.spec import KV_LENS
from kgen.prove.statements import Machine, values_of
from kgen.prove.trees import hidden, term
from kgen.prove.world import LONGEST, Buffer, World, number
from kgen.spec.load import Loaded
from kgen.targets.triton.printer import size_name

SIZES = ("B", "HQ", "HKV", "SQ", "SK")


Blocks = tuple[int, int]
"""The shape of a tile: queries, keys."""


def all_of_them(shapes: list[Blocks]) -> list[Blocks]:
    """Return all tile shapes."""
    return shapes


def shapes(rows: Iterable[Sequence[Any]]) -> list[Blocks]:
    """Return the distinct tile shapes of a table."""
    return list(dict.fromkeys((tile.BLOCK_M, tile.BLOCK_N) for row in rows for tile in row))


@dataclass(frozen=True)
class Extent:
    """The extent of the obligations of a spec's kernels."""

    shapes: Callable[[list[Blocks]], list[Blocks]] = all_of_them
    """Selects the tile shapes to check, from all shapes of a kernel."""
    memory: bool = True
    """True to check integer widths, and loads and stores in every tile shape."""
    values: bool = True
    """True to check masks and scores in every tile shape, although their statements are the
    same.
    """


ALL = Extent()


@dataclass
class Setting:
    """A program of a kernel that owns a tile of `outer` and visits tiles of `inner`, of `blocks`
    (queries, keys).

    `q` and `kv` are arbitrary positions. The position of the outer axis is in the program's tile,
    which may end past the tensor.
    """

    loaded: Loaded
    plan: AttentionPlan
    outer: Axis
    blocks: Blocks
    packed: bool = False
    """True if the rows of a tile belong to several query heads."""
    memory: bool = True
    """True if integer widths are checked."""
    values: bool = True
    """True if masks, scores, loads and stores are checked."""
    world: World = field(init=False)
    names: dict[str, Any] = field(init=False)
    shared: Any = field(init=False)
    """Query heads per key-value head."""

    def __post_init__(self) -> None:
        spec = self.plan.spec
        shapes = {n: named_extents(n, b.shape) for n, b in spec.buffers.items()}
        buffers = {
            n: Buffer(shapes[n], b.dtype, bool(b.sorted), b.within) for n, b in spec.buffers.items()
        }
        self.world = world = World(buffers)
        sizes = {n: world.integer(n, int(n not in ("SQ", "SK")), LONGEST) for n in SIZES}
        own, other = (sizes["SQ"], sizes["SK"]) if self.by_query else (sizes["SK"], sizes["SQ"])
        world.facts += [own >= 1, other >= 0, sizes["HKV"] <= sizes["HQ"]]
        for name, side in (("SQ", spec.lengths.q), ("SK", spec.lengths.kv)):
            multiple = getattr(side, "multiple_of", None)
            world.facts += [sizes[name] % multiple == 0] if multiple else []
        world.facts += [sizes["SQ"] == sizes["SK"]] if self.plan.self_attention else []
        b, h = world.integer("b", 0), world.integer("h", 0)
        world.facts += [b < sizes["B"], h < sizes["HQ"]]
        self._heads(sizes, h)
        lengths = [
            s for shape in shapes.values() for s in shape if isinstance(s, str) and measured(s)
        ]
        open_sizes = {name: world.length(name) for name in lengths}
        self.names = {**sizes, "b": b, "h": h, **open_sizes, **self._scalars()}
        self._tile(own)

    def _heads(self, sizes: Mapping[str, Any], h: Any) -> None:
        """State that GQA query heads share a key-value head, with consequences that z3 cannot
        derive.
        """
        gqa = self.plan.spec.gqa
        self.shared = heads = (
            z3.IntVal(gqa) if isinstance(gqa, int) else self.world.integer("GQA", 1)
        )
        self.world.divides(sizes["HQ"], heads, sizes["HKV"])
        self.world.facts += [heads <= sizes["HQ"], h / heads >= 0, h / heads < sizes["HKV"]]

    @property
    def addresses(self) -> bool:
        """True to check loads and stores, in at least one tile shape."""
        return self.memory or self.values

    @property
    def by_query(self) -> bool:
        """True if programs own queries."""
        return self.outer is Q_AXIS

    @property
    def inner(self) -> Axis:
        return KV_AXIS if self.by_query else Q_AXIS

    @property
    def inner_block(self) -> int:
        return self.blocks[1 if self.by_query else 0]

    @property
    def outer_block(self) -> int:
        return self.blocks[0 if self.by_query else 1]

    @property
    def lane(self) -> Any:
        """The offset of an arbitrary position in a tile of the inner axis."""
        return z3.Int("lane")

    @property
    def inner_size(self) -> Any:
        return self.names["SK" if self.by_query else "SQ"]

    def _scalars(self) -> dict[str, Any]:
        found: dict[str, Any] = {"scale": z3.Real("scale"), "LOG2E": z3.Real(LOG2E.name)}
        self.world.facts += [found["scale"] > 0, found["LOG2E"] > 1]
        for name, param in self.plan.spec.params.items():
            if param.value is not None:
                found[name] = number(float(param.value) if param.type == "float" else param.value)
            elif param.type == "int":
                found[name] = self.world.integer(name, -param.most, param.most)
            else:
                found[name] = self.world.shown.setdefault(name, z3.Real(name))
        return found

    def _tile(self, own: Any) -> None:
        """Define the tile of the program: its first position, its last one in bounds, and an
        arbitrary one.
        """
        block = self.blocks[0 if self.by_query else 1]
        if self.packed:
            self._rows(own, block)
            return
        tile = self.world.integer("tile", 0)
        start = block * tile
        last = z3.If(start + block <= own, start + block, own) - 1
        row = z3.Int("row")
        at = self.world.shown.setdefault(self.outer.index.name, start + row)
        self.world.facts += [start < own, row >= 0, row < block]
        self.names |= {
            self.outer.start.name: start,
            self.outer.last.name: last,
            self.outer.index.name: at,
        }

    def _rows(self, own: Any, block: int) -> None:
        """Define a tile whose rows are (query, head of the group), ordered by query.

        If the number of heads is unknown, the tile is an arbitrary range of queries. A tile size
        that divides the number of queries also divides the number of rows.
        """
        gqa, world = self.plan.spec.gqa, self.world
        start, last, at = (world.integer(n, 0) for n in ("q_start", "q_last", "q_idx"))
        if isinstance(gqa, int):
            first, row = block * world.integer("tile", 0), z3.Int("row")
            end = (first + block - 1) / gqa
            world.facts += [row >= 0, row < block, start == first / gqa, at == (first + row) / gqa]
            world.facts += [start < own, last == z3.If(end < own, end, own - 1)]
        else:
            world.facts += [start <= last, last < own, last < start + block]
            world.facts += [at >= start, at < start + block, z3.Or(at <= last, at >= own)]
            promised = getattr(self.plan.spec.lengths.q, "multiple_of", 1)
            world.facts += [at < own] if promised % block == 0 else []
        self.names |= {"q_start": start, "q_last": last, "q_idx": at}

    # --- the spec ------------------------

    @property
    def there(self) -> Any:
        """The condition that the outer position is in bounds."""
        return self.names[self.outer.index.name] < self.names["SQ" if self.by_query else "SK"]

    @property
    def promises(self) -> list[Any]:
        """Promises of callers that no launcher checks. Loads are in bounds without them."""
        if not self.plan.spec.per_batch:
            return []
        keys = self.world.read(KV_LENS, (self.names["b"],))
        return [keys >= 0, keys <= self.names["SK"]]

    def written(self, q: Any, kv: Any) -> dict[str, Any]:
        """Return the values of the names of expressions at a query and a key."""
        spec = self.plan.spec
        end = self.world.read(KV_LENS, (self.names["b"],)) if spec.per_batch else self.names["SK"]
        at = q + (end - self.names["SQ"]) if spec.aligned_to_end else q
        score = z3.Real("qk") * self.names["scale"]
        own = {
            user: self.names[inner]
            for inner, user in self.plan.called.items()
            if inner in self.names
        }
        return {**self.names, **own, "q_idx": at, "kv_idx": kv, "score": score}

    def allowed(self, q: Any, kv: Any) -> Any:
        """State that the spec allows a pair: its mask is true, and its score is not minus
        infinity.
        """
        tree = self.loaded.trees.get("score_mod")
        if tree is None:
            return self._unmasked(q, kv)
        return z3.And(self._unmasked(q, kv), z3.Not(hidden(self.world, tree, self.written(q, kv))))

    def _unmasked(self, q: Any, kv: Any) -> Any:
        """State that the key exists and the written mask is true."""
        parts = []
        if self.plan.spec.per_batch:
            parts.append(kv < self.world.read(KV_LENS, (self.names["b"],)))
        if (tree := self.loaded.trees.get("mask_mod")) is not None:
            parts.append(term(self.world, tree, self.written(q, kv)))
        return z3.And(*parts) if parts else z3.BoolVal(True)

    @property
    def hides_by_score(self) -> bool:
        """True if kernels compute scores of minus infinity, which remove pairs that their mask
        allows.
        """
        score = self.plan.score_mod
        return score is not None and INF in walk(score)

    def possible(self, q: Any, kv: Any) -> Any:
        """State that a kernel may compute the score of a pair.

        The spec allows the pair, or removes it by a score of minus infinity that the plan computes.
        Obligations about scores cover these pairs.
        """
        if not self.hides_by_score:
            return self.allowed(q, kv)
        planned = self.plan.mask_mod
        names = {**self.names, "q_idx": q, "kv_idx": kv}
        mask = z3.BoolVal(True) if planned is None else term(self.world, planned, names)
        return z3.And(self._unmasked(q, kv), mask)

    def score(self, q: Any, kv: Any) -> Any:
        """Return the score as written."""
        names = self.written(q, kv)
        tree: Node | None = self.loaded.trees.get("score_mod")
        return names["score"] if tree is None else term(self.world, tree, names)

    # --- the kernel ------------------------

    def machine(self) -> Machine:
        """Return the state of a kernel before its first statement, with the names of its tile."""
        params = self.plan.spec.params
        names = {
            n.upper() if n in params and not params[n].runtime else n: v
            for n, v in self.names.items()
        }
        names |= {size_name(*size): v for n, v in self.names.items() if (size := measured(n))}
        blocks = {"BLOCK_M": z3.IntVal(self.blocks[0]), "BLOCK_N": z3.IntVal(self.blocks[1])}
        reals = {n: z3.Real(n) for n in ("qk", "lse", "delta", "ds")}
        own = self.names[self.outer.index.name] - self.names[self.outer.start.name]
        lanes = (
            {"BLOCK_M": own, "BLOCK_N": self.lane}
            if self.by_query
            else {"BLOCK_M": self.lane, "BLOCK_N": own}
        )
        known = values_of({**names, **blocks, **reals, "GQA": self.shared})
        return Machine(self.world, known, lanes=lanes).given(
            **{"offs_m" if self.by_query else "offs_n": own}
        )
