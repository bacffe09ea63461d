"""The tensors of a call of norms from C."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kgen.kernels.norm.plan.planning import NormPlan, Operand
from kgen.targets.code import Code, Name
from kgen.targets.native import WORDS, Tensor, fixed, member

ROWS, HEADS, WIDTH = Name("rows"), Name("heads"), Name("width")
"""The numbers of a call."""
LETTERS = {"rows": "N", "heads": "H", "width": "D"}
"""These numbers in words, and in the example."""


@dataclass(frozen=True)
class Stride:
    """A launch argument: the stride of an axis."""

    name: str
    axis: int


@dataclass(frozen=True)
class Argument(Tensor):
    """A tensor among the arguments of a call, with the strides that are launch arguments."""

    strides: tuple[Stride, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """The tensors of both passes, in the order of the struct."""

    read: tuple[Argument, ...]
    """The tensors that forward reads."""
    stored: tuple[Argument, ...]
    """The tensors that forward writes."""
    saved: tuple[Argument, ...] = ()
    """The statistics that forward writes for backward."""
    read_by_backward: tuple[Argument, ...] = ()
    gradients: tuple[Argument, ...] = ()

    @property
    def all(self) -> tuple[Argument, ...]:
        """All arguments: of forward, then of backward."""
        return (*self.read, *self.stored, *self.saved, *self.read_by_backward, *self.gradients)

    @property
    def outputs(self) -> tuple[Argument, ...]:
        return (*self.stored, *self.saved)

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """The tensors that a caller fills before forward, each once."""
        others = {*(t.name for t in self.outputs), "dout", "dh_out"}
        read = {t.name: t for t in (*self.read, *self.read_by_backward)}
        return tuple(t for t in read.values() if t.name not in others)

    @property
    def upstream(self) -> tuple[Argument, ...]:
        """The gradients that a caller passes to backward."""
        return tuple(t for t in self.read_by_backward if t.name in ("dout", "dh_out"))


def arguments_of(plan: NormPlan) -> Arguments:
    """Return the tensors of a plan."""
    spells = _Spelled(plan)
    read = tuple(spells.operand(o) for o in plan.forward.loads)
    if plan.spec.quantize and plan.spec.quantize.scale == "per_tensor":
        read = (
            *read,
            spells.plain(
                "scale", (fixed(1),), "fp32", "[1] float32, by which the output is divided"
            ),
        )
    saved = tuple(
        spells.stored(name, "row", "fp32", "written where all of these are there; read by backward")
        for name in plan.saves
    )
    return Arguments(
        read,
        _outputs(plan, spells),
        saved,
        _read_by_backward(plan, spells),
        _gradients(plan, spells),
    )


def taken(plan: NormPlan) -> frozenset[str]:
    """Return the reserved members of the struct of arguments."""
    own = {"x", "out", "h", "mean", "rstd", "eps", "scale", "dout", "dh_out"}
    return frozenset(own | {f"d{o.name}" for o in plan.operands})


class _Spelled:
    """Build the tensors of one plan."""

    def __init__(self, plan: NormPlan) -> None:
        self.heads = plan.spec.heads is not None
        self.taken = taken(plan)

    def sizes(self, along: str) -> tuple[Name, ...]:
        """Return the sizes of a tensor."""
        of_row = (ROWS, HEADS) if self.heads else (ROWS,)
        of_column = (HEADS, WIDTH) if self.heads else (WIDTH,)
        return {"element": (*of_row, WIDTH), "row": of_row, "column": of_column}[along]

    def shape(self, along: str) -> str:
        """Describe the shape of a tensor."""
        return f"[{', '.join(LETTERS[size.name] for size in self.sizes(along))}]"

    def operand(self, operand: Operand, said: str = "") -> Argument:
        """Build a tensor that a kernel reads."""
        name, along = operand.name, operand.along
        words = f"{self.shape(along)} {WORDS.get(operand.dtype, operand.dtype)}{said}"
        if along != "element":
            return self.plain(name, self.sizes(along), operand.dtype, words, self.taken - {name})
        strides = [Stride(f"stride_{name}", 0)]
        if self.heads:
            strides.append(Stride(f"stride_{name}_head", 1))
        return Argument(
            name,
            label=name,
            member=member(name, self.taken - {name}),
            extents=self.sizes(along),
            element=operand.dtype,
            words=words,
            widest="1",
            strides=tuple(strides),
        )

    def stored(self, name: str, along: str, dtype: str, said: str) -> Argument:
        """Build a tensor that a kernel writes."""
        words = f"{self.shape(along)} {WORDS.get(dtype, dtype)}, contiguous: {said}"
        return self.plain(name, self.sizes(along), dtype, words)

    def plain(
        self,
        name: str,
        sizes: tuple[Code, ...],
        dtype: str,
        words: str,
        taken: Collection[str] = (),
    ) -> Argument:
        """Build a contiguous tensor."""
        return Argument(name, name, member(name, taken), sizes, dtype, words, contiguous=True)


def _outputs(plan: NormPlan, spells: _Spelled) -> tuple[Argument, ...]:
    spec = plan.spec
    stored = [spells.stored("out", "element", spec.dtypes["output"], "written")]
    if spec.quantize and spec.quantize.scale == "per_row":
        stored.append(
            spells.stored("scale", "row", "fp32", "written, the number by which to multiply out")
        )
    if plan.stores_h:
        said = (
            "written, what is normed; read by backward"
            if plan.backward
            else "written, what is normed"
        )
        stored.append(spells.stored("h", "element", spec.dtypes["residual"], said))
    return tuple(stored)


def _read_by_backward(plan: NormPlan, spells: _Spelled) -> tuple[Argument, ...]:
    if plan.backward is None:
        return ()
    # Packages have machine code for both gradients.
    said = {"dh_out": "; zeros where there is none"}
    read = [spells.operand(o, said.get(o.name, "")) for o in (*plan.backward.loads, *plan.upstream)]
    return (*read, *(spells.plain(name, spells.sizes("row"), "fp32", "") for name in plan.saves))


def _gradients(plan: NormPlan, spells: _Spelled) -> tuple[Argument, ...]:
    if plan.backward is None:
        return ()
    same = {g.same_as: g.of for g in plan.backward.gradients if g.same_as is not None}
    found = []
    for g in (*plan.backward.elements, *plan.backward.rows, *plan.backward.columns):
        also = f", and the gradient of {same[g.of]}" if g.of in same else ""
        found.append(spells.stored(g.name, g.along, g.dtype, f"written{also}"))
    return tuple(found)
