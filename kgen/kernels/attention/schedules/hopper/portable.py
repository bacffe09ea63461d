"""What the kernels for Hopper take of the kernels for every chip: their loops and what these compute of a tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kgen.kernels.attention.targets.triton.kernels import KernelFields, unless_zero
from kgen.targets.code import Code, Statement, atom, times


@dataclass(frozen=True)
class Param:
    """A parameter of a function, and what its callers give for it."""

    name: str
    argument: str | None
    """None where the argument before brings this one, too, as `*x.stride()` does."""
    annotation: str = ""

    @property
    def declared(self) -> str:
        """The parameter in a signature."""
        return f"{self.name}: {self.annotation}" if self.annotation else self.name


@dataclass(frozen=True)
class Part:
    """A loop over the tiles of `[lo, hi)`, with the mask or without."""

    lo: Code
    hi: Code
    masked: bool
    gap: tuple[Code, Code] | None = None
    """Where a range begins that is left out, and its length."""


@dataclass(frozen=True)
class SpanLoops:
    """The loops over one span of a mask, or over the lists of a block mask, and the lines that make their bounds."""

    bounds: list[Statement]
    loops: list[Part]


@dataclass(frozen=True)
class Ranges:
    """The tiles that a kernel's loop visits."""

    spans: tuple[SpanLoops, ...]
    searches: list[Statement]
    """Searches of sorted buffers ahead of all bounds."""
    listed: bool


@dataclass(frozen=True)
class TileBody:
    """The scores and the mask of one tile."""

    masked: bool
    mask_lines: list[Statement]
    score_lines: list[Statement]
    logits: str
    scaled: Code | None
    """What logits are multiplied by; None where they are scaled."""
    dead_rows: bool
    """True where a row may have no finite logit."""
    lse_lines: list[Statement]
    """How the stored log-sum-exp becomes the one of the logits."""


@dataclass(frozen=True)
class RowGradient:
    """A gradient with a value for each row of a tile, and what is stored of it."""

    name: str
    value: Code


@dataclass(frozen=True)
class Gradients:
    """What follows `ds`, the gradient of the modified score, inside a tile and after the loop."""

    lines: list[Statement]
    products: list[Statement]
    """The products among the lines, for a kernel that masks here what others have masked before."""
    masked_late: list[str]
    """What such a kernel masks, for it may be NaN."""
    sums: list[Statement]
    open_ended: bool
    """True where a product is masked once more."""
    dqk: str
    """The gradient of q @ k^T."""
    factor: Code
    """What dq and dk are multiplied by after the loop."""
    factor_may_be_nan: bool
    """True where the factor may be infinite or NaN though nothing is visible."""
    rows: tuple[RowGradient, ...]
    also: list[str]
    """The gradients of buffers in words."""

    @property
    def names(self) -> list[str]:
        """The sums by row."""
        return [g.name for g in self.rows]

    def scaled(self, x: str) -> Code:
        """A sum of dq or dk times the factor."""
        product = times(x, atom(self.factor))
        return unless_zero(x, product) if self.factor_may_be_nan else product


@dataclass(frozen=True)
class LoopKernel:
    """A kernel that holds a tile of its outer side, and loops over tiles of its inner side."""

    shared_prologue: list[Statement]
    """What is computed ahead of the loop and for all query heads alike; empty but where tiles are of keys."""
    prologue: list[Statement]
    ranges: Ranges
    body: TileBody
    gradients: Gradients | None
    store_guard: Code | None
    """Which rows of vectors are stored."""
    vector_guard: Code | None
    """Which rows of log-sum-exp and delta are loaded."""
    row_rest: Code | None
    """What the log-sum-exp of a row gets back."""
    sink: Code
    """The sink among the logits of a row."""


@dataclass(frozen=True)
class Placement:
    """How the kernels for every chip find rows and heads, and what they declare of the problem."""

    kv_heads: str
    problem_params: list[str]
    no_specialize: str
    vectors: Code
    """Where a head's row of log-sum-exp and delta begins."""
    strides_o: str
    """The strides of a tensor as wide as out, as parameters."""
    sink_load: Code
    dead_rows: str
    """Rows that see no key, in words."""


@dataclass(frozen=True)
class Portable:
    """The loops of the kernels for every chip."""

    forward: LoopKernel
    dq: LoopKernel | None = None
    dkdv: LoopKernel | None = None


@dataclass(frozen=True)
class Sizes:
    """Lines of the launcher that find the sizes of a call."""

    q: str
    others: list[str]


@dataclass(frozen=True)
class Call:
    """How the launcher has a call."""

    inputs: str
    """Its tensors and numbers."""
    problem_args: str
    sizes: Sizes
    shape_of_lse: str
    group: int
    """How many heads are taken at a time."""
    shares: bool
    """True where backward is begun and ended by others."""


def placement_of(fields: Mapping[str, Any]) -> Placement:
    """How the kernels for every chip find rows and heads, from all that their templates name."""
    return Placement(
        kv_heads=fields["kv_heads"],
        problem_params=fields["problem_params"],
        no_specialize=fields["no_specialize"],
        vectors=fields["rows"],
        strides_o=fields["strides"]["o"],
        sink_load=fields["sinks"]["load"],
        dead_rows=fields["sinks"]["dead_rows"],
    )


def portable_of(fields: Mapping[str, Any]) -> Portable:
    """The loops, from all that the templates of their kernels name."""
    return Portable(**{name: _loop(fields[name]) for name in ("forward", "dq", "dkdv") if name in fields})


def call_of(fields: Mapping[str, Any]) -> Call:
    """A call, from all that the templates of the launcher name."""
    return Call(
        inputs=fields["op_names"],
        problem_args=fields["problem_args"],
        sizes=Sizes(**fields["sizes"]),
        shape_of_lse=fields["shape"]["lse"],
        group=fields["group"],
        shares=fields["shares"],
    )


def body_of(kernels: KernelFields, *given: Any) -> TileBody:
    """One tile of forward, without what is `given`."""
    loop = kernels.plan.forward
    return _body(kernels.tile_fields(loop, kernels.printer(loop), given=given))


def _loop(fields: Mapping[str, Any]) -> LoopKernel:
    spans = tuple(SpanLoops(s["bounds"], [_part(part) for part in s["loops"]]) for s in fields["spans"])
    return LoopKernel(
        shared_prologue=fields["shared_prologue"],
        prologue=fields["prologue"],
        ranges=Ranges(spans, fields["searches"], fields["listed"]),
        body=_body(fields),
        gradients=_gradients(fields) if "dqk" in fields else None,
        store_guard=fields["vector_guard"],
        vector_guard=fields["vector_load"],
        row_rest=fields["row_rest"],
        sink=fields["sink"],
    )


def _part(fields: Mapping[str, Any]) -> Part:
    return Part(fields["lo"], fields["hi"], fields["masked"], fields.get("gap"))


def _body(fields: Mapping[str, Any]) -> TileBody:
    names = ("masked", "mask_lines", "score_lines", "logits", "scaled", "dead_rows", "lse_lines")
    return TileBody(**{name: fields[name] for name in names})


def _gradients(fields: Mapping[str, Any]) -> Gradients:
    return Gradients(
        lines=fields["gradient_lines"],
        products=fields["products"],
        masked_late=fields["masked_late"],
        sums=fields["sums"],
        open_ended=fields["open_ended"],
        dqk=fields["dqk"],
        factor=fields["dqk_product"],
        factor_may_be_nan=fields["dqk_may_be_nan"],
        rows=tuple(RowGradient(g["name"], g["value"]) for g in fields["row_gradients"]),
        also=fields["also"],
    )
