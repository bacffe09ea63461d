"""The parts of the Hopper kernels in the files of a spec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.kernels import accumulators, loop_kernel
from kgen.kernels.attention.lowered.params import forward_params, strides_of_dq
from kgen.kernels.attention.schedules.hopper.conditions import without_kernels
from kgen.kernels.attention.schedules.hopper.kernels import Kernels
from kgen.kernels.attention.schedules.hopper.lowering import hopper_kernels
from kgen.kernels.attention.schedules.hopper.plan import plan_hopper
from kgen.kernels.attention.schedules.hopper.portable import (
    Call,
    Portable,
    Surroundings,
    portable_of,
)
from kgen.kernels.attention.schedules.hopper.templates import (
    GluonNames,
    file_of,
    names_of,
    parts_of,
)
from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.made import (
    Answer,
    BackwardBranch,
    Branch,
    Choice,
    InFile,
    Made,
    Needs,
    Planned,
)
from kgen.kernels.attention.targets.triton.shared import dead_rows, not_specialized, sink_load
from kgen.targets import Source, opening
from kgen.targets.template import Template
from kgen.targets.triton.tritons import GLUON

FILE = "hopper.py"
MODULE = "_hopper()."
"""The prefix by which `triton.py` calls functions of `hopper.py`."""


_NAMING = 'kernels = f"portable: {why}" if why else "hopper"'


@dataclass(frozen=True)
class GluonOpening(Template):
    """The supported versions of Triton, and the import of Gluon if the kernels are in the same
    file.
    """

    template: ClassVar[str] = "attention/hopper/_opening.j2"

    gluon_names: GluonNames | None
    """The names of kernels in this file."""
    gluon_tritons: str = str(GLUON)


@dataclass(frozen=True)
class ChipChoice(Template):
    """The condition under which the kernels run."""

    template: ClassVar[str] = "attention/hopper/_chip.j2"

    name: str
    single: bool
    """True if the kernels are in this file."""

    def launch_functions(self) -> Iterable[str]:
        return ("_by_tma",)


@dataclass(frozen=True)
class WhyPortable(Template):
    """The statements that find the reason why a call uses portable kernels."""

    template: ClassVar[str] = "attention/hopper/_why_portable.j2"

    by_name: str
    """The tensors that TMA loads, by name."""

    def launch_functions(self) -> Iterable[str]:
        return ("_by_tma",)


def made(planned: Planned, ahead: Sequence[Made]) -> Made:
    """Return the Hopper kernels of a spec, and reasons for passes without them."""
    missing = without_kernels(planned.free_plan)
    remarks = tuple(_remarks(planned.plan.spec, missing))
    portable = _portable(planned) if plan_hopper(planned.free_plan) is not None else None
    kernels = _kernels(planned, portable) if portable is not None else None
    if portable is None or kernels is None:
        return Made(choice=_choice(planned, None, missing), remarks=remarks)
    backward = _backward(kernels) if kernels.dkdv is not None else None
    shares = planned.plan.spec.backward_in_parts and kernels.fused is not None
    call = _call(planned, portable, shares)
    parts = tuple(parts_of(kernels, planned.free_lowering, call))
    begins = ("gdc_launch_dependents",) if backward is not None else ()
    waits = (*begins, "gdc_wait") if backward is not None or kernels.dynamic else begins
    beside = file_of(kernels, [*parts], planned.free_lowering, opening(planned.plan.spec), [*waits])
    return Made(
        together=InFile(
            modules=("functools", "warnings"),
            opening=(GluonOpening(None),),
            launcher=(ChipChoice(planned.plan.spec.name, single=False),),
            prefix=MODULE,
        ),
        alone=InFile(
            modules=("collections", "functools", "warnings"),
            named_tuples=True,
            dependents=waits,
            opening=(GluonOpening(names_of(kernels)),),
            kernels=parts,
            launcher=(ChipChoice(planned.plan.spec.name, single=True),),
        ),
        beside=Source(FILE, beside, arch="sm_90a"),
        helpers=frozenset(planned.lowering.helpers | planned.free_lowering.helpers),
        needs=Needs(many_queries=True, multiprocessors=True, writes_by_tma=True),
        branch=_branch(kernels) if kernels.forward is not None else None,
        backward=backward,
        choice=_choice(planned, kernels, missing),
        remarks=remarks,
    )


def _kernels(planned: Planned, portable: Portable) -> Kernels | None:
    at, lowering = planned.at, planned.lowering
    params = forward_params(lowering, portable.forward)
    around = Surroundings(
        kv_heads=at.kv_heads,
        problem_params=params.problem_params,
        no_specialize=not_specialized([*lowering.sizes, *lowering.open_sizes, *lowering.runtime]),
        vectors=at.rows,
        strides_of_dq=strides_of_dq(lowering),
        sink_load=sink_load(),
        dead_rows=dead_rows(planned.plan.spec.sinks),
    )
    return hopper_kernels(planned.free_plan, planned.free_lowering, portable, around)


def _portable(planned: Planned) -> Portable:
    """Return the portable loops, from which the Hopper loops are built."""
    plan = planned.free_plan
    whole = {"forward": plan.forward, "dq": plan.dq, "dkdv": plan.dkdv}
    lowering = planned.free_lowering
    return portable_of(
        {
            name: loop_kernel(lowering, of, accumulators(of))
            for name, of in whole.items()
            if of is not None
        }
    )


def _call(planned: Planned, portable: Portable, shares: bool) -> Call:
    """Return the launcher's names for the values of a call."""
    params = forward_params(planned.lowering, portable.forward)
    at = planned.at
    return Call(
        inputs=", ".join(planned.op.inputs),
        problem_args=", ".join(params.problem_args),
        sizes_of_q=at.sizes_of_q,
        other_sizes=at.other_sizes,
        shape_of_lse=at.shape_of_lse,
        group=at.group,
        shares=shares,
    )


