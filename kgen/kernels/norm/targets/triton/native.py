"""Calls of norms from C: the header and the program, from the plan of the emitted launcher."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from kgen.kernels.norm.plan.planning import NormPlan, plan_norm
from kgen.kernels.norm.plan.tiles import norm_tiles
from kgen.kernels.norm.spec import MAX_WIDTH
from kgen.kernels.norm.targets.arguments import HEADS_WIDTH
from kgen.kernels.norm.targets.triton.native_example import norm_example
from kgen.kernels.norm.targets.triton.native_tensors import Argument, Arguments, arguments_of, taken
from kgen.spec.load import Loaded
from kgen.targets import opening
from kgen.targets.native import (
    WORDS,
    Check,
    Header,
    Native,
    Parameter,
    Program,
    Tiles,
    parameters,
    prefix_of,
    unique,
)
from kgen.targets.template import Template
from kgen.targets.triton import tables

CONSTANTS = """
eps n_parts size slots_ptr SAVE WIDTH ROWS BLOCK PARTS SLOTS STAGES num_warps maxnreg
launch_cooperative_grid
"""
"""Names of launch arguments that are not tensors, sizes or parameters of a spec."""


@dataclass(frozen=True, kw_only=True)
class NormHeader(Header):
    """The header."""

    template: ClassVar[str] = "norm/c/norm.h.j2"

    shapes: str
    """The shapes of x and of the results, in words."""
    arguments: tuple[Argument, ...]
    params: tuple[Parameter, ...]
    eps: str
    eps_words: str
    of_backward: tuple[Argument, ...]
    """The arguments that only backward uses."""


@dataclass(frozen=True)
class RowSchedule(Template):
    """The schedule for rows; several programs may share a row."""

    template: ClassVar[str] = "norm/c/_row_schedule.j2"


@dataclass(frozen=True)
class HeadSchedule(Template):
    """The schedule for positions with heads; each program has some heads."""

    template: ClassVar[str] = "norm/c/_head_schedule.j2"


@dataclass(frozen=True)
class Size:
    """A size that is a launch argument."""

    name: str
    value: str


@dataclass(frozen=True)
class Backward(Template):
    """The functions of the backward pass."""

    template: ClassVar[str] = "norm/c/_backward.j2"

    name: str
    tensors: tuple[Argument, ...]
    sums: tuple[str, ...]
    """The gradients of columns. Programs store their partial sums in the workspace."""
    shared: bool
    least_programs: str


@dataclass(frozen=True, kw_only=True)
class NormProgram(Program):
    """The functions."""

    template: ClassVar[str] = "norm/c/norm.c.j2"

    heads: str
    """The number of heads."""
    axis: int
    """The axis of x that rows lie along."""
    sizes: tuple[Size, ...]
    checks: tuple[Check, ...]
    params: tuple[Parameter, ...]
    eps: str
    forward: tuple[Argument, ...]
    """The tensors that forward reads, and the tensors that it always writes."""
    saved: tuple[Argument, ...]
    """The tensors that forward writes if the caller passes all of them."""
    schedule: RowSchedule | HeadSchedule
    shared: bool
    """True if several programs share a row."""
    backward: Backward | None

    @property
    def save(self) -> str:
        """The condition that the caller passes all of `saved`."""
        return " && ".join(f"a->{t.member}.data != NULL" for t in self.saved)

    @property
    def of_backward(self) -> tuple[Argument, ...]:
        return self.backward.tensors if self.backward else ()


def native(loaded: Loaded, sizes: Mapping[str, Sequence[int]], chips: Collection[int]) -> Native:
    """Return the C files of a spec.

    `sizes` has the sizes with machine code that the spec leaves open. All chips have the same
    kernels.
    """
    plan = plan_norm(loaded)
    arguments = arguments_of(plan)
    params = parameters(plan.spec.params, "of the expressions", taken(plan))
    program = _program(loaded, plan, arguments, params)
    return Native(
        header=_header(loaded, plan, arguments, params),
        program=program,
        example=norm_example(loaded, plan, arguments, params, sizes),
        names=_names(program, arguments),
        tiles=list(_tiles(plan)),
    )


def _tiles(plan: NormPlan) -> Iterator[Tiles]:
    found = {"forward_tiles": norm_tiles(plan.spec, "forward", plan.forward.loads)}
    if plan.backward:
        loads = (*plan.backward.loads, *plan.upstream)
        found["backward_tiles"] = norm_tiles(plan.spec, "backward", loads)
    for name, table in found.items():
        by_chip = tables.rows({chip: [tiles] for chip, tiles in table.items()})
        yield Tiles(name, [(chips, asdict(tile)) for chips, own in by_chip for tile in own])


def _names(program: NormProgram, arguments: Arguments) -> list[str]:
    """Return the names of launch arguments."""
    found = [f"{t.name}_ptr" for t in arguments.all]
    found += [stride.name for t in arguments.all for stride in t.strides]
    if program.backward:
        found += [f"{name}_parts_ptr" for name in program.backward.sums]
    found += [size.name for size in program.sizes] + [p.name for p in program.params]
    return unique([*found, *CONSTANTS.split()])


def _header(
    loaded: Loaded, plan: NormPlan, arguments: Arguments, params: tuple[Parameter, ...]
) -> NormHeader:
    spec = plan.spec
    shape, rows = (
        ("[N, D]", "N rows") if spec.heads is None else ("[N, H, D]", "N positions of H heads")
    )
    dtypes = [WORDS[spec.dtypes[name]] for name in ("input", "output")]
    return NormHeader(
        name=prefix_of(loaded),
        license=spec.license.in_comment(),
        summary=opening(spec, in_comment=True),
        passes=("forward", "backward") if plan.backward else ("forward",),
        shapes=f"x {shape} {dtypes[0]} -> out {shape} {dtypes[1]}, {rows}",
        arguments=(*arguments.inputs, *arguments.outputs),
        params=params,
        eps=repr(float(spec.eps)),
        eps_words=f"added to {'the variance' if plan.layer else 'the mean of squares'}",
        of_backward=(*arguments.upstream, *arguments.gradients),
    )


def _program(
    loaded: Loaded, plan: NormPlan, arguments: Arguments, params: tuple[Parameter, ...]
) -> NormProgram:
    spec, heads = plan.spec, plan.spec.heads is not None
    sizes = [Size("n_rows", "kgen_integer(p->rows)")]
    if heads:
        sizes = [Size("n_positions", "kgen_integer(p->rows)"), Size("H", "kgen_integer(p->heads)")]
    return NormProgram(
        name=prefix_of(loaded),
        license=spec.license.in_comment(),
        heads="a->x.sizes[1]" if heads else "1",
        axis=2 if heads else 1,
        sizes=tuple(sizes),
        checks=tuple(_checks(plan)),
        params=params,
        eps=repr(float(spec.eps)),
        forward=(*arguments.read, *arguments.stored),
        saved=arguments.saved,
        schedule=HeadSchedule() if heads else RowSchedule(),
        shared=not heads,
        backward=_backward(loaded, plan, arguments),
    )


def _backward(loaded: Loaded, plan: NormPlan, arguments: Arguments) -> Backward | None:
    if plan.backward is None:
        return None
    shared = plan.spec.heads is None
    return Backward(
        name=prefix_of(loaded),
        tensors=(*arguments.read_by_backward, *arguments.gradients),
        sums=tuple(g.name for g in plan.backward.columns),
        shared=shared,
        least_programs="p->row_tiles" if shared else "kgen_cdiv(p->heads, p->row_tiles)",
    )


def _checks(plan: NormPlan) -> Iterator[Check]:
    width, heads = plan.spec.width, plan.spec.heads
    if width == "any":
        most = MAX_WIDTH if heads is None else HEADS_WIDTH
        wrong, words = (
            f"p->width < 1 || p->width > {most}",
            f"rows of x must have 1 to {most} elements",
        )
    else:
        widths = (width,) if isinstance(width, int) else width
        wrong = " && ".join(f"p->width != {w}" for w in widths)
        words = f"rows of x must have {' or '.join(map(str, widths))} elements"
    yield Check(wrong, f"{words}, got %lld", ("(long long)p->width",))
    yield Check("p->rows < 0", "sizes may not be negative")
    if isinstance(heads, int):
        yield Check(
            f"p->heads != {heads}", f"x must have {heads} heads, got %lld", ("(long long)p->heads",)
        )
    elif heads is not None:
        yield Check(
            "p->heads < 0",
            "the number of heads may not be negative, got %lld",
            ("(long long)p->heads",),
        )
