"""The Triton target of linear attention, which emits one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.expr.functions import in_order
from kgen.expr.unparse import show
from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan, plan_linear_attention
from kgen.kernels.linear_attention.schedules import schedule_of
from kgen.kernels.linear_attention.targets.triton.functions import Function, Functions
from kgen.kernels.linear_attention.targets.triton.gradients import (
    BackwardBuilder,
    BackwardKernels,
)
from kgen.kernels.linear_attention.targets.triton.interface import Interface
from kgen.kernels.linear_attention.targets.triton.kernels import Builder, Kernels
from kgen.kernels.linear_attention.targets.triton.launcher import (
    Launcher,
    launcher,
    of_backward,
    operands_of,
    saved_of,
)
from kgen.kernels.linear_attention.targets.triton.made import Call, Made
from kgen.kernels.linear_attention.targets.triton.signatures import KernelSignature
from kgen.kernels.linear_attention.targets.triton.steps import TileTable, tables
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.launching import ImportsLaunch, LaunchFunctions, launching_of, modules_of
from kgen.targets.template import Template
from kgen.targets.triton.tritons import OLDEST_TRITON, OldestTriton


@dataclass(frozen=True)
class Module(ImportsLaunch):
    """`triton.py`."""

    template: ClassVar[str] = "linear_attention/triton/linear_attention.j2"
    optional_fields: ClassVar[tuple[str, ...]] = ("named_tuples", "opening_of_chip")

    name: str
    summary: str
    K: int
    V: int
    BT: int
    dtype: str
    recurrence: list[str]
    """The steps of a token, in words of the spec."""
    usage: str
    varlen: bool
    oldest: OldestTriton
    tile_tables: list[TileTable]
    helpers: list[str]
    """Texts of helper functions that the kernels call."""
    functions: list[Function]
    kernels: list[Template]
    launcher: Launcher
    modules: list[str]
    """The modules of the standard library that the file imports."""
    launching: LaunchFunctions | None
    """The functions of all launchers, if the file contains their text."""
    named_tuples: bool
    opening_of_chip: Template | None
    """The statements after the imports that the kernels for one chip need."""


def sources(loaded: Loaded) -> list[Source]:
    """Return the files of this target."""
    plan = plan_linear_attention(loaded)
    interface = Interface(plan, loaded.called)
    own = _of_chip(plan, interface)
    return [
        Source(
            "triton.py",
            module(plan, loaded.called, single=False),
            rank=1,
            alone=module(plan, loaded.called, single=True),
            launches=True,
            offers=(f"{plan.spec.name}_decode",) if plan.decode else (),
            signature=interface.signature(),
            docstring=interface.docstring(),
        ),
        *([own.beside] if own is not None else []),
    ]


def _of_chip(plan: LinearAttentionPlan, interface: Interface) -> Made | None:
    """Return the parts of the kernels for one chip, or None if a spec has none."""
    schedule = schedule_of(plan)
    if schedule is None:
        return None
    functions = Functions(plan, set())
    builder = Builder(plan, functions)
    kernels = builder.kernels()
    back = BackwardBuilder(builder, functions).kernels() if plan.backward else None
    of = of_backward(interface, kernels, back) if back is not None else None
    call = Call(operands_of(interface), saved_of(plan, kernels), of)
    made: Made = schedule.made(builder, kernels, call)
    return made


def module(plan: LinearAttentionPlan, called: Mapping[str, str], *, single: bool) -> Module:
    """Return the file of a plan."""
    spec, helpers = plan.spec, set[str]()
    interface, functions = Interface(plan, called), Functions(plan, helpers)
    builder = Builder(plan, functions)
    kernels = builder.kernels()
    backward = BackwardBuilder(builder, functions).kernels() if plan.backward else None
    texts = functions.all()
    launching = launching_of(single)
    of_chip = _of_chip(plan, interface)
    own = None if of_chip is None else of_chip.alone if single else of_chip.together
    parts = own.parts if own is not None else ()
    return Module(
        name=spec.name,
        summary=opening(spec),
        K=spec.head_dim.qk,
        V=spec.head_dim.v,
        BT=spec.chunk_size,
        dtype=spec.dtype,
        recurrence=recurrence(plan),
        usage=interface.signature().usage,
        varlen=spec.varlen,
        oldest=OLDEST_TRITON,
        tile_tables=tables(plan, signatures(kernels, backward)),
        helpers=in_order(helpers),
        functions=texts,
        kernels=[*_there(kernels).values(), *_there(backward).values(), *parts],
        launcher=launcher(interface, kernels, backward, launching, own),
        modules=modules_of(launching, *(own.modules if own is not None else ())),
        launching=launching,
        named_tuples=bool(parts),
        opening_of_chip=own.opening if own is not None else None,
    )


def signatures(kernels: Kernels, backward: BackwardKernels | None) -> dict[str, KernelSignature]:
    """Return the parameters of each kernel by its name."""
    return {name: kernel.signature for name, kernel in (_there(kernels) | _there(backward)).items()}


def _there(kernels: Kernels | BackwardKernels | None) -> dict[str, Any]:
    """Return the kernels of a spec by name."""
    named = {} if kernels is None else vars(kernels)
    return {name: kernel for name, kernel in named.items() if kernel is not None}


def recurrence(plan: LinearAttentionPlan) -> list[str]:
    """Return the steps of one token, as the user wrote the expressions."""
    spec, formulas = plan.spec, plan.formulas
    lines = []
    for of in ("q", "k"):
        if f"{of}_map" in formulas:
            lines.append(f"{of} = {show(formulas[f'{of}_map'].tree)} for x = {of}")
        if spec.qk_norm:
            lines.append(f"{of} = {of} / sqrt(sum({of}**2) + {spec.norm_eps})")
    power = "exp" if plan.natural else "exp2"
    if "decay" in formulas:
        lines.append(f"S = {power}({show(formulas['decay'].tree)}) * S")
    new = "(v - S^T @ k)" if plan.delta else "v"
    beta = f"({show(formulas['beta'].tree)}) * " if "beta" in formulas else ""
    lines.append(f"S = S + outer(k, {beta}{new})")
    skip = f" + {show(formulas['skip'].tree)}" if "skip" in formulas else ""
    lines.append(f"o = scale * S^T @ q{skip}")
    if "output_gate" in formulas:
        lines.append(f"o = o * ({show(formulas['output_gate'].tree)})")
    if spec.output_norm:
        lines.append(f"o = o / sqrt(mean(o**2) + {spec.output_norm_eps})")
    if "output" in formulas:
        lines.append(f"o = {show(formulas['output'].tree)}")
    return lines
