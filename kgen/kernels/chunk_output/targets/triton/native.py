"""Calls of chunk_output from C: the files in `templates/chunk_output/c`, and the names of launch
arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan, plan_chunk_output
from kgen.kernels.chunk_output.plan.tiles import Tile, tile_tables
from kgen.kernels.chunk_output.spec import ChunkOutputSpec
from kgen.kernels.chunk_output.targets.interface import Formula, formula
from kgen.kernels.chunk_output.targets.triton.launcher import head_words, heads_rule
from kgen.kernels.chunk_output.targets.triton.native_example import chunk_output_example
from kgen.kernels.chunk_output.targets.triton.native_tensors import (
    FAR_COLUMNS,
    Argument,
    Arguments,
    Gradients,
    Packing,
    arguments_of,
)
from kgen.spec.load import Loaded
from kgen.targets import opening
from kgen.targets.native import Check, Header, Native, Program, Tiles, prefix_of, unique
from kgen.targets.template import Template
from kgen.targets.triton import tables

HINT = "make tensors contiguous, or name heads to `kgen build`, as `--heads` or `--gqa`"
FAR_TOKENS = 24
"""The limit of strides of tokens: kernels multiply positions by strides in 32 bits."""
_NAMES = """
o_ptr do_ptr dq_ptr dk_ptr dv_ptr dh_ptr dg_ptr stride_dg cu_seqlens_ptr chunk_indices_ptr N T NT
scale H HV BLOCK BLOCK_K BLOCK_V num_warps num_stages maxnreg
"""
"""The names of launch arguments, apart from the inputs."""


@dataclass(frozen=True, kw_only=True)
class ChunkOutputHeader(Header):
    """The header: the struct of arguments, and the functions."""

    template: ClassVar[str] = "chunk_output/c/chunk_output.h.j2"

    formula: Formula
    head_words: str
    chunks: str
    """A description of the chunks that NT counts."""
    K: int
    BT: int
    tensors: tuple[Argument, ...]
    """The tensors that both passes read."""
    o: Argument
    of_backward: tuple[Argument, ...]
    """The tensors that only backward uses."""


@dataclass(frozen=True)
class Backward(Template):
    """The functions of the backward pass."""

    template: ClassVar[str] = "chunk_output/c/_backward.j2"

    name: str
    K: int
    V: int
    packed: bool
    gradients: Gradients


@dataclass(frozen=True, kw_only=True)
class ChunkOutputProgram(Program):
    """The functions."""

    template: ClassVar[str] = "chunk_output/c/chunk_output.c.j2"

    V: int
    default_scale: str
    inputs: tuple[Argument, ...]
    packing: Packing | None
    o: Argument
    sizes: tuple[str, ...]
    """The sizes of a problem, `B` first."""
    launched: tuple[str, ...]
    """The sizes that are launch arguments."""
    checks: tuple[Check, ...]
    gradients: Gradients | None
    checks_of_backward: tuple[Check, ...]
    backward: Backward | None


def native(loaded: Loaded, sizes: Mapping[str, Sequence[int]], chips: Collection[int]) -> Native:
    """Return the files that call the kernels of a spec.

    `sizes` are the sizes that the spec leaves open and the package has machine code for. All chips
    have the same kernels.
    """
    plan = plan_chunk_output(loaded)
    name, license, arguments = prefix_of(loaded), plan.spec.license.in_comment(), arguments_of(plan)
    return Native(
        _header(name, license, plan, arguments),
        _program(name, license, plan, arguments),
        chunk_output_example(loaded, plan, arguments, sizes),
        _names(plan.spec, arguments),
        _tiles(plan),
        HINT,
    )


def _header(
    name: str, license: str, plan: ChunkOutputPlan, arguments: Arguments
) -> ChunkOutputHeader:
    spec, packing, gradients = plan.spec, arguments.packing, arguments.gradients
    packed = (packing.cu_seqlens, packing.chunk_indices) if packing else ()
    of_row = f"the ceil(T / {spec.chunk_size}) chunks of a row"
    return ChunkOutputHeader(
        name=name,
        license=license,
        summary=opening(spec, in_comment=True),
        passes=("forward", "backward") if plan.backward else ("forward",),
        formula=formula(plan),
        head_words=head_words(spec),
        chunks="the chunks of all sequences" if spec.varlen else of_row,
        K=spec.head_dim.qk,
        BT=spec.chunk_size,
        tensors=(*arguments.inputs, *packed),
        o=arguments.o,
        of_backward=gradients.tensors if gradients else (),
    )


def _program(
    name: str, license: str, plan: ChunkOutputPlan, arguments: Arguments
) -> ChunkOutputProgram:
    spec, gradients = plan.spec, arguments.gradients
    K, V = spec.head_dim.qk, spec.head_dim.v
    launched = ("T", "H", "HV", "NT", "N") if spec.varlen else ("T", "H", "HV", "NT")
    return ChunkOutputProgram(
        name=name,
        license=license,
        V=V,
        default_scale=repr(K**-0.5),
        inputs=arguments.inputs,
        packing=arguments.packing,
        o=arguments.o,
        sizes=("B", *launched),
        launched=launched,
        checks=(_heads(spec), *_chunks(spec), *_strides(arguments.inputs)),
        gradients=gradients,
        checks_of_backward=(_apart(gradients.do, 1, "tokens", FAR_COLUMNS),) if gradients else (),
        backward=Backward(name, K, V, spec.varlen, gradients) if gradients else None,
    )


def _names(spec: ChunkOutputSpec, arguments: Arguments) -> list[str]:
    """Return the names of all launch arguments."""
    names = [f"{t.name}_ptr" for t in arguments.inputs]
    axes = dict.fromkeys("qkvoxy", "bthd") | {"h": f"bnh{spec.state_layout}", "g": "bth"}
    names += [f"stride_{x}{axis}" for x, own in axes.items() for axis in own]
    return unique([*names, "g_ptr", "g_gamma_ptr", "stride_gamma", *_NAMES.split()])


def _tiles(plan: ChunkOutputPlan) -> list[Tiles]:
    found = tile_tables(plan.spec)
    named = {"forward": found.forward}
    if plan.backward:
        named |= {"dvdh": found.dvdh, "dqdk": found.dqdk}
    return [Tiles(f"{name}_tiles", _rows(table)) for name, table in named.items()]


def _rows(table: Mapping[int, Tile]) -> list[tuple[Collection[int], Mapping[str, int | bool]]]:
    """Return the rows of a table. `maxnreg` None becomes 0."""
    rows = tables.rows({chip: [tile] for chip, tile in table.items()})
    return [
        (chips, {name: value or 0 for name, value in asdict(tile).items()}) for chips, tile in rows
    ]


# --- checks of the numbers of heads and chunks and of strides, as in the emitted function ---


def _heads(spec: ChunkOutputSpec) -> Check:
    heads, both = spec.heads, ("(long long)p->H", "(long long)p->HV")
    if heads.qk:
        wrong = f"p->H != {heads.qk} || p->HV != {heads.v}"
        return Check(
            wrong, f"q must have {heads.qk} heads and v {heads.v}, got %lld and %lld", both
        )
    if heads.group:
        message = f"{heads_rule(heads.group)}, got %lld and %lld"
        return Check(f"p->HV != {heads.group} * p->H", message, both[::-1])
    message = "the number of heads of v must be a multiple of that of q, got %lld and %lld"
    return Check("p->H <= 0 || p->HV % p->H", message, both[::-1])


def _chunks(spec: ChunkOutputSpec) -> list[Check]:
    if spec.varlen:
        few = "cu_seqlens must be [N + 1] for N sequences, got [%lld]"
        return [
            Check("p->B != 1", "packed sequences need B = 1, got %lld", ("(long long)p->B",)),
            Check("p->N < 1", few, ("(long long)p->N + 1",)),
        ]
    chunks = f"kgen_cdiv(p->T, {spec.chunk_size})"
    message = "h must have a state for each of %lld chunks, got %lld"
    numbers = tuple(f"(long long){n}" for n in (chunks, "p->NT"))
    return [Check(f"p->NT != {chunks}", message, numbers)]


def _strides(inputs: Sequence[Argument]) -> list[Check]:
    by_token = [t for t in inputs if t.name in ("q", "k", "v", "g")]
    checks = {t.name: _apart(t, 1, "tokens", FAR_TOKENS) for t in by_token}
    checks |= {t.name: _apart(t, 3, "rows", FAR_COLUMNS) for t in inputs if t.name == "h"}
    return [checks[t.name] for t in inputs if t.name in checks]


def _apart(of: Argument, axis: int, what: str, power: int) -> Check:
    wrong = f"a->{of.member}.strides[{axis}] >= INT64_C(1) << {power}"
    return Check(
        wrong,
        f"{what} of {of.label} must be less than 2**{power} elements apart: make it contiguous",
    )
