"""Planning: build an `AttentionPlan` from a spec, with the loads, hoisted values, loops and stores
of each kernel.

The plan contains all decisions, as expressions. A target only prints them. All kernels have one
description, `TileLoop`: a program holds a tile of the *outer* index and visits tiles of the *inner*
one.

    forward   outer q_idx, inner kv_idx     out, lse
    dq        outer q_idx, inner kv_idx     dq, gradients of buffers that do not depend on the key
    dkdv      outer kv_idx, inner q_idx     dk, dv, gradients of buffers that depend on the key
                                            alone
    pair      one tile of both              gradient of a buffer with an element for each
                                            (query, key)
    diagonal  the tiles on one diagonal     gradient of a buffer that is read by the distance
                                            q_idx - kv_idx

The loops follow FlashAttention-2 (Dao 2023, Algorithms 1 and 2). See `TileLoop` for the
differences.
"""

from __future__ import annotations

from dataclasses import replace

from kgen.expr.algebra import Algebra, call
from kgen.expr.canonical import canonical, canonical_part
from kgen.expr.detached import without_detach
from kgen.expr.differentiate import differentiate, is_zero
from kgen.expr.distance import DISTANCE, over_distance, reads_over_distance
from kgen.expr.hoist import TILE, Place, hoist, place_of
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.magnitudes import FAR
from kgen.expr.mask_form import TRUE, all_of, conjuncts, normalize
from kgen.expr.nodes import (
    FIRST_AT_LEAST,
    Call,
    Const,
    Node,
    Read,
    Type,
    Var,
    children,
    reads,
    substitute,
    variables,
)
from kgen.expr.softmax_form import KV_IDX, Q_IDX, QK, SCORE, peel_scalar, softmax_form
from kgen.expr.spans import Span
from kgen.expr.tile_ranges import Axis, RangeFinder
from kgen.expr.unparse import show
from kgen.kernels.attention.plan.block_mask import Choice, choose, plan_block_mask
from kgen.kernels.attention.plan.extents import HEADS, is_searched, ties_lengths
from kgen.kernels.attention.plan.loops import Loop
from kgen.kernels.attention.plan.model import (
    ALONG_DIAGONAL,
    KV_AXIS,
    KV_LIVE,
    OFFS_N,
    ONE,
    Q_AXIS,
    Q_LIVE,
    SIZES,
    SK,
    SQ,
    AttentionPlan,
    Chunk,
    Guards,
    ReadGradient,
    TileLoop,
    chunks,
    exact,
    grouped,
)
from kgen.kernels.attention.plan.positions import positioned
from kgen.kernels.attention.plan.tiles import LARGEST_TILE, Problem, tile_tables
from kgen.spec.common import numbers
from kgen.spec.load import Loaded
from kgen.spec.names import named_apart, taken_from_values
from kgen.spec.once import once_each


@once_each
def plan_attention(loaded: Loaded, packed: bool = False) -> AttentionPlan:
    """Plan the kernels of a loaded attention spec.

    With `packed`, the query heads of a KV head are rows of one tile, so that `h` differs between
    rows. The plan then has the forward loop only. Decoding uses it.
    """
    loaded = named_apart(loaded)
    known = numbers(loaded.spec.params)
    trees = canonical(loaded.trees, known)
    named = {name: canonical_part(tree, known) for name, tree in loaded.locals.items()}
    return _Planner(positioned(replace(loaded, trees=trees, locals=named)), packed).plan()


