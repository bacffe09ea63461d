"""The forward kernel of a norm in CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.norm.plan.planning import H, Operand
from kgen.kernels.norm.targets.cuda.parts import LAYER, RMS, Elements, Kernel, Launch, shape_row
from kgen.kernels.norm.targets.cuda.spelled import ORDER, TYPES, Body, Spelled, more, slots_of
from kgen.targets.code import CUDA, Assign, Name
from kgen.targets.cuda.params import Params, device, given, host, names, pointer
from kgen.targets.template import Template


@dataclass(frozen=True)
class Store:
    """A tensor that is stored from an array of values."""

    name: str
    values: str


@dataclass(frozen=True)
class RowScale(Template):
    """The computation of the scale of each row of an eight-bit output."""

    template: ClassVar[str] = "norm/cuda/_row_scale.j2"


@dataclass(frozen=True)
class ForwardKernel(Template):
    """The forward kernel."""

    template: ClassVar[str] = "norm/cuda/_forward.j2"
    language: ClassVar[str] = CUDA

    params: str
    kernel: Kernel
    reads: int
    """The number of tensors that are read per access."""
    refills: bool
    """True if a slot of the ring is refilled right after its last read."""
    parts: int | None
    """The number of values per exchange, if it is not 1."""
    declared: tuple[str, ...]
    """Declarations for scales."""
    early_words: str
    early_if: str
    """The condition for which columns are loaded early."""
    saves: tuple[str, ...]
    out: Elements
    row_scale: RowScale | None
    quantized: bool
    stores: tuple[Store, ...]


@dataclass(frozen=True)
class Forward:
    """The forward kernel, and its launch."""

    kernel: ForwardKernel
    launch: Launch
    loads: tuple[Operand, ...]
    arguments: tuple[str, ...]
    """The launch arguments in Python."""


def forward_of(spelled: Spelled) -> Forward:
    """Return the forward kernel of a plan."""
    plan, spec = spelled.plan, spelled.spec
    loads = tuple(sorted(plan.forward.loads, key=lambda o: ORDER.index(o.along)))
    accesses = spelled.accesses(plan.forward.loads)
    h = spelled.body(accesses, [plan.forward.h], [spelled.end("to[i]", H)])
    late = {**accesses, "h": Assign(("h",), (Name("hs[i]"),), type="float")}
    out = spelled.body(late, plan.forward.normed, [spelled.end("outs[i]", plan.forward.out.tree)])
    stored = [("out", spec.dtypes["output"])]
    if plan.stores_h:
        stored.append(("h", spec.dtypes["residual"]))
    # The maximum of a row needs the registers that refills would use.
    refills = spelled.clusters and not (spec.quantize and spec.quantize.scale == "per_row")
    kernel = _parts(spelled, loads, stored, h, refills)
    params = _params(spelled, loads, kernel, h.uses | out.uses)
    streams = tuple(s.name for s in kernel.streams)
    vectors = (*streams, *(c.name for c in kernel.columns), *(n for n, _ in stored))
    launch = Launch(
        name="forward",
        shapes=tuple(shape_row(s, spelled.vector) for s in spelled.forward_shapes),
        pointers=tuple(f"{n}_ptr" for n in vectors),
        strides=tuple(f"{n}_stride" for n in streams),
        multiple=("1",) if spelled.multiples else (),
        params=host(params),
        arguments=names(params),
    )
    return Forward(_kernel(spelled, kernel, params, out), launch, loads, tuple(given(params)))


def _parts(
    spelled: Spelled,
    loads: tuple[Operand, ...],
    stored: list[tuple[str, str]],
    h: Body,
    refills: bool,
) -> Kernel:
    plan = spelled.plan
    columns = spelled.columns(loads)
    rows_of = [(spelled.local(o.name), o.dtype) for o in loads if o.along == "element"]
    return Kernel(
        streams=slots_of(rows_of, "0"),
        stored=slots_of(stored, "STAGES * STAGE"),
        columns=columns,
        rows=spelled.rows(loads),
        heads=bool(spelled.spec.heads and columns),
        h=spelled.elements(loads, h),
        statistics=LAYER if plan.layer else RMS,
        to_come="!REFILLS" if refills else "1",
        fetches=("STAGES > 0", "!REFILLS") if refills else ("STAGES > 0",),
        held_if="EARLY",
        unroll="unroll",
        clusters=spelled.clusters,
        any_width=spelled.any_width,
        from_memory=True,
        keeps=("KEEPS_ROWS",),
        early_moments=plan.layer,
    )


def _params(
    spelled: Spelled, loads: tuple[Operand, ...], kernel: Kernel, uses: frozenset[str]
) -> Params:
    plan, spec = spelled.plan, spelled.spec
    outputs = [pointer(TYPES[spec.dtypes["output"]], "out_ptr", "out")]
    if spec.quantize:
        outputs.append(
            pointer("float", "scale_ptr", "scale", const=spec.quantize.scale == "per_tensor")
        )
    if plan.stores_h:
        outputs.append(pointer(TYPES[spec.dtypes["residual"]], "h_ptr", "h"))
    outputs += [pointer("float", f"{s}_ptr", s) for s in plan.saves]
    numbers = spelled.numbers(kernel.heads, eps=True, uses=uses)
    return [*spelled.inputs(loads), *([o] for o in outputs), *numbers]


def _kernel(spelled: Spelled, kernel: Kernel, params: Params, out: Body) -> ForwardKernel:
    plan, spec = spelled.plan, spelled.spec
    quantize = spec.quantize.scale if spec.quantize else None
    stores = [Store("out", "outs")]
    if plan.stores_h:
        stores.append(Store("h", "hs"))
    return ForwardKernel(
        params=device(params),
        kernel=kernel,
        reads=sum(o.along != "row" for o in plan.forward.loads),
        refills=spelled.clusters and quantize != "per_row",
        parts=more(2 if plan.layer else 1),
        declared=DECLARED[quantize],
        # With heads, the rows of a block have different columns.
        early_words="a row is on its way" if spec.heads else "the first row is on its way",
        early_if="EARLY" if spec.heads else "EARLY && round == 0",
        saves=plan.saves,
        out=spelled.elements(plan.forward.loads, out),
        row_scale=RowScale() if quantize == "per_row" else None,
        quantized=quantize is not None,
        stores=tuple(stores),
    )


DECLARED: dict[str | None, tuple[str, ...]] = {
    None: (),
    "per_row": ("__shared__ float largest_parts[2 * ROWS * Sums::PARTS];", "int largest_turn = 0;"),
    "per_tensor": ("const float inverse = 1.0f / *scale_ptr;",),
}
"""Declarations of the forward kernel, by the scales of its output."""
