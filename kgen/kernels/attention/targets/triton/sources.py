"""The Triton target of attention: a plan becomes what `templates/attention/triton/attention.j2` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.functions import in_order
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE
from kgen.kernels.attention.plan.decode import MOST_QUERIES, DecodePlan, decodes, plan_decode
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.schedules.hopper.conditions import without_kernels
from kgen.kernels.attention.schedules.hopper.kernels import Kernels
from kgen.kernels.attention.schedules.hopper.lowering import hopper_kernels
from kgen.kernels.attention.schedules.hopper.plan import plan_hopper
from kgen.kernels.attention.schedules.hopper.portable import Call, Surroundings, portable_of
from kgen.kernels.attention.schedules.hopper.templates import GluonNames, file_of, names_of, parts_of
from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.interface import Interface
from kgen.kernels.attention.targets.triton.launcher import ChipKernels, Launcher, WhichKernels
from kgen.kernels.attention.targets.triton.launches import launches_of
from kgen.kernels.attention.targets.triton.opening import Constant, Opening, Prelude, formula_of, tile_tables
from kgen.kernels.attention.targets.triton.placement import placement
from kgen.kernels.attention.targets.triton.portable import dead_rows, portable_kernels, sink_load
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.launching import launching_of, modules_of
from kgen.targets.template import Template
from kgen.targets.triton.tritons import GLUON


@dataclass(frozen=True)
class AttentionFile(Template):
    """`triton.py`."""

    template: ClassVar[str] = "attention/triton/attention.j2"

    opening: Opening
    hopper: bool
    """True where there are kernels for Hopper, here or in a file beside this one."""
    prelude: Prelude
    kernels: list[Template]
    """The kernels for every chip."""
    launcher: list[Template]
    gluon_names: GluonNames | None
    """The names of kernels for Hopper that are in this file."""
    hopper_parts: list[Template]
    """The kernels for Hopper, and their launch."""
    gluon_tritons: str = str(GLUON)


def sources(loaded: Loaded) -> list[Source]:
    """`triton.py`, which runs on every chip, and beside it `hopper.py`, if there are kernels for Hopper."""
    file = _File(loaded)
    plan, name = file.plan, loaded.spec.name
    offers = [f"{name}_kernels"]
    if plan.block_mask is not None:
        offers.append(f"{name}_block_mask")
    if plan.backward and plan.spec.targets.cuda is not None:
        offers.append("use_delta")
    if file.shares:
        offers += [f"{name}_begin", f"{name}_end"]
    whole = Source(
        "triton.py",
        file.whole(single=False),
        rank=1,
        launches=True,
        alone=file.whole(single=True),
        offers=tuple(offers),
        signature=file.launcher.signature,
        docstring=file.launcher.docstring(),
        remarks=tuple(_not_on_hopper(plan.spec, without_kernels(file.on_hopper))),
    )
    if file.hopper is None:
        return [whole]
    beside = file_of(file.hopper, file.hopper_parts, file.free, opening(plan.spec), file.waits)
    return [whole, Source("hopper.py", beside, arch="sm_90a")]


def _not_on_hopper(spec: AttentionSpec, missing: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each reason why passes have no kernels for Hopper."""
    asked = {name: missing[name] for name in spec.passes if name in missing}
    for reason in dict.fromkeys(asked.values()):
        passes = " and ".join(name for name, why in asked.items() if why == reason)
        yield f"no kernels for Hopper in {passes}: {reason}"