class _Planner:
    def __init__(self, loaded: Loaded, packed: bool = False) -> None:
        self.spec = loaded.spec
        self.called = loaded.called
        self.named = {node: name for name, node in loaded.locals.items()}
        self.taken = taken_from_values(loaded)
        self.packed = packed
        self.score_mod = loaded.trees.get("score_mod")
        self.mask_mod = loaded.trees.get("mask_mod")  # the canonical form has no `detach`
        params = self.spec.params
        self.positive = frozenset(
            n for n, p in params.items() if p.value is not None and p.value > 0
        )
        self.algebra = Algebra(self.positive)
        self.divisible_q = _promised(self.spec.lengths.q)
        self.divisible_kv = _promised(self.spec.lengths.kv)
        form = softmax_form(without_detach(self.score_mod or SCORE), self.algebra, exact(self.spec))
        per_row = packed and "h" in variables(form.multiplier)
        self.form = replace(form, positive=form.positive and not per_row)
        self.q, self.kv, self.mask = self._split_mask()
        self.choice = self._choose_block_mask()

    def plan(self) -> AttentionPlan:
        spec, head = self.spec, self.spec.head_dim
        qk_chunks = chunks(head.qk, "offs_d")
        v_chunks = chunks(head.v, "offs_d" if head.v == head.qk else "offs_e")
        backward = "backward" in spec.passes and not self.packed
        gradients = self._gradients() if backward else ()
        outer_q, outer_kv = (Q_AXIS, KV_AXIS), (KV_AXIS, Q_AXIS)
        by_query = tuple(
            g for g in gradients if g.along == "q" or (g.along == "pair" and g.summed is None)
        )
        by_key = tuple(g for g in gradients if g.along == "kv")
        by_pair = tuple(g for g in gradients if g.along == "pair" and g.summed is not None)
        by_distance = tuple(g for g in gradients if g.along == "distance")
        dscore = self._derivative(SCORE)
        # dk sums over the query heads of a group. A factor that differs between them must stay
        # inside the loop.
        by_head = (Var("h", Type.INT),) if grouped(spec) else ()
        forward = self._loop(*outer_q)
        loops = {
            "dq": self._loop(*outer_q, peel_scalar(dscore, self.algebra), by_query),
            "dkdv": self._loop(*outer_kv, peel_scalar(dscore, self.algebra, keep=by_head), by_key),
        }
        problem = self._tile_problem(qk_chunks, v_chunks, forward)
        return AttentionPlan(
            spec=spec,
            score_mod=self.score_mod,
            mask_mod=self.mask_mod,
            form=self.form,
            qk_chunks=qk_chunks,
            v_chunks=v_chunks,
            problem=problem,
            tiles=tile_tables(problem),
            q=self.q,
            kv=self.kv,
            self_attention=self._ties_lengths(),
            forward=forward,
            dq=loops["dq"] if backward else None,
            dkdv=loops["dkdv"] if backward else None,
            pairs=tuple(self._pair(g) for g in by_pair),
            diagonals=tuple(self._diagonal(g) for g in by_distance),
            index_ranges=self._index_ranges(),
            choice=self.choice,
            block_mask=plan_block_mask(
                self._whole_mask(), forward.spans, self._number, self.named, self.taken
            )
            if self.choice.listed
            else None,
            called=self.called,
        )

    def _tile_problem(
        self, qk: tuple[Chunk, ...], v: tuple[Chunk, ...], forward: TileLoop
    ) -> Problem:
        tile_reads = [
            b.node for b in forward.program.bindings if isinstance(b.node, Read) and b.place == TILE
        ]
        return Problem(
            element_size=4 if self.spec.dtype == "fp32" else 2,
            ieee=self.spec.dtype == "fp32" and self.spec.precision == "ieee",
            split=self.spec.dtype == "fp32" and self.spec.precision == "tf32x3",
            width_qk=sum(c.size for c in qk),
            width_v=sum(c.size for c in v),
            mask=_mask_class(forward),
            # Only partial blocks read buffers for the mask.
            score="reads" if tile_reads and not forward.listed else self._score_class(),
            tile_reads=sum(_WORDS.get(self.spec.buffers[r.buffer].dtype, 1) for r in tile_reads),
            varlen=self.spec.varlen,
        )

    def _score_class(self) -> str:
        if self.form.core != QK:
            # Approximate functions take one or two instructions per element, like a bias.
            return "bias" if self.spec.fast_math else "function"
        return "plain" if self.form.max_of_core else "bias"

    # --- masks ------------------------------------------------------------------------------------

    def _split_mask(self) -> tuple[Guards, Guards, Node]:
        """Return the guards of queries, the guards of keys, and the whole mask over `q_live` and
        `kv_live`.
        """
        sides: dict[str, list[Node]] = {"q": [], "kv": [], "both": []}
        rows = {"q_idx", "h"} if self.packed else {"q_idx"}
        for condition in conjuncts(normalize(self.mask_mod or TRUE)):
            names = variables(condition)
            of_q, of_kv = bool(names & rows), "kv_idx" in names
            sides["both" if of_q == of_kv else "q" if of_q else "kv"].append(condition)
        q_bound = TRUE if self.divisible_q else Call("lt", (Q_IDX, SQ), Type.BOOL)
        kv_bound = TRUE if self.divisible_kv else Call("lt", (KV_IDX, SK), Type.BOOL)
        q = Guards(q_bound, all_of([q_bound, *sides["q"]]))
        kv = Guards(kv_bound, all_of([kv_bound, *sides["kv"]]))
        return q, kv, all_of([_named(q.live, Q_LIVE), _named(kv.live, KV_LIVE), *sides["both"]])

    def _spans(self, inner: Axis, outer: Axis) -> tuple[Span, ...]:
        return self._finder(inner, outer).spans(self.mask_mod or TRUE)

    def _finder(self, inner: Axis, outer: Axis) -> RangeFinder:
        untold = {name for name, param in self.spec.params.items() if abs(param.value or 0) > FAR}
        untold |= {"h"} if self.packed else set()
        values = {n: p.value for n, p in self.spec.params.items() if isinstance(p.value, int)}
        return RangeFinder(
            inner, outer, self.algebra, self.positive, self._is_sorted, frozenset(untold), values
        )

    def _choose_block_mask(self) -> Choice:
        spec = self.spec
        able = not (
            self.packed or spec.varlen or "decode" in spec.passes or spec.paged_kv is not None
        )
        sides = [(KV_AXIS, Q_AXIS), (Q_AXIS, KV_AXIS)][: 1 + ("backward" in spec.passes)]
        unclassified = [
            c for axes in sides for c in self._finder(*axes).unclassified(self.mask_mod or TRUE)
        ]
        values = {name: param.value for name, param in spec.params.items()}
        return choose(spec.block_mask, able, tuple(dict.fromkeys(unclassified)), values)

    def _number(self, node: Node) -> int | None:
        """Return the value of an expression over numbers and compile-time parameters, else None."""
        known = self.algebra.to_tree(
            self.algebra.to_sympy(substitute(node, numbers(self.spec.params)))
        )
        return known.value if isinstance(known, Const) and isinstance(known.value, int) else None

    def _whole_mask(self) -> Node:
        """Return the condition for pairs that are in bounds and that the mask keeps."""
        return all_of([self.q.bound, self.kv.bound, self.mask_mod or TRUE])

    def _is_sorted(self, read: Read) -> bool:
        return is_searched(read, self.spec.buffers[read.buffer], self._ties_lengths())

    # --- loops ------------------------------------------------------------------------------------

    def _loop(
        self,
        outer: Axis,
        inner: Axis,
        dscore: tuple[Node, Node] = (ONE, ONE),
        gradients: tuple[ReadGradient, ...] = (),
    ) -> TileLoop:
        outer_name, inner_name = (
            outer.index.name.removesuffix("_idx"),
            inner.index.name.removesuffix("_idx"),
        )
        row, column = Place(False, (outer_name,)), Place(True, (inner_name,))
        places = {
            outer.index.name: row,
            f"{outer_name}_live": row,
            inner.index.name: column,
            f"{inner_name}_live": column,
            inner.start.name: Place(True, ()),
            OFFS_N.name: Place(False, (inner_name,)),
            "qk": TILE,
        } | ({"h": row} if self.packed else {})
        return self._tile_loop(
            Loop(outer, inner, places, row, column, dscore, gradients, self._spans(inner, outer))
        )

    def _pair(self, gradient: ReadGradient) -> TileLoop:
        """Plan a kernel that holds one tile of both indices.

        Its loop is over the batches and heads that share an element of the buffer.
        """
        assert gradient.summed is not None
        places = {"q_idx": Place(False, ("q",)), "kv_idx": Place(False, ("kv",)), "qk": TILE}
        places |= {name: Place(name not in gradient.summed, ()) for name in ("b", "h")}
        # The live positions of a side may depend on the batch.
        row, column = (
            places[x.name] | place_of(g.live, places)
            for x, g in ((Q_IDX, self.q), (KV_IDX, self.kv))
        )
        places |= {"q_live": row, "kv_live": column}
        masked = place_of(self._mask_in(Q_AXIS), places)
        return self._tile_loop(
            Loop(
                Q_AXIS, KV_AXIS, places, row, column, (ONE, ONE), (gradient,), (), masked_at=masked
            )
        )

    def _diagonal(self, gradient: ReadGradient) -> TileLoop:
        """Plan a loop over the tiles on one diagonal of one (b, h).

        Queries and keys advance by the same number, so that distances stay the same.
        """
        row, column = Place(True, ("q",)), Place(True, ("kv",))
        places = {"q_idx": row, "q_live": row, "kv_idx": column, "kv_live": column, "qk": TILE}
        places |= {
            "q_start": Place(True, ()),
            "kv_start": Place(True, ()),
            DISTANCE.name: ALONG_DIAGONAL,
        }
        kept = [over_distance(c, self.algebra) for c in conjuncts(normalize(self.mask_mod or TRUE))]
        allowed = all_of([c for c in kept if c is not None and DISTANCE.name in variables(c)])
        gradient = replace(
            gradient, derivative=reads_over_distance(gradient.derivative, self.algebra)
        )
        return self._tile_loop(
            Loop(
                Q_AXIS,
                KV_AXIS,
                places,
                row,
                column,
                (ONE, ONE),
                (gradient,),
                (),
                along_diagonal=allowed,
            )
        )

    def _tile_loop(self, loop: Loop) -> TileLoop:
        """Hoist the expressions of a loop, each to the place where its indices are known."""
        form = self.form
        if loop.along_diagonal is not None:
            form = replace(
                form,
                core=reads_over_distance(form.core, self.algebra),
                multiplier=reads_over_distance(form.multiplier, self.algebra),
                bias=form.bias and reads_over_distance(form.bias, self.algebra),
            )
        # Rows past the end of a tensor are not stored, but sums along diagonals include them.
        mask = self.mask if loop.along_diagonal is not None else self._mask_in(loop.outer)
        by_columns = (
            loop.inner is KV_AXIS and loop.spans and not self.packed and not exact(self.spec)
        )
        if form.bias is not None and by_columns:
            form = replace(form, bias=self._by_column(form.bias))
        live = {"q_idx": self.q.live, "kv_idx": self.kv.live}
        roots = loop.roots(form, mask, live)
        program = hoist(roots, loop.places, self.taken, self.named)
        factor, dscore = loop.dscore
        return TileLoop(
            outer=loop.outer,
            inner=loop.inner,
            program=program,
            spans=loop.spans,
            masked=mask != TRUE,
            inner_live=live[loop.inner.index.name],
            dscore=dscore,
            dscore_factor=factor,
            gradients=loop.gradients,
            listed=self.choice.listed and bool(loop.spans),
        )

    def _by_column(self, bias: Node) -> Node:
        """Split a bias that is linear in the key, so that slope * column is hoisted from the loop.

        The rest is the value at the first key of the tile. Other biases are returned unchanged.
        """
        if any(KV_IDX.name in variables(read) for read in reads(bias)):
            return bias
        slope = self.algebra.slope(bias, KV_IDX)
        if slope is None or slope == 0 or slope.has(self.algebra.symbol(Q_IDX)):
            return bias
        first = substitute(bias, {KV_IDX: KV_AXIS.start})
        return call("add", call("mul", self.algebra.to_tree(slope), OFFS_N), first)

    def _mask_in(self, outer: Axis) -> Node:
        """Return the mask inside a tile, without the bound of the outer index: rows past its end
        are never stored.
        """
        guards = self.q if outer is Q_AXIS else self.kv
        live = Q_LIVE if outer is Q_AXIS else KV_LIVE
        return all_of([c for c in conjuncts(self.mask) if c != live or guards.live != guards.bound])

    # --- buffers ----------------------------------------------------------------------------------

    def _gradients(self) -> tuple[ReadGradient, ...]:
        found: list[ReadGradient] = []
        # independent of the order of reads
        score, order = self.score_mod or SCORE, [*self.spec.buffers]
        for read in sorted(reads(score), key=lambda r: (order.index(r.buffer), show(r))):
            if not self.spec.buffers[read.buffer].grad:
                continue
            derivative = self._derivative(read)
            if is_zero(derivative):
                continue
            factor, rest = peel_scalar(derivative, self.algebra)
            count = sum(g.buffer == read.buffer for g in found)
            name = read.buffer if not count else f"{read.buffer}_{count + 1}"
            names = (
                frozenset().union(*(variables(i) for i in read.indices))
                if read.indices
                else frozenset()
            )
            along = "q" if "kv_idx" not in names else "pair" if "q_idx" in names else "kv"
            indices, summed = read.indices, self._summed(read)
            if along == "pair" and summed is None and not self.spec.varlen:
                along, indices = self._along_distance(read)
            found.append(ReadGradient(name, read.buffer, indices, along, summed, rest, factor))
        return tuple(found)

    def _derivative(self, wrt: Var | Read) -> Node:
        """Return the derivative of the score, with `detach` applied."""
        return without_detach(differentiate(self.score_mod or SCORE, wrt, self.algebra))

    def _along_distance(self, read: Read) -> tuple[str, tuple[Node, ...]]:
        """Return "distance" or "pair" for the sums of a gradient, and its indices in those
        terms.
        """
        by_distance = over_distance(read, self.algebra)
        return (
            ("pair", read.indices) if by_distance is None else ("distance", children(by_distance))
        )

    def _summed(self, read: Read) -> tuple[str, ...] | None:
        sizes: dict[str, tuple[str, ...]] = {
            "b": ("B",),
            "h": ("HQ",),
            "q_idx": ("SQ",),
            "kv_idx": ("SK",),
        }
        if self.spec.varlen:
            # Kernels store one value per token. Only indices without a position allow a plain sum
            # over tokens.
            sizes = {"h": ("HQ",)}
        if self._ties_lengths():
            sizes |= {"q_idx": ("SQ", "SK"), "kv_idx": ("SQ", "SK")}
        names = [i.name if isinstance(i, Var) else "" for i in read.indices]
        shape = self.spec.buffers[read.buffer].shape
        plain = all(n in sizes and s in sizes[n] for n, s in zip(names, shape, strict=True))
        return tuple(names) if plain and len(set(names)) == len(names) else None

    def _ties_lengths(self) -> bool:
        trees = [t for t in (self.score_mod, self.mask_mod) if t is not None]
        return ties_lengths(trees, {n: b.shape for n, b in self.spec.buffers.items()})

    def _index_ranges(self) -> IndexRanges:
        greatest = {**HEADS.greatest, "q_last": {"SQ": 1, "": -1}, "kv_last": {"SK": 1, "": -1}}
        # A tile of the last listed block may start past the end.
        listed = self.choice.listed
        greatest |= {} if listed else {"q_start": {"SQ": 1, "": -1}, "kv_start": {"SK": 1, "": -1}}
        greatest |= {"q_idx": {"SQ": 1, "": -1}} if self.divisible_q else {}
        greatest |= {"kv_idx": {"SK": 1, "": -1}} if self.divisible_kv else {}
        return IndexRanges(greatest, SIZES)


