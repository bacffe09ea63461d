"""Comparison of the forms that passes derive from random masks and scores with the values of their
texts.

| form | property |
|---|---|
| `canonical` (`kgen.expr.canonical`) | equals the score where the mask is true, -inf elsewhere |
| `alternatives` (`kgen.expr.alternatives`) | one alternative holds exactly where the mask is true |
| `ranges` (`kgen.expr.tile_ranges`) | the mask is false outside a span, and true in its full part |
| `softmax` (`kgen.expr.softmax_form`) | `multiplier * core + bias + row_rest` equals the score |
| `distance` (`kgen.expr.distance`) | conditions over `q_idx - kv_idx` equal the originals |
| `periods` (`kgen.kernels.attention.plan.block_mask`) | conditions repeat with their period |
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.specs.trees import evaluate

from fuzzing.expressions import Drawn, drawn
from fuzzing.setting import LOG2E, SCALE, Call, drawn_call, grid, points
from fuzzing.text_values import EPSILON, Value, text_value
from kgen.expr.algebra import LOG2E as BASE2
from kgen.expr.algebra import Algebra
from kgen.expr.algebra import call as called
from kgen.expr.alternatives import alternatives
from kgen.expr.canonical import canonical
from kgen.expr.distance import DISTANCE, over_distance
from kgen.expr.mask_form import TRUE, all_of, any_of, conjuncts, normalize
from kgen.expr.nodes import Node, Type, children, substitute, variables
from kgen.expr.parse import parse_expression
from kgen.expr.softmax_form import INF, SCORE, SoftmaxForm, softmax_form
from kgen.expr.tile_ranges import Axis, RangeFinder
from kgen.expr.unparse import show
from kgen.kernels.attention.plan.block_mask import period
from kgen.kernels.attention.plan.extents import is_searched, ties_lengths
from kgen.kernels.attention.plan.model import KV_AXIS, Q_AXIS
from kgen.kernels.attention.plan.positions import positioned
from kgen.kernels.attention.spec import AttentionSpec
from kgen.spec.common import numbers
from kgen.spec.load import Loaded

ROUNDED = 1e-15 / EPSILON
"""Scale of the error bound of a tree. A tree fixes the order of its operations, so its error is a
few units of float64.
"""
POINTS = frozenset({"row", "q_idx", "kv_idx", "b", "h", "h_kv", "score", "q_start", "there"})
"""Names that have a separate value at each point."""


class Differs(Exception):
    """A form whose value differs from the value of its text."""

    def __init__(self, form: str, message: str) -> None:
        super().__init__(f"{form}: {message}")
        self.form = form


@dataclass(frozen=True)
class Written:
    """Drawn expressions as kgen parses them."""

    drawn: Drawn
    spec: AttentionSpec
    trees: Mapping[str, Node]

    @classmethod
    def of(cls, drawn: Drawn) -> Written:
        """Parse drawn expressions. Raise `ExpressionError` if kgen refuses one."""
        named = {"kernel": "attention", "name": "drawn", "dtype": "bf16", "head_dim": 64}
        spec = AttentionSpec.model_validate({**named, **drawn.fields()})
        texts = spec.expressions().items()
        return cls(drawn, spec, {field: parse_expression(*text) for field, text in texts})

    @cached_property
    def tied(self) -> bool:
        """True if calls have as many queries as keys."""
        shapes = {name: buffer.shape for name, buffer in self.spec.buffers.items()}
        return ties_lengths(self.trees.values(), shapes, self.spec.aligned_to_end)

    @cached_property
    def canonical(self) -> Mapping[str, Node]:
        """The canonical form."""
        return canonical(self.trees, numbers(self.spec.params))

    @cached_property
    def planned(self) -> Loaded:
        """The form that plans use: the canonical form over rows of queries."""
        return positioned(Loaded(Path("drawn.yaml"), "", self.spec, self.canonical))

    @cached_property
    def mask(self) -> Node:
        """The planned mask."""
        return self.planned.trees.get("mask_mod", TRUE)

    @cached_property
    def positive(self) -> frozenset[str]:
        """Params with positive values."""
        params = self.spec.params.items()
        return frozenset(n for n, p in params if p.value is not None and p.value > 0)

    @cached_property
    def algebra(self) -> Algebra:
        """The algebra that uses the positive params."""
        return Algebra(self.positive)

    @cached_property
    def form(self) -> SoftmaxForm:
        """The softmax form of the planned score."""
        return softmax_form(self.planned.trees.get("score_mod", SCORE), self.algebra)

    def finder(self, inner: Axis, outer: Axis) -> RangeFinder:
        """Return the range finder that plans use."""
        values = {n: p.value for n, p in self.spec.params.items() if isinstance(p.value, int)}
        buffers = self.planned.spec.buffers
        return RangeFinder(
            *(inner, outer, self.algebra, self.positive),
            lambda read: is_searched(read, buffers[read.buffer], self.tied),
            values=values,
        )


def compare(seed: int, thorough: bool = False) -> None:
    """Compare the forms of the expressions of a seed with their texts. `thorough` includes the slow
    forms.

    Raise `Differs` if a form is wrong.
    """
    rng = random.Random(seed)
    compare_drawn(drawn(rng), rng, thorough)


def compare_drawn(drawn: Drawn, rng: random.Random, thorough: bool) -> None:
    """Compare the forms of drawn expressions with their texts, at random calls."""
    written = Written.of(drawn)
    call = drawn_call(written.spec, rng, written.tied)
    _at_points(written, call, rng, thorough)
    if thorough:
        _ranges(written, call, rng)
        _at_points(written, drawn_call(written.spec, rng, written.tied), rng, thorough)


# --- at points ------------------------


def _at_points(written: Written, call: Call, rng: random.Random, thorough: bool) -> None:
    texts = [text for text in (written.drawn.mask, written.drawn.score) if text is not None]
    at = points(call, written.spec, texts, rng)
    env = call.at(at)
    mask = _text(written.drawn.mask, env, call, np.bool_(True))
    score = _text(written.drawn.score, env, call, at["score"])
    where = _tensors(env)
    hidden = ~mask.it
    logits = np.where(hidden, -np.inf, score.it)
    ok = mask.ok & (hidden | score.ok)
    found = written.canonical
    allowed = _tree(found.get("mask_mod", TRUE), where)
    value = _tree(found.get("score_mod", SCORE), where)
    own = _rounding(found.get("score_mod", SCORE), env, call)
    if written.drawn.score is None:
        _same("canonical", allowed, mask.it, mask.ok, written, env)
    else:
        _close(
            "canonical",
            np.where(allowed, value, -np.inf),
            logits,
            ok,
            score.error + own,
            written,
            env,
        )
    rows = _tensors(_by_row(env, at["row"]))
    either = any_of([all_of(list(atoms)) for atoms in alternatives(written.mask)])
    for name, tree in (("planned", written.mask), ("alternatives", either)):
        if tree != found.get("mask_mod", TRUE):
            _same(name, _tree(tree, rows), allowed & at["there"], mask.ok, written, env)
    if thorough:
        logits, seen = np.where(allowed, value, -np.inf), ok & at["there"]
        _softmax(written, _by_row(env, at["row"]), logits, seen, score.error + own, call, env)
        _over_distance(written, rows, env, mask.ok)
        _periods(written, rows, env, mask.ok)


def _by_row(env: Mapping[str, Any], row: Any) -> dict[str, Any]:
    """Return the names with `q_idx` as a row from zero, as kernels count queries."""
    return {**env, "q_idx": row}


def _softmax(
    written: Written,
    rows: Mapping[str, Any],
    logits: Any,
    ok: Any,
    error: Any,
    call: Call,
    told: Any,
) -> None:
    form = written.form
    values = {
        **rows,
        "qk": rows["score"] / SCALE,
        "scale": np.float64(SCALE),
        "LOG2E": np.float64(LOG2E),
    }
    env = _tensors(values)
    with np.errstate(all="ignore"):
        total = _tree(form.multiplier, env) * _tree(form.core, env)
        total = total + (_tree(form.bias, env) if form.bias is not None else 0.0)
    lost = 0.0 if form.row_rest is None else LOG2E * _tree(form.row_rest, env)
    # By contract, terms that a whole row shares are finite, except in a row without keys.
    here = ok & _finite_by_row(written.planned.trees.get("score_mod", SCORE), env)
    error = error + _rounding(_whole(form), values, call)
    finite = here & np.isfinite(logits)
    _close("softmax", total + lost, LOG2E * logits, finite, error, written, told)
    if form.positive and not np.all((_tree(form.multiplier, env) > 0) | ~here):
        raise Differs("softmax", f"a multiplier that is not positive: {show(form.multiplier)}")
    if form.finite:
        _check("finite", ~np.isneginf(total), total, logits, here, written, told)


def _whole(form: SoftmaxForm) -> Node:
    """Return the logit in base 2, including `row_rest`, as one tree."""
    whole: Node = called("mul", form.multiplier, form.core)
    for part in (form.bias, form.row_rest and called("mul", BASE2, form.row_rest)):
        whole = whole if part is None else called("add", whole, part)
    return whole


def _rounding(tree: Node, env: Mapping[str, Any], call: Call) -> Any:
    """Return a bound on the float64 error of a tree's value.

    If terms cancel, it is large relative to the value.
    """
    error = text_value(show(tree), env, call.narrow).error * ROUNDED
    return np.where(np.isfinite(error), error, 0.0)


def _finite_by_row(score: Node, env: Mapping[str, Any]) -> Any:
    """True at points where all terms that the keys of a row share are finite."""
    found: Any = True
    waiting = [score]
    while waiting:
        part = waiting.pop()
        if variables(part) & {"kv_idx", "score"}:
            waiting += children(part)
        elif part.type is Type.FLOAT and part != INF:
            found = found & np.isfinite(_tree(part, env))
    return found


def _over_distance(written: Written, env: Any, told: Any, ok: Any) -> None:
    for condition in conjuncts(normalize(written.mask)):
        found = over_distance(condition, written.algebra)
        if found is not None:
            names = {**env, DISTANCE.name: env["q_idx"] - env["kv_idx"]}
            _same("distance", _tree(found, names), _tree(condition, env), ok, written, told)


def _periods(written: Written, env: Any, told: Any, ok: Any) -> None:
    """Check that conditions repeat with their period.

    Params with known values are replaced by numbers.
    """
    known = numbers(written.spec.params)
    for condition in conjuncts(normalize(written.mask)):
        repeats = period(substitute(condition, known))
        for name in ("q_idx", "kv_idx") if repeats is not None else ():
            moved = _tree(condition, {**env, name: env[name] + repeats})
            _same("periods", moved, _tree(condition, env), ok, written, told)


# --- ranges ------------------------


def _ranges(written: Written, call: Call, rng: random.Random) -> None:
    b, h = (rng.randrange(int(call.scalars[size])) for size in ("B", "HQ"))
    at = grid(call, written.spec, b, h)
    env = call.at(at)
    text = _text(written.drawn.mask, env, call, np.bool_(True))
    shape = (int(call.scalars["SQ"]), int(call.scalars["SK"]))
    if written.drawn.score is None:
        allowed, ok = text.it & at["there"], text.ok
    else:
        allowed, ok = _tree(written.mask, _tensors({**env, "q_idx": at["row"]})), text.ok
    allowed, ok = (np.broadcast_to(x, shape) for x in (allowed, ok))
    of_head = {n: v for n, v in env.items() if n not in ("q_idx", "kv_idx", "row", "there")}
    for inner, outer, forbidden, known in (
        (KV_AXIS, Q_AXIS, ~allowed, ok),
        (Q_AXIS, KV_AXIS, ~allowed.T, ok.T),
    ):
        _spans(written, of_head, inner, outer, ~forbidden, known, rng.choice((1, 16, 32, 64)))


def _spans(
    written: Written,
    env: Mapping[str, Any],
    inner: Axis,
    outer: Axis,
    allowed: Any,
    ok: Any,
    rows: int,
) -> None:
    starts = np.arange(0, allowed.shape[0], rows)
    last = np.minimum(starts + rows, allowed.shape[0]) - 1
    where = _tensors({**env, outer.start.name: starts, outer.last.name: last})
    some = np.logical_or.reduceat(allowed & ok, starts)
    every = np.logical_and.reduceat(allowed | ~ok, starts)
    inside = np.zeros_like(some)
    places = np.arange(allowed.shape[1])
    for span in written.finder(inner, outer).spans(written.mask):
        ends = [
            np.broadcast_to(_tree(n, where), starts.shape)[:, None]
            for n in (span.lo, span.hi, span.full_lo, span.full_hi)
        ]
        inside |= (ends[0] <= places) & (places < ends[1])
        full = (ends[2] <= places) & (places < ends[3]) & span.has_full
        if np.any(full & ~every):
            _out_of_range("holds everywhere", full & ~every, starts, outer, written, env)
    if np.any(some & ~inside):
        _out_of_range("holds nowhere", some & ~inside, starts, outer, written, env)


def _out_of_range(
    what: str, wrong: Any, starts: Any, outer: Axis, written: Written, env: Any
) -> None:
    tile, place = np.argwhere(wrong)[0]
    at = f"tile {int(starts[tile])} of {outer.index.name}, position {int(place)}"
    raise Differs("ranges", f"not true that the mask {what} in {at}\n{_told(written, env, ())}")


# --- values ------------------------


def _text(text: str | None, env: Mapping[str, Any], call: Call, default: Any) -> Value:
    return Value(np.asarray(default)) if text is None else text_value(text, env, call.narrow)


def _tensors(env: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{
            name: torch.as_tensor(np.ascontiguousarray(value)) if np.ndim(value) else value.item()
            for name, value in env.items()
        },
        "inf": float("inf"),
    }


def _tree(node: Node, env: Mapping[str, Any]) -> Any:
    return evaluate(node, env).numpy()


def _same(form: str, got: Any, want: Any, ok: Any, written: Written, env: Any) -> None:
    _check(form, got == want, got, want, ok, written, env)


def _close(form: str, got: Any, want: Any, ok: Any, error: Any, written: Written, env: Any) -> None:
    with np.errstate(all="ignore"):
        near = np.abs(got - want) <= 1e-9 * np.abs(want) + 1e-9 + 100 * error
    # A score that is NaN or infinite is invalid, so any value is accepted.
    right = (got == want) | near | np.isnan(want) | np.isposinf(want)
    _check(form, right, got, want, ok, written, env)


def _check(form: str, right: Any, got: Any, want: Any, ok: Any, written: Written, env: Any) -> None:
    wrong = ~right & ok
    if np.any(wrong):
        place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        values = [np.broadcast_to(x, wrong.shape)[place] for x in (got, want)]
        message = f"{values[0]} for {values[1]}\n{_told(written, env, place)}"
        raise Differs(form, message)


def _told(written: Written, env: Mapping[str, Any], place: Any) -> str:
    forms = {name: show(tree) for name, tree in written.canonical.items()}
    shape = np.shape(env.get("kv_idx", 0))
    at = {
        name: np.broadcast_to(value, shape)[place].item()
        if place and name in POINTS
        else np.asarray(value).tolist()
        for name, value in env.items()
    }
    return f"{written.drawn.fields()}\ncanonical {forms}\nat {at}"