def _backward(kernels: Kernels) -> BackwardBranch:
    sums = {"sums": "sums_for_dq", "ends": "dq_of_sums"} if kernels.fused is not None else {}
    return BackwardBranch(
        function="backward_on_hopper",
        variable="on_hopper",
        when="_on_hopper(q, k, v)",
        operands=tuple(kernels.backward.operands),
        dq=kernels.dq is not None,
        dout="_by_tma",
        overlaps=True,
        counts=kernels.dynamic,
        **sums,
    )


def _branch(kernels: Kernels) -> Branch:
    served = ", ".join(["q", "k", "v", *kernels.streamed])
    return Branch("forward_on_hopper", f"_on_hopper({served})", laid_out=True)


def _choice(planned: Planned, kernels: Kernels | None, missing: Mapping[str, str]) -> Choice:
    """Return the kernels of each pass: a call that decides, or the reason for portable kernels."""
    answers = {
        name: Answer(f'"portable: no kernels for Hopper: {missing[name]}"', ("portable",))
        if name in missing
        else Answer("kernels", ("hopper", "portable"), by_call=True, named=True)
        for name in ("forward", "backward")
    }
    words = '"hopper": the kernels for compute capability 9.0'
    if kernels is None:
        return Choice(answers, "hopper", words)
    asked = {name: name for name in ("q", "k", "v")}
    for stream in kernels.streams:
        name = planned.plan.called.get(stream.buffer, stream.buffer)
        asked[name] = f"{name}{stream.index}"
    quoted = ", ".join(f'"{name}"' for name in asked)
    lines = WhyPortable(f"zip(({quoted}), ({', '.join(asked.values())}))")
    return Choice(
        answers,
        "hopper",
        words,
        own='"hopper"',
        lines=(lines,),
        naming=_NAMING,
        streamed=tuple(list(asked)[3:]),
    )


def _remarks(spec: AttentionSpec, missing: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each reason why passes have no Hopper kernels."""
    asked = {name: missing[name] for name in spec.passes if name in missing}
    for reason in dict.fromkeys(asked.values()):
        passes = " and ".join(name for name, why in asked.items() if why == reason)
        yield f"no kernels for Hopper in {passes}: {reason}"