_WORDS = {"bool": 0, "uint8": 0, "int64": 2}
"""Number of 4-byte words of shared memory per element that the pipeline copies, if not 1.

Booleans and uint8 stay in registers.
"""


def _mask_class(loop: TileLoop) -> str:
    """Return the class `mask` of `tiles.Problem`: how the range of a loop moves with its tile."""
    if loop.listed:
        return "listed"
    if not all(span.has_full for span in loop.spans):
        return "scan"
    bounds = [bound for s in loop.spans for bound in (s.lo, s.hi, s.full_lo, s.full_hi)]
    if any(read.buffer.endswith(FIRST_AT_LEAST) for bound in bounds for read in reads(bound)):
        return "search"
    tile = {loop.outer.start.name, loop.outer.last.name}
    moving = [
        any(variables(end) & tile for end in ends)
        for ends in zip(*((s.lo, s.hi) for s in loop.spans), strict=True)
    ]
    return ("all", "triangle", "band")[sum(moving)]


def _promised(length: object) -> bool:
    """True if the spec promises that a length is a multiple of every tile."""
    multiple = getattr(length, "multiple_of", None)
    return multiple is not None and multiple % LARGEST_TILE == 0


def _named(condition: Node, name: Var) -> Node:
    return TRUE if condition == TRUE else name
