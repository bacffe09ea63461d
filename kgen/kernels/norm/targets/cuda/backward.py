"""The kernels of the backward pass of a norm in CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kgen.expr.nodes import variables
from kgen.kernels.norm.plan import planning
from kgen.kernels.norm.plan.planning import H, NormPlan, Operand
from kgen.kernels.norm.targets.cuda.parts import LAYER, RMS, Elements, Kernel, Launch, shape_row
from kgen.kernels.norm.targets.cuda.spelled import (
    ORDER,
    TYPES,
    Body,
    Spelled,
    more,
    slots_of,
    times,
)
from kgen.targets.code import CUDA, Assign, If, Name, Statement, text
from kgen.targets.cuda.params import Param, Params, device, given, host, names, pointer
from kgen.targets.template import Template


@dataclass(frozen=True)
class Grid:
    """The grid of the kernels that sum over rows: over all rows, or over the rows of each head."""

    held_words: str
    columns_words: str
    columns_first: str
    columns_step: str
    columns_part: str
    finalize_words: tuple[str, ...]
    finalize_first: str
    finalize_step: str
    finalize_head: str | None
    share: str
    """Minimum number of rows per share (one `gridDim.y` block)."""
    rows: str | None
    """Rows of partial sums of a group of blocks."""
    heads: str | None
    refused: tuple[str, ...]
    """Conditions for which a call fails."""
    dims: tuple[str, ...]
    """Further dimensions of the grids of both kernels."""


OF_ALL = Grid(
    held_words="every row",
    columns_words="rows blockIdx.y * 8 + s + i * gridDim.y * 8",
    columns_first="blockIdx.y * 8 + stripe",
    columns_step="gridDim.y * 8",
    columns_part="(long long)blockIdx.y",
    finalize_words=(),
    finalize_first="stripe",
    finalize_step="32",
    finalize_head=None,
    share="64",
    rows=None,
    heads=None,
    refused=(),
    dims=(),
)
OF_HEADS = Grid(
    held_words="every row of a head",
    columns_words="every (gridDim.y * 8)-th row of head blockIdx.z, of gridDim.z heads",
    columns_first="(long long)(blockIdx.y * 8 + stripe) * gridDim.z + blockIdx.z",
    columns_step="8LL * gridDim.y * gridDim.z",
    columns_part="(long long)(blockIdx.y * gridDim.z + blockIdx.z)",
    finalize_words=(
        "The grid has gridDim.y heads, and every gridDim.y-th part belongs to a head.",
    ),
    finalize_first="blockIdx.y + (long long)stripe * gridDim.y",
    finalize_step="32 * gridDim.y",
    finalize_head="(long long)blockIdx.y * width",
    share="(64 * heads)",
    rows="shape.rows",
    heads="heads",
    refused=("heads < 1", "rows % heads != 0"),
    dims=("static_cast<unsigned int>(heads)",),
)


@dataclass(frozen=True)
class ColumnSum:
    """The gradient of a tensor that varies by column: a sum over rows."""

    name: str
    index: int
    element: str

    @property
    def part(self) -> str:
        """The pointer to partial sums."""
        return f"{self.name}_part"

    @property
    def total(self) -> str:
        """The pointer to the gradient."""
        return f"{self.name}_ptr"


@dataclass(frozen=True)
class Mean:
    """A mean over a row."""

    name: str
    index: int


@dataclass(frozen=True)
class Scratch:
    """A value of each row that `columns_kernel` reads."""

    name: str
    at: str


@dataclass(frozen=True)
class RowGradients:
    """The gradients that are sums over each row."""

    stores: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.stores)

    @property
    def parts(self) -> int | None:
        return more(self.count)


@dataclass(frozen=True)
class ColumnKernels(Template):
    """The kernels that sum over rows: `columns_kernel` for rows of any width, `finalize_kernel` for
    partial sums.
    """

    template: ClassVar[str] = "norm/cuda/_columns.j2"
    language: ClassVar[str] = CUDA

    grid: Grid
    any_width: bool
    sums: tuple[ColumnSum, ...]
    columns_params: str
    lines: tuple[Statement, ...]
    finalize_params: str

    @property
    def count(self) -> int:
        return len(self.sums)

    @property
    def several(self) -> bool:
        return len(self.sums) > 1


@dataclass(frozen=True)
class BackwardKernel(Template):
    """The backward kernel, and the kernels that sum its columns."""

    template: ClassVar[str] = "norm/cuda/_backward.j2"
    language: ClassVar[str] = CUDA

    params: str
    kernel: Kernel
    grid: Grid
    parts: int | None
    """The number of values per exchange, if it is not 1."""
    holds: bool
    """True if values or sums of columns stay in registers."""
    sums: tuple[ColumnSum, ...]
    row_gradients: RowGradients | None
    recomputes: bool
    """True if statistics are computed and not loaded."""
    saved: tuple[str, ...]
    """The statistics that are loaded."""
    statistic_parts: int | None
    means: tuple[Mean, ...]
    first: Elements
    """The statements that do not need the means of the row."""
    second: Elements
    scratch: tuple[Scratch, ...]
    gradients: tuple[str, ...]
    """The gradients with the shape of x."""
    columns: ColumnKernels | None

    @property
    def several(self) -> bool:
        """True if several gradients are sums over rows."""
        return len(self.sums) > 1

    @property
    def means_count(self) -> int:
        return len(self.means)


@dataclass(frozen=True)
class Part:
    """A part of the memory that the C launcher allocates."""

    name: str
    begin: str | None


@dataclass(frozen=True)
class ColumnLaunch:
    """The launches of the kernels that sum over rows, in C."""

    any_width: bool
    sums: tuple[ColumnSum, ...]
    floats: str
    """The number of floats that the launcher allocates."""
    parts: tuple[Part, ...]
    columns_grid: tuple[str, ...]
    columns_arguments: tuple[str, ...]
    finalize_grid: tuple[str, ...]
    finalize_arguments: tuple[str, ...]


@dataclass(frozen=True)
class Backward:
    """The kernels of the backward pass, and their launches."""

    kernel: BackwardKernel
    launch: Launch
    column_launch: ColumnLaunch | None
    loads: tuple[Operand, ...]
    arguments: tuple[str, ...]
    """The launch arguments in Python."""
    columns_arguments: tuple[str, ...]
    finalize_arguments: tuple[str, ...]


@dataclass(frozen=True)
class _Columns:
    """The parts of the kernels that sum over rows, of one plan."""

    sums: tuple[ColumnSum, ...]
    parts: tuple[Param, ...]
    """Pointers to partial sums."""
    totals: tuple[Param, ...]
    scratch: tuple[Scratch, ...]
    params: Params
    body: Body

    @property
    def scratch_params(self) -> tuple[Param, ...]:
        return (pointer("float", "scratch_ptr", "scratch"),) if self.scratch else ()

    @property
    def ours(self) -> tuple[Param, ...]:
        """Pointers to memory that the launcher allocates."""
        return (*self.parts, *self.scratch_params)

    @property
    def finalize_params(self) -> Params:
        counts = [Param("long long", n, n.strip("_")) for n in ("parts", "width_")]
        return [
            *([replace(p, const=True)] for p in self.parts),
            *([p] for p in self.totals),
            counts,
        ]


@dataclass(frozen=True)
class _Bodies:
    """The statements of the backward kernel."""

    h: Body
    first: Body
    second: Body

    @property
    def uses(self) -> frozenset[str]:
        return self.h.uses | self.first.uses | self.second.uses


def backward_of(spelled: Spelled) -> Backward | None:
    """Return the backward kernels of a plan, or None without a backward pass."""
    plan, b = spelled.plan, spelled.plan.backward
    if b is None:
        return None
    loads = tuple(sorted([*plan.upstream, *b.loads], key=lambda o: ORDER.index(o.along)))
    bodies, columns = _bodies(spelled, b, loads), _columns(spelled, b, loads)
    kernel = _parts(spelled, b, loads, bodies)
    saved = [[pointer("float", f"{s}_ptr", s, const=True)] for s in plan.saves]
    results = [
        [pointer(TYPES[g.dtype], f"{_d(spelled, g)}_ptr", f"d_{g.of}")]
        for g in (*b.elements, *b.rows)
    ]
    tensors: Params = [*spelled.inputs(loads), *saved, *results]
    own, outside = (
        spelled.numbers(there, eps=not plan.saves, uses=bodies.uses)
        for there in (kernel.heads, bool(spelled.spec.heads))
    )
    params = [*tensors, *([p] for p in columns.ours), *own]
    public = [*tensors, *outside, *([p] for p in columns.totals)]
    return Backward(
        kernel=_kernel(spelled, loads, kernel, bodies, columns, device(params)),
        launch=_launch(spelled, b, kernel, loads, host(public), names(params)),
        column_launch=_column_launch(spelled, columns) if columns.sums else None,
        loads=loads,
        arguments=tuple(given(params)),
        columns_arguments=tuple(given(columns.params)),
        finalize_arguments=tuple(given(columns.finalize_params)),
    )


def _d(spelled: Spelled, gradient: planning.Gradient) -> str:
    """Return the name of a gradient in kernels."""
    return f"d{spelled.local(gradient.of)}"


def _bodies(spelled: Spelled, b: planning.Backward, loads: Iterable[Operand]) -> _Bodies:
    accesses = spelled.accesses(loads)

    def held(late: bool) -> list[Statement]:
        """Return the sums of threads that keep their columns in registers."""
        found = tuple(_sums(spelled, b, "{}[v][i]", late))
        return [If(Name("ELEMENTS > 0"), found)] if found else []

    means = [spelled.end(f"means[{i}]", m.tree, "+=") for i, m in enumerate(b.means)]
    stores = [spelled.end(f"{_d(spelled, g)}_at[i]", g.tree) for g in b.elements]
    of_rows = [spelled.end(f"row_sums[{i}]", g.tree, "+=") for i, g in enumerate(b.rows)]
    return _Bodies(
        h=spelled.body(accesses, b.before, [spelled.end("to[i]", H)]),
        first=spelled.body(accesses, b.before, [*means, *held(late=False)]),
        second=spelled.body(accesses, [*b.before, b.dh], [*stores, *of_rows, *held(late=True)]),
    )


def _sums(spelled: Spelled, b: planning.Backward, form: str, late: bool) -> list[Assign]:
    """Return the gradients of columns that need the means of a row, or the others."""
    later = {"dh", *(m.name for m in b.means)}
    found = (g for g in b.columns if bool(later & set(variables(g.tree))) is late)
    return [spelled.end(form.format(_d(spelled, g)), g.tree, "+=") for g in found]


def _parts(
    spelled: Spelled, b: planning.Backward, loads: Sequence[Operand], bodies: _Bodies
) -> Kernel:
    columns = spelled.columns(loads)
    rows_of = [(spelled.local(o.name), o.dtype) for o in loads if o.along == "element"]
    return Kernel(
        streams=slots_of(rows_of, "0"),
        stored=slots_of([(_d(spelled, g), g.dtype) for g in b.elements], "STAGES * STAGE"),
        columns=columns,
        rows=spelled.rows(loads),
        heads=bool(spelled.spec.heads and columns),
        h=spelled.elements(loads, bodies.h),
        statistics=LAYER if spelled.plan.layer else RMS,
        to_come="1",
        fetches=("STAGES > 0",),
        held_if="ELEMENTS > 0",
        unroll="unroll (COPIES)",
        clusters=spelled.clusters,
        any_width=spelled.any_width,
    )


def _kernel(
    spelled: Spelled,
    loads: Sequence[Operand],
    kernel: Kernel,
    bodies: _Bodies,
    columns: _Columns,
    params: str,
) -> BackwardKernel:
    plan, b = spelled.plan, spelled.plan.backward
    assert b is not None
    stores = [
        f"store_one({_d(spelled, g)}_ptr + row, row_sums[{i}]);" for i, g in enumerate(b.rows)
    ]
    return BackwardKernel(
        params=params,
        kernel=kernel,
        grid=OF_HEADS if spelled.spec.heads else OF_ALL,
        parts=more(len(b.means)),
        holds=bool(kernel.columns or b.columns),
        sums=columns.sums,
        row_gradients=RowGradients(tuple(stores)) if stores else None,
        recomputes=not plan.saves,
        saved=plan.saves,
        statistic_parts=more(2 if plan.layer else 1),
        means=tuple(Mean(m.name, i) for i, m in enumerate(b.means)),
        first=spelled.elements(loads, bodies.first),
        second=spelled.elements(loads, bodies.second),
        scratch=columns.scratch,
        gradients=tuple(s.name for s in kernel.stored),
        columns=_column_kernels(spelled, columns) if columns.sums else None,
    )


def _launch(
    spelled: Spelled,
    b: planning.Backward,
    kernel: Kernel,
    loads: Sequence[Operand],
    params: str,
    arguments: tuple[str, ...],
) -> Launch:
    streams = tuple(s.name for s in kernel.streams)
    vectors = (*streams, *(c.name for c in kernel.columns), *(s.name for s in kernel.stored))
    return Launch(
        name="backward",
        shapes=tuple(shape_row(s, spelled.vector) for s in spelled.backward_shapes),
        pointers=tuple(f"{n}_ptr" for n in vectors),
        strides=tuple(f"{n}_stride" for n in streams),
        multiple=("heads",) if spelled.multiples else (),
        params=params,
        arguments=arguments,
    )


def _columns(spelled: Spelled, b: planning.Backward, loads: Sequence[Operand]) -> _Columns:
    plan = spelled.plan
    reads: dict[str, Assign] = {o.name: spelled.of_column(o) for o in loads}
    ends = [*_sums(spelled, b, "{}", late=False), *_sums(spelled, b, "{}", late=True)]
    values = [*b.before, b.dh]
    # The backward kernel has stored the values of whole rows.
    scratch = _scratch(plan, spelled.body(reads, values, ends).uses) if spelled.any_width else ()
    of_row = {s.name: s.at for s in scratch} | {s: f"{s}_ptr[row]" for s in plan.saves}
    reads |= {n: Assign((n,), (text(at),), type="float") for n, at in of_row.items()}
    body = spelled.body(reads, values, ends)
    sums = [ColumnSum(_d(spelled, g), i, TYPES[g.dtype]) for i, g in enumerate(b.columns)]
    parts = [pointer("float", f"{_d(spelled, g)}_part", f"d_{g.of}_part") for g in b.columns]
    totals = [pointer(TYPES[g.dtype], f"{_d(spelled, g)}_ptr", f"d_{g.of}") for g in b.columns]
    saved = [pointer("float", f"{s}_ptr", s, const=True) for s in plan.saves if s in body.reads]
    params = spelled.inputs(o for o in loads if o.name in body.reads)
    params += [[p] for p in (*saved, *parts)]
    if scratch:
        params.append([pointer("float", "scratch_ptr", "scratch", const=True)])
    params += spelled.numbers(heads=False, eps=False, uses=body.uses)
    return _Columns(tuple(sums), tuple(parts), tuple(totals), scratch, params, body)


def _scratch(plan: NormPlan, uses: frozenset[str]) -> tuple[Scratch, ...]:
    """Return the values of rows that are used but not saved.

    Each is [rows], and they are adjacent.
    """
    assert plan.backward is not None
    whole = (*(m.name for m in plan.backward.means), *plan.statistics)
    left = [n for n in whole if n in uses and n not in plan.saves]
    places = ["row", *(f"{times(i, 'rows')} + row" for i in range(1, len(left)))]
    return tuple(Scratch(n, f"scratch_ptr[{at}]") for n, at in zip(left, places, strict=False))


def _column_kernels(spelled: Spelled, columns: _Columns) -> ColumnKernels:
    return ColumnKernels(
        grid=OF_HEADS if spelled.spec.heads else OF_ALL,
        any_width=spelled.any_width,
        sums=columns.sums,
        columns_params=device(columns.params),
        lines=columns.body.lines,
        finalize_params=device(columns.finalize_params),
    )


def _column_launch(spelled: Spelled, columns: _Columns) -> ColumnLaunch:
    grid, n = OF_HEADS if spelled.spec.heads else OF_ALL, len(columns.sums)
    floats = [times(n, "parts * width_")]
    if columns.scratch:
        floats.append(times(len(columns.scratch), "rows"))
    begins = [None, *(times(i + 1, "parts * width_") for i in range(len(columns.ours)))]
    finalize_dims = (*(grid.dims or ("1",)), str(n)) if grid.dims or n > 1 else ()
    return ColumnLaunch(
        any_width=spelled.any_width,
        sums=columns.sums,
        floats=" + ".join(floats),
        parts=tuple(Part(p.name, begin) for p, begin in zip(columns.ours, begins, strict=False)),
        columns_grid=("columns", "static_cast<unsigned int>(shares)", *grid.dims),
        columns_arguments=names(columns.params),
        finalize_grid=("columns", *finalize_dims),
        finalize_arguments=names(columns.finalize_params),
    )
