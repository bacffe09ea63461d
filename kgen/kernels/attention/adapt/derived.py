"""Specs that a model needs in addition to its own, as YAML that can be read, rendered and verified.

cached        for caches and padded sequences: query i has position q_start[b] + i, key j has
              kv_start[b] + j, and only the keys kv_first[b] <= j < kv_end[b] are valid; the window
              is the argument `sliding_window`
packed        for continuous batching: packed sequences, whose last query is at the last key
everywhere    without the window, for layers of a model that have none
causal        for a spec without a mask: only keys up to each query
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarstring import LiteralScalarString

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.algebra import call
from kgen.expr.canonical import canonical
from kgen.expr.fold import folded
from kgen.expr.mask_form import TRUE, all_of, conjuncts
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, buffers_of, substitute, variables
from kgen.expr.softmax_form import KV_IDX, Q_IDX, SCORE
from kgen.flex.text import written
from kgen.kernels.attention.fields import without_serving
from kgen.kernels.attention.spec import ANY, AttentionSpec
from kgen.spec.common import numbers
from kgen.spec.load import Loaded
from kgen.spec.source import Document

PLACES = ("q_start", "kv_start", "kv_first", "kv_end")
"""Buffers [B] int32 of a spec for caches: positions of the first query and key, and bounds of valid
keys.
"""
FURTHEST = 2**27
"""Largest distance of a position from zero. With a window of 2**30 and 2**29 rows, sums fit in 32
bits.
"""
WINDOW = "sliding_window"
DISTANCE = call("sub", Q_IDX, KV_IDX)


def place() -> dict[str, Any]:
    """Return a buffer with one position for each sequence."""
    return {"shape": ["B"], "dtype": "int32", "within": FURTHEST}


@dataclass(frozen=True)
class Variant:
    """A spec as models see it: canonical trees, window and cap of scores."""

    loaded: Loaded

    @property
    def spec(self) -> AttentionSpec:
        """The model of the spec."""
        spec: AttentionSpec = self.loaded.spec
        return spec

    @cached_property
    def trees(self) -> Mapping[str, Node]:
        """The trees in canonical form."""
        return canonical(self.loaded.trees, numbers(self.spec.params))

    @property
    def conditions(self) -> list[Node]:
        """The conditions whose conjunction is the mask."""
        return conjuncts(self.trees["mask_mod"]) if "mask_mod" in self.trees else []

    @cached_property
    def window(self) -> int | None:
        """Number of keys that a query sees up to its own position, if the mask is a causal
        window.
        """
        if call("ge", Q_IDX, KV_IDX) not in self.conditions:
            return None
        return next((width for c in self.conditions if (width := self._width(c)) is not None), None)

    @property
    def softcap(self) -> float | None:
        """The cap, if the score is `cap * tanh(score / cap)`."""
        match self.with_numbers(self.trees.get("score_mod", SCORE)):
            case Call("mul", (Const(cap), Call("tanh", (inner,)))) | Call(
                "mul", (Call("tanh", (inner,)), Const(cap))
            ):
                pass
            case _:
                return None
        match inner:
            case Call("div", (score, Const(bound))) if score == SCORE:
                slope = 1 / bound
            case Call("mul", (score, Const(slope)) | (Const(slope), score)) if score == SCORE:
                pass
            case _:
                return None
        return float(cap) if math.isclose(cap * slope, 1) else None

    @property
    def sees_positions(self) -> bool:
        """True if the result depends on the positions of queries and keys."""
        used = {name for tree in self.trees.values() for name in variables(tree)}
        return bool({"q_idx", "kv_idx"} & used)

    def with_numbers(self, node: Node) -> Node:
        """Return a tree with known parameters replaced by their values, and simplified."""
        params = self.spec.params.items()
        known: dict[Node, Node] = {
            Var(n, p.scalar): Const(p.value, p.scalar) for n, p in params if p.value is not None
        }
        return folded(substitute(node, known), {})

    def everywhere(self) -> str:
        """The YAML of the same attention without its window."""
        kept = [c for c in self.conditions if self._width(c) is None]
        trees = {**self.trees, "mask_mod": all_of(kept)}
        return self._text("everywhere", "for layers without a window", trees, {}, self._passes)

    def causal(self) -> str:
        """The YAML of the same attention with a causal mask."""
        trees = {**self.trees, "mask_mod": all_of([*self.conditions, call("ge", Q_IDX, KV_IDX)])}
        return self._text("causal", "for causal layers", trees, {}, self._passes)

    def cached(self) -> str:
        """The YAML of the same attention with positions and valid keys as arguments."""
        self._refuse_sizes()
        b = Var("b", Type.INT)
        q_start, kv_start, kv_first, kv_end = (Read(name, (b,), Type.INT) for name in PLACES)
        kept = [c for c in self.conditions if self.window is None or self._width(c) is None]
        if self.window is not None:
            kept.append(call("lt", DISTANCE, Var(WINDOW, Type.INT)))
        trees = {**self.trees, "mask_mod": all_of(kept)} if kept else dict(self.trees)
        moved: dict[Node, Node] = {
            Q_IDX: call("add", Q_IDX, q_start),
            KV_IDX: call("add", KV_IDX, kv_start),
        }
        trees = {field: substitute(tree, moved) for field, tree in trees.items()}
        there = [call("le", kv_first, KV_IDX), call("lt", KV_IDX, kv_end)]
        trees["mask_mod"] = all_of([*([trees["mask_mod"]] if "mask_mod" in trees else []), *there])
        own = {n for tree in trees.values() for n in buffers_of(tree)}
        buffers = {name: place() for name in PLACES if name in own}
        decodes = ("decode",) * (not self.spec.sinks)
        passes = (*(p for p in self._passes if p != "decode"), *decodes)
        labels = {moved[Q_IDX]: "q_at", moved[KV_IDX]: "kv_at"}
        return self._text(
            "cached", "for caches and padded sequences", trees, buffers, passes, labels
        )

    @property
    def packs(self) -> bool:
        """True if kernels for packed sequences can compute the attention.

        They know the number of a sequence and the distance of a query and a key. The position of a
        key is known without a window only: the cache of a window has dropped the first keys.
        """
        shapes = [size for b in self.spec.buffers.values() for size in b.shape]
        trees = [self.with_numbers(t) for n, t in self.trees.items() if n != "mask_mod"]
        trees += [c for c in self.conditions if self._width(c) is None]
        apart = call("ge", Q_IDX, KV_IDX)
        zero = Const(0, Type.INT)
        relative: dict[Node, Node] = {apart: TRUE, DISTANCE: zero}
        relative |= {call("sub", KV_IDX, Q_IDX): zero}
        left = [substitute(tree, relative) for tree in trees]
        positions = {name for tree in left for name in variables(tree)} & {"q_idx", "kv_idx"}
        known = self.window is None or not positions
        return known and not {"B", "SQ", "SK"} & {*map(str, shapes)} and not self._reads_batch()

    def _reads_batch(self) -> bool:
        return any("b" in variables(tree) for tree in self.trees.values())

    def packed(self) -> str:
        """The YAML of the same attention over packed sequences, the last query at the last key."""
        self._refuse_sizes()
        kept = [c for c in self.conditions if self.window is None or self._width(c) is None]
        if self.window is not None:
            kept.append(call("lt", DISTANCE, Var(WINDOW, Type.INT)))
        trees = {**self.trees, "mask_mod": all_of(kept)} if kept else dict(self.trees)
        at = call("sub", call("add", Q_IDX, Var("SK", Type.INT)), Var("SQ", Type.INT))
        trees = {field: substitute(tree, {Q_IDX: at}) for field, tree in trees.items()}
        words = "for continuous batching"
        return self._text("packed", words, trees, {}, ["forward"], {at: "q_at"})

    # --- parts ------------------------

    @property
    def _passes(self) -> tuple[str, ...]:
        return without_serving(self.spec.passes)

    def _width(self, condition: Node) -> int | None:
        """Return the width of a condition `q_idx - kv_idx < width`, or None."""
        match self.with_numbers(condition):
            case Call("lt" | "le" as fn, (left, Const(int(width)))) if left == DISTANCE:
                return width + (fn == "le")
        return None

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """The spec as the user wrote it."""
        data: Mapping[str, Any] = Document(self.loaded.text, self.loaded.path.as_posix()).data
        return data

    def _text(
        self,
        word: str,
        words: str,
        trees: Mapping[str, Node],
        buffers: Mapping[str, Any],
        passes: Sequence[str],
        labels: Mapping[Node, str] = MappingProxyType({}),
    ) -> str:
        """Return the YAML of a spec with other trees and further buffers."""
        cached = word in ("cached", "packed")
        used = {name for tree in trees.values() for name in variables(tree)}
        read = {n for tree in trees.values() for n in buffers_of(tree)}
        own = self.given.get("buffers") or {}
        tables = {n: _open(b) if cached else b for n, b in own.items() if n in read}
        if "backward" not in passes:
            tables = {n: _without_gradient(b) for n, b in tables.items()}
        params = {WINDOW: {"type": "int", "runtime": True}} if cached and WINDOW in used else {}
        fields: dict[str, Any] = {"sinks": True} if self.spec.sinks else {}
        fields |= {"varlen": True} if word == "packed" else {"align": "start"}
        return Derived(
            self, word, words, trees, {**tables, **buffers}, passes, params, labels, fields
        ).yaml()

    def _refuse_sizes(self) -> None:
        """Refuse lengths, which differ in a cache, and names of its arguments."""
        for field, tree in self.loaded.trees.items():
            if named := sorted({"SQ", "SK"} & variables(tree)):
                message = f"`{field}` reads {named[0]}, which has another value in a cache"
                self._refuse(
                    message, "use positions: a cache knows the positions of queries and keys"
                )
        kept = [c for c in self.conditions if self.window is None or self._width(c) is None]
        own = [*kept, *(tree for field, tree in self.trees.items() if field != "mask_mod")]
        used = {name for tree in own for name in variables(tree)} | {*self.spec.buffers}
        for name in (*PLACES, WINDOW):
            if name in used:
                self._refuse(
                    f"`{name}` is an argument of the kernels for caches", "choose another name"
                )

    def _refuse(self, message: str, hint: str) -> None:
        raise KgenError(
            Diagnostic("no-adapter", message, self.loaded.path.as_posix(), 1, 1, hint=hint)
        )


@dataclass(frozen=True)
class Derived:
    """A spec derived from another one, with the fields that differ."""

    variant: Variant
    word: str
    """The suffix of its name."""
    words: str
    """The use of the spec, for its summary."""
    trees: Mapping[str, Node]
    buffers: Mapping[str, Any]
    passes: Sequence[str]
    params: Mapping[str, Any]
    """Additional parameters. Parameters of the original spec that trees read are kept."""
    labels: Mapping[Node, str]
    """Local names of values."""
    fields: Mapping[str, Any]
    """Additional fields."""

    def yaml(self) -> str:
        """Return its YAML."""
        given = self.variant.given
        used = {name for tree in self.trees.values() for name in variables(tree)}
        params = {n: p for n, p in (given.get("params") or {}).items() if n in used} | {
            **self.params
        }
        known = {**self.buffers, **params}
        texts = {field: written(tree, self.labels, known) for field, tree in self.trees.items()}
        same = ("license", "dtype", "precision", "head_dim", "gqa", "fast_math")
        name = self.variant.spec.name
        data = {
            "kernel": "attention",
            "name": f"{name}_{self.word}",
            "summary": f"{name} {self.words}.",
            **{field: given[field] for field in same if field in given},
            **{field: value for field, value in self.fields.items() if field != "align"},
            "buffers": {name: _in_flow(buffer) for name, buffer in self.buffers.items()},
            "params": params,
            **{
                f: LiteralScalarString(f"{t}\n") if "\n" in t else t
                for f, t in texts.items()
                if t != "True"
            },
            "passes": list(self.passes),
            **{field: value for field, value in self.fields.items() if field == "align"},
        }
        yaml, out = YAML(typ="rt"), io.StringIO()
        yaml.width, yaml.default_flow_style = 2**20, None
        yaml.dump({field: value for field, value in data.items() if value not in ({}, "")}, out)
        return out.getvalue()


def checked(loaded: Loaded) -> Variant:
    """Return a spec that models can call.

    Raise `KgenError` if the tensors of models have another layout.
    """
    spec = loaded.spec
    reasons = {
        "its sequences are packed": spec.varlen,
        "its keys are in pages": spec.paged_kv is not None,
        "each sequence has its own number of keys": spec.per_batch,
        "it has no pass `forward`": "forward" not in spec.passes,
    }
    for reason, holds in reasons.items():
        if holds:
            hint = "write a spec of whole sequences: kgen derives kernels for caches from it"
            hint = hint if "forward" in spec.passes else "add `forward` to `passes`"
            message = f"models of transformers cannot call `{spec.name}`: {reason}"
            raise KgenError(
                Diagnostic("no-adapter", message, loaded.path.as_posix(), 1, 1, hint=hint)
            )
    return Variant(loaded)


def _in_flow(mapping: Mapping[str, Any]) -> CommentedMap:
    """Return a mapping that YAML prints on one line."""
    found = CommentedMap(mapping)
    found.fa.set_flow_style()
    return found


def _without_gradient(buffer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a buffer of a spec without a backward pass."""
    return {field: value for field, value in buffer.items() if field != "grad"}


def _open(buffer: Mapping[str, Any]) -> dict[str, Any]:
    """Open the extents of a buffer, because positions in a cache exceed the queries of a call."""
    return {**buffer, "shape": [ANY if size in ("SQ", "SK") else size for size in buffer["shape"]]}
