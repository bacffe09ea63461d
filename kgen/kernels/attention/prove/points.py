"""Compare masks, scores and ranges of a plan with the written spec, at boundary points and at
random points.

The comparison needs neither z3 nor torch, and takes milliseconds. It covers only these points. z3
covers all others, and the printed statements of kernels.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kgen.expr.algebra import LOG2E
from kgen.expr.functions import TABLE
from kgen.expr.nodes import FIRST_AT_LEAST, Const, Node, Read, Type, Var, measured, walk
from kgen.expr.softmax_form import INF
from kgen.kernels.attention.plan.extents import named_extents
from kgen.kernels.attention.plan.model import Q_AXIS, AttentionPlan, TileLoop
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.prove.claims import MASK, SCORE, SKIPPED, WHOLE
from kgen.kernels.attention.prove.own_names import apart
from kgen.kernels.attention.spec import KV_LENS
from kgen.spec.load import Loaded

POINTS = 48
"""Pairs of positions for each choice of sizes."""
LONG = 2**20
"""Constants below this limit get sequences that are longer than the constant."""
TOLERANCE = 1e-6
Pair = tuple[int, int]


class _Undefined(Exception):
    """A value that is undefined at a point."""


def differences(loaded: Loaded) -> Iterator[str]:
    """Yield the first difference between a spec and its plan, with the point."""
    loaded = apart(loaded)
    plan = plan_attention(loaded)
    loops = {"forward": plan.forward, "dq": plan.dq, "dkdv": plan.dkdv}
    for number, sizes in enumerate(_sizes(loaded, plan)):
        call = _Call(loaded, plan, sizes, random.Random(number))
        for pair in call.pairs():
            for name, loop in loops.items():
                if loop is not None and (wrong := _wrong(call, loop, pair)):
                    at = (
                        f"SQ = {sizes['SQ']}, SK = {sizes['SK']}, q_idx = {pair[0]}, kv_idx = "
                        f"{pair[1]}"
                    )
                    yield f"{name}: {wrong}: {at}"
                    return


def _sizes(loaded: Loaded, plan: AttentionPlan) -> Iterator[dict[str, int]]:
    most = max((c for c in _constants(loaded) if c < LONG), default=0)
    lengths = {(1, 1), (67, 131), (200, 65), (most + 3, most + 70), (most + 70, most + 3)}
    gqa = plan.spec.gqa if isinstance(plan.spec.gqa, int) else 2
    for q, kv in sorted(lengths):
        own = [_up(n, getattr(side, "multiple_of", 1)) for n, side in _sides(plan, q, kv)]
        if plan.self_attention:
            own = [max(own)] * 2
        yield {"B": 2, "HQ": 3 * gqa, "HKV": 3, "SQ": own[0], "SK": own[1]}


def _sides(plan: AttentionPlan, q: int, kv: int) -> list[tuple[int, Any]]:
    return [(q, plan.spec.lengths.q), (kv, plan.spec.lengths.kv)]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _constants(loaded: Loaded) -> set[int]:
    """Return the numbers that expressions may compare positions with."""
    params = [p.value for p in loaded.spec.params.values() if isinstance(p.value, int)]
    nodes = [node for tree in loaded.trees.values() for node in walk(tree)]
    numbers = [int(n.value) for n in nodes if isinstance(n, Const) and n.type.integral]
    return {abs(n) for n in (*params, *numbers)}


@dataclass
class _Call:
    """A call with some sizes, and with random buffers and scalars."""

    loaded: Loaded
    plan: AttentionPlan
    sizes: Mapping[str, int]
    rng: random.Random
    scalars: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        self.scalars = {**self.sizes, "b": rng.randrange(2), "h": rng.randrange(self.sizes["HQ"])}
        self.scalars |= {"scale": 0.3, "qk": rng.uniform(-3, 3), LOG2E.name: math.log2(math.e)}
        self.scalars |= {"inf": math.inf, "GQA": self.sizes["HQ"] // self.sizes["HKV"]}
        for name, buffer in self.plan.spec.buffers.items():
            found = (
                s for s in named_extents(name, buffer.shape) if isinstance(s, str) and measured(s)
            )
            self.scalars |= {size: rng.choice((0, 1, 7, 100)) for size in found}
        for name, param in self.plan.spec.params.items():
            drawn = rng.choice((0, 1, 7, 100)) if param.type == "int" else rng.choice((0.5, 2.0))
            self.scalars[name] = drawn if param.value is None else param.value

    @property
    def hides_by_score(self) -> bool:
        """True if the plan computes scores of minus infinity."""
        return self.plan.score_mod is not None and INF in walk(self.plan.score_mod)

    def pairs(self) -> list[Pair]:
        """Return pairs at the ends, near the diagonal, near every constant, and at random."""
        sq, sk = self.sizes["SQ"], self.sizes["SK"]
        near = {c + d for c in _constants(self.loaded) for d in (-1, 0, 1)} | {0, 1}
        found = [(q, kv) for q in near | {sq - 1} for kv in near | {sk - 1}]
        for _ in range(POINTS):
            q = self.rng.choice((self.rng.randrange(sq), *near))
            found += [(q, q + self.rng.choice((-1, 1)) * self.rng.choice([*near]))]
            found += [(self.rng.randrange(sq), self.rng.randrange(sk))]
        there = [*dict.fromkeys((q, kv) for q, kv in found if 0 <= q < sq and 0 <= kv < sk)]
        return self.rng.sample(there, min(len(there), POINTS))

    def element(self, buffer: str, indices: Sequence[int]) -> Any:
        """Return an element, or zero if an index is out of bounds."""
        of = self.plan.spec.buffers[buffer]
        shape = [
            self.scalars[s] if isinstance(s, str) else s for s in named_extents(buffer, of.shape)
        ]
        if not all(0 <= i < size for i, size in zip(indices, shape, strict=True)):
            return 0
        if buffer == KV_LENS:
            return self.sizes["SK"] * (3 - indices[0]) // 4
        if of.sorted:
            return int(indices[-1]) // 5 - 3
        rng = random.Random(f"{buffer} {indices}")
        if of.dtype == "bool":
            return rng.random() < 0.5
        return rng.choice((0, 1, 5, 40, 150)) if of.dtype.startswith("int") else rng.uniform(-2, 2)

    def values(
        self, names: Mapping[str, Any], bound: Mapping[str, Node] | None = None
    ) -> Callable[[Node], Any]:
        """Return a function that evaluates trees, with `names` for numbers and `bound` names for
        trees.

        It raises `_Undefined` if a value is undefined.
        """
        known, done, bound = {**self.scalars, **names}, dict[Node, Any](), bound or {}

        def of(node: Node) -> Any:
            if node not in done:
                if isinstance(node, Var) and bound.get(node.name, node) != node:
                    done[node] = of(bound[node.name])
                else:
                    done[node] = self._value(node, known, of)
            return done[node]

        def value(node: Node) -> Any:
            try:
                return of(node)
            # a power may be complex, which has no order
            except (ArithmeticError, ValueError, TypeError):
                raise _Undefined from None

        return value

    def _value(self, node: Node, known: Mapping[str, Any], of: Callable[[Node], Any]) -> Any:
        if isinstance(node, Const):
            return float(node.value) if node.type is Type.FLOAT else node.value
        if isinstance(node, Var):
            return known[node.name]
        if isinstance(node, Read):
            indices = [of(index) for index in node.indices]
            if node.buffer.endswith(FIRST_AT_LEAST):
                return self._search(node.buffer.removesuffix(FIRST_AT_LEAST), indices)
            found = self.element(node.buffer, indices)
            return bool(found) if node.type is Type.BOOL else found
        found = TABLE[node.fn].value(*(of(arg) for arg in node.args))
        if node.type.integral and abs(found) >= 2**31:  # it wraps
            raise ValueError
        return found

    def _search(self, buffer: str, indices: Sequence[int]) -> int:
        last = self.plan.spec.buffers[buffer].shape[-1]
        size = self.sizes[last] if isinstance(last, str) else last
        row = indices[:-1]
        return bisect_left(range(size), indices[-1], key=lambda i: self.element(buffer, [*row, i]))

    # --- the spec as it is written ------------------------

    def written(self, pair: Pair) -> tuple[bool, Any]:
        """Return if the spec allows a pair, and its score in base 2."""
        spec, (q, kv) = self.plan.spec, pair
        end = self.element(KV_LENS, [self.scalars["b"]]) if spec.per_batch else self.sizes["SK"]
        at = q + end - self.sizes["SQ"] if spec.aligned_to_end else q
        called = {
            user: self.scalars[own] for own, user in self.plan.called.items() if own in self.scalars
        }
        score = self.scalars["qk"] * self.scalars["scale"]
        value = self.values({**called, "q_idx": at, "kv_idx": kv, "score": score})
        trees = self.loaded.trees
        allowed = bool(kv < end and ("mask_mod" not in trees or value(trees["mask_mod"])))
        if "score_mod" in trees:
            score = value(trees["score_mod"])
        return allowed and score != -math.inf, score * self.scalars[LOG2E.name]


def _wrong(call: _Call, loop: TileLoop, pair: Pair) -> str | None:
    """Return the obligation that a loop violates at a pair, or None."""
    try:
        allowed, score = call.written(pair)
        place = _position(call, loop, pair)
        whole = call.values(place, _bound(loop))
        # A score of minus infinity can remove a pair that the mask and the range keep.
        lost = not allowed and call.hides_by_score and _score(loop, whole) == -math.inf
        if loop.masked and bool(whole(loop.program.results["mask"])) != allowed and not lost:
            return MASK
        if not loop.listed and (wrong := _out_of_range(loop, whole, pair, allowed)) and not lost:
            return wrong
        if allowed and not _alike(_score(loop, whole), score):
            return SCORE
    except (_Undefined, KeyError):
        pass
    return None


def _bound(loop: TileLoop) -> dict[str, Node]:
    """Return the values that a program computes before its results, by name."""
    axes = {"outer_live": loop.outer, "inner_live": loop.inner}
    live = {
        axis.index.name.removesuffix("idx") + "live": loop.program.results[n]
        for n, axis in axes.items()
    }
    return {**{binding.name: binding.node for binding in loop.program.bindings}, **live}


def _position(call: _Call, loop: TileLoop, pair: Pair) -> dict[str, Any]:
    """Return the names of a pair in tiles of 64."""
    names: dict[str, Any] = {"q_idx": pair[0], "kv_idx": pair[1]}
    for side, place, size in (("q", pair[0], call.sizes["SQ"]), ("kv", pair[1], call.sizes["SK"])):
        start = place // 64 * 64
        names |= {f"{side}_start": start, f"{side}_last": min(start + 64, size) - 1}
    return {**names, "offs_n": pair[1] % 64, "offs_m": pair[0] % 64}


def _out_of_range(
    loop: TileLoop, value: Callable[[Node], Any], pair: Pair, allowed: bool
) -> str | None:
    at = pair[1] if loop.outer is Q_AXIS else pair[0]
    inside = [value(span.lo) <= at < value(span.hi) for span in loop.spans]
    if allowed and not any(inside):
        return SKIPPED
    whole = [s for s in loop.spans if s.has_full and value(s.full_lo) <= at < value(s.full_hi)]
    return WHOLE if whole and not allowed else None


def _score(loop: TileLoop, value: Callable[[Node], Any]) -> Any:
    """Return the logit in base 2, with `row_rest`."""
    found = value(loop.program.results["core"]) * value(loop.program.results["qk_scale"])
    for name in ("bias", "row_rest"):
        if name in loop.program.results:
            found += value(loop.program.results[name])
    return found


def _alike(a: float, b: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return True
    return abs(a - b) <= TOLERANCE * max(1.0, abs(a), abs(b))
