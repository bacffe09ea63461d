"""Gradients of learned buffers from C: what kernels leave of each, and the kernels that are for them alone.

PyTorch is not there to add up what they leave: a call writes it to tensors of the caller's, whose header says what
belongs to which element. Of a buffer that is read for each pair that is the gradient itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kgen.expr.nodes import Read, Type
from kgen.expr.show import show
from kgen.kernels.attention.plan.model import AttentionPlan, ReadGradient
from kgen.kernels.attention.plan.tuned import Tile
from kgen.kernels.attention.targets.triton.portable import PortableKernels
from kgen.targets.native import WORDS, Tiles, tensor
from kgen.targets.native_reference import in_cpp
from kgen.targets.triton import tables

Fields = dict[str, Any]
TABLES = {"pair": ("BLOCK_M", "BLOCK_N"), "diagonal": ("BLOCK",)}
"""Of kernels for gradients alone: what they call the sizes of a tile."""
EXTENTS = {"b": "p->B", "h": "p->HQ", "q_idx": "p->SQ", "kv_idx": "p->SK"}
LETTERS = {"b": "B", "h": "HQ", "q_idx": "SQ", "kv_idx": "SK"}


def learned_fields(
    plan: AttentionPlan, buffers: Sequence[Fields], kernels: PortableKernels, taken: Collection[str]
) -> Fields:
    """Tensors that a call of backward fills, and launches. Members of the struct are called as none that is `taken`."""
    by_name = {b["name"]: b for b in buffers}
    parts = [_Part(plan, g, by_name[g.buffer]).fields(taken) for g in plan.gradients]
    of = kernels.backward
    pairs = [_launch(x.tile.name, x.kernel.shared.programs) for x in of.pairs] if of is not None else []
    diagonals = [_launch(x.tile.name, None) for x in of.diagonals] if of is not None else []
    return {
        "learned": parts,
        "pairs": pairs,
        "diagonals": diagonals,
        "recomputed": [*pairs, *diagonals],
    }


def learned_names(plan: AttentionPlan) -> list[str]:
    """What kernels call these tensors and their strides."""
    names = [f"d_{g.name}_ptr" for g in plan.gradients]
    names += [f"stride_d_{g.name}_{i}" for g in plan.gradients for i in range(len(g.indices))]
    return [*names, "BLOCK"]


def learned_tables(plan: AttentionPlan) -> list[Tiles]:
    """Tiles of the kernels that are for these gradients alone."""
    loops = {"pair": plan.pairs, "diagonal": plan.diagonals}
    found: dict[str, Mapping[int, Sequence[Tile]]] = {
        "pair": plan.tiles.pair,
        "diagonal": plan.tiles.diagonal,
    }
    return [
        Tiles(
            f"{kind}_tiles",
            [(chips, _tile(tile, TABLES[kind])) for chips, tile in tables.rows(found[kind])],
            kernel=f"_d_{loops[kind][0].gradients[0].name}_kernel",
            struct=f"{kind}_tile",
        )
        for kind in TABLES
        if loops[kind]
    ]


def _tile(tile: Tile, sizes: Sequence[str]) -> Fields:
    fields = asdict(tile)
    blocks = dict(zip(sizes, (fields["BLOCK_M"], fields["BLOCK_N"]), strict=False))
    return blocks | {name: fields[name] for name in ("num_warps", "num_stages")}


def _launch(name: str, programs: str | None) -> Fields:
    """A kernel, and how many programs a tile of both sides has."""
    names = {None: None, "B": "p->B", "HQ": "p->HQ", "B * HQ": "p->B * p->HQ"}
    return {"name": name, "times": names[programs]}


class _Part:
    """What there is of the gradient through one read."""

    def __init__(self, plan: AttentionPlan, g: ReadGradient, buffer: Fields) -> None:
        self.plan, self.g, self.buffer = plan, g, buffer
        self.packed = plan.spec.varlen
        self.spec = plan.spec.buffers[g.buffer]
        self.count = sum(other.buffer == g.buffer for other in plan.gradients)

    def fields(self, taken: Collection[str]) -> Fields:
        g, label = self.g, f"d{self.buffer['label']}{self.g.name.removeprefix(self.g.buffer)}"
        sizes = self._sizes()
        dtype = self.spec.dtypes[0] if g.along == "pair" and g.summed is not None else "fp32"
        of = tensor(label, sizes, dtype, self._words(dtype), taken, contiguous=True)
        return of | {
            "name": f"d_{g.name}",
            "strides": g.along == "pair",
            # Kernels add to it, or leave out what no query sees.
            "zeros": None
            if g.along == "pair" and g.summed is not None
            else " * ".join(f"({n})" if " " in n else n for n in sizes),
            "of_buffer": self.buffer["member"],
        }

    def _sizes(self) -> list[str]:
        g = self.g
        if g.along == "pair" and g.summed is not None:
            return [EXTENTS[n] for n in g.summed]
        if g.along == "pair":
            own = f"a->{self.buffer['member']}.sizes"
            return [f"{own}[{axis}]" for axis in range(len(self.spec.shape))]
        if g.along == "distance":
            return ["p->B", "p->HQ", "p->SQ + p->SK"]
        x = "Q" if g.along == "q" else "K"
        return ["p->HQ", f"p->T{x}"] if self.packed else ["p->B", "p->HQ", f"p->S{x}"]

    def _words(self, dtype: str) -> str:
        g, called = self.g, self.buffer["label"]
        whole = f"the gradient of {called}"
        if self.count > 1:
            whole = f"one of {self.count} tensors whose sum is {whole}"
        if g.along == "pair":
            shape = [LETTERS[n] for n in g.summed] if g.summed is not None else [*map(str, self.spec.shape)]
            return f"[{', '.join(shape)}] {WORDS[dtype]}, contiguous: {whole}. Written"
        element = show(Read(called, g.indices, Type.FLOAT))
        if g.along == "distance":
            shape, of = ["B", "HQ", "SQ + SK"], "b, h and distance = q_idx - kv_idx, from -SK on"
        elif self.packed:
            shape, of = ["HQ", f"T{'Q' if g.along == 'q' else 'K'}"], "h and token"
        else:
            position = "q_idx" if g.along == "q" else "kv_idx"
            shape, of = ["B", "HQ", LETTERS[position]], f"b, h and {position}"
        added = "their sums are" if self.count == 1 else "their sums are, beside those of its other reads,"
        said = f"what each {of} adds to {element}: {added} the gradient of {called}. Written"
        return f"[{', '.join(shape)}] float32, contiguous: {said}"


def learned_example(
    plan: AttentionPlan, parts: Sequence[Fields], names: Mapping[str, str], buffers: Sequence[Fields]
) -> Fields:
    """The tensors that a call leaves, and how the example adds them up: `learned` has each buffer with a gradient.
    `names` are those of a position in C++, `buffers` as the example has them."""
    sizes = {b["member"]: b["sizes"] for b in buffers}
    found: dict[str, list[Fields]] = {}
    tensors = []
    for g, part in zip(plan.gradients, parts, strict=True):
        buffer = part["of_buffer"]
        moved, shape = _moved(g, plan.spec.varlen)
        # A distance is that of a query to the key 0.
        indices = [in_cpp(i, {**names, "distance": "at.q_idx"}) for i in g.indices]
        more = {"whole": g.along == "pair", "element": [f"int64_t({i})" for i in indices]}
        found.setdefault(buffer, []).append({"member": part["member"], **more, **moved})
        dtype = plan.spec.buffers[g.buffer].dtypes[0] if part["zeros"] is None else "fp32"
        tensors.append({"member": part["member"], "dtype": dtype.upper(), "sizes": shape or sizes[buffer]})
    learned = [{"buffer": buffer, "sizes": sizes[buffer], "parts": of} for buffer, of in found.items()]
    return {"learned": learned, "parts": tensors}


def _moved(g: ReadGradient, packed: bool) -> tuple[Fields, list[str] | None]:
    """What an element along a row of parts is of, where it lies, and the shape that they have; None as the buffer."""
    if g.along == "pair":
        return {}, None if g.summed is None else [f"sizes.{LETTERS[n]}" for n in g.summed]
    if g.along == "distance":
        moved = {"count": "at.SQ + at.SK", "step": "at.q_idx = i - at.SK", "at": "b, h, i"}
        return moved, ["sizes.B", "sizes.HQ", "sizes.SQ + sizes.SK"]
    position, length = ("q_idx", "SQ") if g.along == "q" else ("kv_idx", "SK")
    moved = {"count": f"at.{length}", "step": f"at.{position} = i", "at": "b, h, i"}
    if packed:
        return moved | {"at": "h, ends[size_t(b)] + i"}, ["sizes.HQ", "ends.back()"]
    return moved, ["sizes.B", "sizes.HQ", f"sizes.{length}"]
