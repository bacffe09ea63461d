"""The spec of a part: attention between some queries and some keys of a longer sequence.

Query i has position `q_start` + i of `q_length`, key j has position `kv_start` + j of `kv_length`.
For packed sequences these are tensors with one number per sequence. A part receives the slice of a
buffer with an element for each query or key, and two slices if both sides read it. Other buffers
are passed whole. Sinks are added when parts are merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.algebra import call
from kgen.expr.nodes import Node, Read, Type, Var, buffers_of, children, rebuild, variables
from kgen.expr.softmax_form import KV_IDX, Q_IDX
from kgen.kernels.attention.adapt.derived import FURTHEST, Derived, Variant, place
from kgen.kernels.attention.fields import without_serving
from kgen.kernels.attention.plan.positions import positioned
from kgen.kernels.attention.spec import ANY
from kgen.spec.load import Loaded

PLACES = ("q_start", "kv_start", "q_length", "kv_length")
OF_PLANS = ("length", "kv_length", "batch", "heads", "kv_heads", "ranks", "sharding")
"""Other arguments of the function that makes a plan."""
LENGTHS = {"SQ": "q_length", "SK": "kv_length"}
SIDES: Mapping[tuple[Any, Node], str] = {
    (size, index): side for size in ("SQ", "SK") for index, side in ((Q_IDX, "q"), (KV_IDX, "kv"))
}
"""Side of a sliced dimension, by extent and index. An extent of the other side implies
self-attention.
"""


@dataclass(frozen=True)
class View:
    """The view of a buffer that a part receives: for each dimension "q" or "kv" for a slice, or
    None.
    """

    name: str
    buffer: str
    sides: tuple[str | None, ...]


@dataclass(frozen=True)
class PartSpec:
    """The spec of a part, derived from a spec."""

    variant: Variant

    @property
    def packed(self) -> bool:
        """True if sequences are packed."""
        return bool(self.variant.spec.varlen)

    @cached_property
    def views(self) -> tuple[View, ...]:
        """The views of all buffers, in the order of declaration."""
        found: dict[str, list[tuple[str | None, ...]]] = {
            name: [] for name in self.variant.spec.buffers
        }
        for tree in self.variant.trees.values():
            for node in _reads(tree):
                sides = self._sides(node)
                if sides not in found[node.buffer]:
                    found[node.buffer].append(sides)
        for tree in self.variant.trees.values():
            # a length without an index is the length of the whole sequence
            for name in buffers_of(tree):
                found[name] = found[name] or [(None,) * len(self.variant.spec.buffers[name].shape)]
        taken = {*self.variant.spec.buffers, *self.variant.spec.params, *PLACES}
        views = []
        for buffer, kinds in found.items():
            for i, sides in enumerate(sorted(kinds, key=lambda sides: "kv" in sides)):
                name = buffer
                if i:
                    wanted = f"kv_{buffer}" if "kv" in sides else f"{buffer}_{i + 1}"
                    name = next(
                        n
                        for n in (wanted, *(f"{wanted}_{k}" for k in range(2, 99)))
                        if n not in taken
                    )
                    taken.add(name)
                views.append(View(name, buffer, sides))
        return tuple(views)

    @cached_property
    def places(self) -> tuple[str, ...]:
        """The names of `PLACES` that the part needs."""
        used = {n for tree in self._trees.values() for n in variables(tree)}
        used |= {n for tree in self._trees.values() for n in buffers_of(tree)}
        return tuple(name for name in PLACES if name in used)

    def text(self) -> str:
        """Return its YAML."""
        self._check()
        read = {n for tree in self._trees.values() for n in buffers_of(tree)}
        buffers: dict[str, Any] = {}
        for view in (view for view in self.views if view.name in read):
            declared = self.variant.spec.buffers[view.buffer]
            sizes = zip(declared.shape, view.sides, strict=True)
            shape = [self._extent(size, side) for size, side in sizes]
            buffers[view.name] = {**declared.model_dump(exclude_defaults=True), "shape": shape}
        params: dict[str, Any] = {}
        for name in self.places:
            if self.packed:
                buffers[name] = place()
            else:
                params[name] = {"type": "int", "runtime": True, "within": FURTHEST}
        labels = {
            _at(Q_IDX, "q_start", self.packed): "q_at",
            _at(KV_IDX, "kv_start", self.packed): "kv_at",
        }
        fields: dict[str, Any] = {"varlen": True} if self.packed else {"align": "start"}
        if self.variant.spec.sinks:
            fields["sinks"] = True
        if self.variant.spec.block_mask != "auto":
            fields["block_mask"] = self.variant.spec.block_mask
        passes = without_serving([p for p in self.variant.spec.passes if p != "decode"])
        if "backward" in passes:
            fields["backward_in_parts"] = True
        return Derived(
            self.variant,
            "part",
            "for parts of a sequence",
            self._trees,
            buffers,
            passes,
            params,
            labels,
            fields,
        ).yaml()

    # --- parts ------------------------

    @cached_property
    def _trees(self) -> Mapping[str, Node]:
        moved: dict[Node, Node] = {
            Q_IDX: _at(Q_IDX, "q_start", self.packed),
            KV_IDX: _at(KV_IDX, "kv_start", self.packed),
        }
        moved |= {Var(size, Type.INT): _place(name, self.packed) for size, name in LENGTHS.items()}
        return {field: self._moved(tree, moved) for field, tree in self.variant.trees.items()}

    def _moved(self, node: Node, moved: dict[Node, Node]) -> Node:
        """Return a tree with positions of the whole sequence. `moved` caches finished nodes."""
        if node not in moved:
            moved[node] = self._rebuilt(node, moved)
        return moved[node]

    def _rebuilt(self, node: Node, moved: dict[Node, Node]) -> Node:
        if isinstance(node, Read):
            sides = self._sides(node)
            name = next(v.name for v in self.views if (v.buffer, v.sides) == (node.buffer, sides))
            indices = tuple(
                i if side else self._moved(i, moved)
                for i, side in zip(node.indices, sides, strict=True)
            )
            return Read(name, indices, node.type)
        operands = children(node)
        return (
            rebuild(node, tuple(self._moved(one, moved) for one in operands)) if operands else node
        )

    def _sides(self, read: Read) -> tuple[str | None, ...]:
        shape = self.variant.spec.buffers[read.buffer].shape
        return tuple(
            SIDES.get((size, index)) for size, index in zip(shape, read.indices, strict=True)
        )

    @staticmethod
    def _extent(size: Any, side: str | None) -> Any:
        if side is not None:
            return {"q": "SQ", "kv": "SK"}[side]
        return ANY if size in ("SQ", "SK") else size

    def _check(self) -> None:
        spec, path = self.variant.spec, self.variant.loaded.path.as_posix()
        reasons = (
            (
                "its keys are in pages",
                spec.paged_kv is not None,
                "write a spec of whole or of packed sequences",
            ),
            ("it has no pass `forward`", "forward" not in spec.passes, "add `forward` to `passes`"),
        )
        for reason, holds, hint in reasons:
            if holds:
                message = f"`{spec.name}` cannot run over several ranks: {reason}"
                raise KgenError(Diagnostic("no-adapter", message, path, 1, 1, hint=hint))
        names = {*spec.buffers, *spec.params}
        for name in (*PLACES, *OF_PLANS, "plan", "group"):
            if name in names:
                message = f"`{name}` is an argument of the function for several ranks"
                raise KgenError(
                    Diagnostic("no-adapter", message, path, 1, 1, hint="choose another name")
                )


def _place(name: str, packed: bool) -> Node:
    return Read(name, (Var("b", Type.INT),), Type.INT) if packed else Var(name, Type.INT)


def _at(index: Node, start: str, packed: bool) -> Node:
    return call("add", index, _place(start, packed))


def _reads(node: Node) -> Sequence[Read]:
    """Return every read in a tree, including reads inside indices."""
    found = [read for child in children(node) for read in _reads(child)]
    return [node, *found] if isinstance(node, Read) else found


def part_of(loaded: Loaded) -> PartSpec:
    """Return the part of a spec. `text` raises `KgenError` if the spec has none."""
    return PartSpec(Variant(positioned(loaded)))
