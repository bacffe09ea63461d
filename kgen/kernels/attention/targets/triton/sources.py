"""The Triton target of attention: the data of `templates/attention/triton/attention.j2`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.functions import in_order
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.schedules import SCHEDULES
from kgen.kernels.attention.targets.triton.block_mask import block_mask_kernels
from kgen.kernels.attention.targets.triton.choice import which_kernels
from kgen.kernels.attention.targets.triton.interface import Interface, operator_of
from kgen.kernels.attention.targets.triton.launcher import Launcher
from kgen.kernels.attention.targets.triton.made import InFile, Made, Planned
from kgen.kernels.attention.targets.triton.opening import (
    Opening,
    PackedTile,
    Prelude,
    Tf32Dot,
    TileAndHead,
    computed_of,
    constant,
    dependents,
    formula_of,
    imported,
)
from kgen.kernels.attention.targets.triton.placement import placement
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.code import Statement
from kgen.targets.launching import ImportsLaunch, LaunchFunctions, launching_of, modules_of
from kgen.targets.template import Template, filled


@dataclass(frozen=True)
class AttentionFile(ImportsLaunch):
    """`triton.py`."""

    template: ClassVar[str] = "attention/triton/attention.j2"

    name: str
    opening: Opening
    launching: LaunchFunctions | None
    """The functions of all launchers, if the file contains their text."""
    openings: list[Template]
    """The statements that schedules add after the imports."""
    prelude: Prelude
    kernels: list[Template]
    launcher: list[Template]


def sources(loaded: Loaded) -> list[Source]:
    """Return `triton.py`, which runs on every chip, and the separate files of schedules."""
    file = _File(loaded)
    plan, name = file.plan, loaded.spec.name
    offers = [f"{name}_kernels"]
    if plan.block_mask is not None:
        offers.append(f"{name}_block_mask")
    if plan.backward and plan.spec.targets.cuda is not None:
        offers.append("use_delta")
    if file.launcher.shares:
        offers += [f"{name}_begin", f"{name}_end"]
    offers += [offer for of in file.made for offer in of.offers]
    whole = Source(
        "triton.py",
        file.whole(single=False),
        rank=1,
        launches=True,
        alone=file.whole(single=True),
        offers=tuple(offers),
        unbuilt=next((of.unbuilt for of in file.made if of.unbuilt), ""),
        signature=file.launcher.signature,
        docstring=file.launcher.docstring(),
        remarks=tuple(remark for of in file.made for remark in of.remarks),
    )
    return [whole, *(of.beside for of in file.made if of.beside is not None)]


def planned_of(loaded: Loaded) -> Planned:
    """Return a spec with the plans and lowerings that all schedules use."""
    plan, free = plan_attention(loaded), without_promises(loaded)
    # TMA stops at the end of the tensor, for any length.
    free_plan = plan if free.spec == loaded.spec else plan_attention(free)
    lowering, interface = Lowering(plan), Interface(plan)
    return Planned(
        loaded=loaded,
        plan=plan,
        free_plan=free_plan,
        lowering=lowering,
        free_lowering=lowering if free_plan is plan else Lowering(free_plan),
        at=placement(plan.spec.varlen, plan.grouped, plan.spec.head_dim.v, interface.kv_sizes()),
        interface=interface,
        op=operator_of(interface),
    )


def made_of(planned: Planned) -> list[Made]:
    """Return the parts of each schedule, in the order in which calls look for kernels."""
    found: list[Made] = []
    for schedule in SCHEDULES:
        found.append(schedule.made(planned, tuple(found)))
    return found


class _File:
    """Builds the data of the templates for one spec."""

    def __init__(self, loaded: Loaded) -> None:
        self.planned = planned = planned_of(loaded)
        self.plan, self.at, lowering = planned.plan, planned.at, planned.lowering
        mask, backward = planned.plan.block_mask, planned.plan.backward
        self.block_mask = block_mask_kernels(mask, lowering, backward) if mask is not None else None
        self.made = made_of(planned)
        self.launcher = Launcher(planned, self.made, self.block_mask)

    def whole(self, single: bool) -> AttentionFile:
        """Return `triton.py`. If `single`, the file imports no other emitted file."""
        parts = [of.alone if single else of.together for of in self.made]
        first = [self.block_mask] if self.block_mask is not None else []
        # Kernels that serve more calls come first.
        forward = [kernel for of in reversed(parts) for kernel in of.forward]
        others = [kernel for of in reversed(parts) for kernel in of.kernels]
        return AttentionFile(
            name=self.plan.spec.name,
            opening=self._opening(parts, single),
            launching=launching_of(single),
            openings=[part for of in parts for part in of.opening],
            prelude=self._prelude(),
            kernels=[*first, *forward, *others],
            launcher=self.launcher.parts(
                parts, which_kernels(self.planned, self.made), launching_of(single)
            ),
        )

    def _opening(self, parts: list[InFile], single: bool) -> Opening:
        plan, spec = self.plan, self.plan.spec
        named = (
            plan.block_mask is not None
            or self.launcher.shares
            or any(of.named_tuples for of in parts)
        )
        launching = launching_of(single)
        gdc = dict.fromkeys(name for of in reversed(parts) for name in of.dependents)
        typing = [*(["NamedTuple"] if named else []), *(["Optional"] if plan.backward else [])]
        by_tma = ["TensorDescriptor"] if self.launcher.needs.by_tma else []
        descriptors = imported("triton.tools.tensor_descriptor", by_tma)
        return filled(
            Opening,
            self.at,
            name=spec.name,
            summary=opening(spec),
            computed=computed_of(spec),
            formula=formula_of(spec),
            width_qk=spec.head_dim.qk,
            width_v=spec.head_dim.v,
            kv_shapes=self.planned.interface.kv_shapes(),
            gqa_words=self.planned.interface.gqa_words(),
            dtype=spec.dtype,
            tensors=["q", "k", "v", *self.launcher.packed],
            usage_args=[f"{name}={name}" for name in self.planned.interface.required()],
            modules=modules_of(
                launching, "math", *(module for of in parts for module in of.modules)
            ),
            launching=launching,
            standard=imported("typing", typing),
            of_triton=[*descriptors, *dependents(gdc)],
        )

    def _sizes(self) -> Iterator[Statement]:
        """Yield the sizes that are constants of kernels."""
        if self.at.packed:
            yield constant("FAR", "2**30", "more than any number of tokens")
        if self.plan.block_mask is not None:
            yield constant(
                "BLOCK_SIZE", str(BLOCK_SIZE), "queries and keys of a block of the block mask"
            )

    def _prelude(self) -> Prelude:
        params, lowering = self.plan.spec.params, self.planned.lowering
        own = [n for n in params if n in lowering.constants]
        tables = [table for of in reversed(self.made) for table in of.forward_tables]
        functions: list[Template] = [TileAndHead()] if self.launcher.needs.many_queries else []
        functions += [PackedTile()] if self.at.packed else []
        functions += [Tf32Dot()] if lowering.tf32 else []
        return Prelude(
            constants=[*self._sizes(), *(constant(n.upper(), repr(params[n].value)) for n in own)],
            tile_tables=[*tables, *(table for of in reversed(self.made) for table in of.tables)],
            by_tma=self.launcher.needs.by_tma,
            functions=functions,
            helpers=in_order(frozenset().union(*(of.helpers for of in self.made))),
        )