class _File:
    """Makes what the templates of one spec print."""

    def __init__(self, loaded: Loaded) -> None:
        free = without_promises(loaded)
        self.decode = plan_decode(loaded) if decodes(loaded) else None
        self.plan = plan = plan_attention(loaded)
        # TMA ends with the tensor, whatever its length is.
        self.on_hopper = plan if free.spec == loaded.spec else plan_attention(free)
        self.lowering, self.interface = Lowering(plan), Interface(plan)
        self.free = self.lowering if self.on_hopper is plan else Lowering(self.on_hopper)
        self.at = placement(plan.spec.varlen, plan.grouped, plan.spec.head_dim.v, self.interface.kv_sizes())
        self.kernels = portable_kernels(self.lowering, self.at, self.decode, plan_hopper(self.on_hopper))
        self.hopper = self._hopper()
        fused = self.hopper is not None and self.hopper.fused is not None
        self.shares = plan.spec.backward_in_parts and fused
        self.helpers = self.kernels.helpers | (self.free.helpers if self.hopper is not None else set())
        launches = launches_of(self.kernels, self.at)
        self.launcher = Launcher(self.interface, self.at, self.kernels, launches, self.shares)
        self.hopper_parts = parts_of(self.hopper, self.free, self._call()) if self.hopper is not None else []
        follows = self.hopper is not None and self.hopper.dkdv is not None
        waits = follows or (self.hopper is not None and self.hopper.dynamic)
        self.begins = ["gdc_launch_dependents"] if follows else []
        """The functions that let a kernel begin beside the end of a portable one."""
        self.waits = [*self.begins, *(["gdc_wait"] if waits else [])]
        """The same, and what it waits by."""

    def whole(self, single: bool) -> AttentionFile:
        """`triton.py`; `single` for one that does without others."""
        return AttentionFile(
            opening=self._opening(single),
            hopper=self.hopper is not None,
            prelude=self._prelude(),
            kernels=self.kernels.emitted,
            launcher=self.launcher.parts(_chip(self.hopper, single), self._which(), launching_of(single)),
            gluon_names=names_of(self.hopper) if self.hopper is not None and single else None,
            hopper_parts=self.hopper_parts if single else [],
        )

    def _opening(self, single: bool) -> Opening:
        plan, spec, hopper = self.plan, self.plan.spec, self.hopper is not None
        named = plan.block_mask is not None or (hopper if single else self.shares)
        modules = ["math", *(["functools"] if hopper or self.decode is not None else [])]
        return Opening(
            name=spec.name,
            summary=opening(spec),
            formula=formula_of(spec),
            at=self.at,
            width_qk=spec.head_dim.qk,
            width_v=spec.head_dim.v,
            kv_shapes=self.interface.kv_shapes(),
            dtype=spec.dtype,
            tensors=["q", "k", "v", *self.launcher.packed],
            usage_args=[f"{name}={name}" for name in self.interface.required()],
            by_tma=self.kernels.many_queries,
            modules=modules_of(launching_of(single), *modules, *(["warnings"] if hopper else [])),
            launching=launching_of(single),
            typing=[*(["NamedTuple"] if named else []), *(["Optional"] if plan.backward else [])],
            gdc=self.waits if single else self.begins,
        )

    def _prelude(self) -> Prelude:
        params = self.plan.spec.params
        constants = [n for n in params if n in self.lowering.constants]
        return Prelude(
            at=self.at,
            block_size=BLOCK_SIZE if self.plan.block_mask is not None else None,
            constants=[Constant(n.upper(), repr(params[n].value)) for n in constants],
            tile_tables=tile_tables(self.plan, self.decode),
            many_queries=self.kernels.many_queries or self.hopper is not None,
            tf32=self.lowering.tf32,
            helpers=in_order(self.helpers),
        )

    def _which(self) -> WhichKernels:
        """The function that says which kernels a call takes, by the tensors that it depends on."""
        asked = {name: name for name in ("q", "k", "v")}
        for stream in self.hopper.streams if self.hopper is not None else ():
            name = self.plan.called.get(stream.buffer, stream.buffer)
            asked[name] = name + stream.tensor.removeprefix(stream.buffer)
        quoted = ", ".join(f'"{name}"' for name in asked)
        return WhichKernels(
            name=self.plan.spec.name,
            asked=list(asked),
            by_name=f"zip(({quoted}), ({', '.join(asked.values())}))",
            passes=_passes(without_kernels(self.on_hopper), self.decode, self.plan.backward),
            decodes=self.decode is not None,
            hopper=self.hopper is not None,
        )

    # --- kernels for Hopper --------------------------------------------------------------------------------------

    def _hopper(self) -> Kernels | None:
        """The kernels for Hopper, if there are any."""
        at, forward = self.at, self.kernels.forward
        free = self.free is not self.lowering
        kernels = portable_kernels(self.free, at, None, None) if free else self.kernels
        around = Surroundings(
            kv_heads=at.kv_heads,
            problem_params=forward.params.problem_params,
            no_specialize=forward.no_specialize,
            vectors=at.of.rows,
            strides_o=forward.params.stride_params[-1],
            sink_load=sink_load(),
            dead_rows=dead_rows(self.plan.spec.sinks),
        )
        return hopper_kernels(self.on_hopper, self.free, portable_of(kernels.loops), around)

    def _call(self) -> Call:
        """How the launcher has a call."""
        return Call(
            inputs=", ".join(self.launcher.op.names),
            problem_args=", ".join(self.kernels.forward.params.problem_args),
            sizes=self.at.sizes,
            shape_of_lse=self.at.of.shape.lse,
            group=self.at.of.group,
            shares=self.shares,
        )


def _chip(hopper: Kernels | None, single: bool) -> ChipKernels:
    """The kernels for Hopper, as the launcher calls them."""
    if hopper is None:
        return ChipKernels()
    return ChipKernels(
        forward=hopper.forward is not None,
        dq=hopper.dq is not None,
        backward=hopper.dkdv is not None,
        fused=hopper.fused is not None,
        dynamic=hopper.dynamic,
        streamed=tuple(hopper.streamed),
        operands=tuple(hopper.backward.operands),
        beside="" if single else "_hopper().",
    )


def _passes(missing: Mapping[str, str], decode: DecodePlan | None, backward: bool) -> list[tuple[str, str]]:
    """Which kernels each pass takes; `missing` says why one has none for Hopper."""
    passes = {
        name: f'"portable: no kernels for Hopper: {missing[name]}"' if name in missing else "kernels"
        for name in ("forward", "backward")
    }
    if decode is not None:
        few, many = f"q.shape[2] <= {MOST_QUERIES}", passes["forward"]
        if decode.alone:
            few += " or why"
        forward = f'"decode" if {few} else {many}'
        passes["forward"] = '"decode"' if decode.alone and many != "kernels" else forward
    if not backward:
        del passes["backward"]
    return [*passes.items()]
