"""The Triton target of attention: a plan becomes what `templates/attention/triton/attention.j2` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kgen.expr.functions import in_order
from kgen.kernels.attention.lowered.model import arguments, declared
from kgen.kernels.attention.lowered.params import SINKS
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE
from kgen.kernels.attention.plan.decode import MOST_QUERIES, DecodePlan, decodes, plan_decode
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.hopper import HopperPlan, plan_hopper
from kgen.kernels.attention.plan.hopper_conditions import without_kernels
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.hopper import hopper_fields
from kgen.kernels.attention.targets.triton.interface import Interface
from kgen.kernels.attention.targets.triton.kernels import KernelFields, fields_of
from kgen.kernels.attention.targets.triton.launcher import ChipKernels, Launcher, WhichKernels
from kgen.kernels.attention.targets.triton.launches import launches_of
from kgen.kernels.attention.targets.triton.opening import Constant, Opening, Prelude, formula_of, tile_tables
from kgen.kernels.attention.targets.triton.placement import placement
from kgen.kernels.attention.targets.triton.portable import dead_rows, portable_kernels, sink_load
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.template import Untyped
from kgen.targets.triton.tritons import GLUON

TEMPLATE = "attention/triton/attention.j2"


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
        Untyped(TEMPLATE, file.names(single=False)),
        rank=1,
        alone=Untyped(TEMPLATE, file.names(single=True)),
        offers=tuple(offers),
        signature=file.launcher.signature,
        docstring=file.launcher.docstring(),
        remarks=tuple(_not_on_hopper(plan.spec, without_kernels(file.on_hopper))),
    )
    if file.hopper is None:
        return [whole]
    names = file.of_hopper() | {"gdc": file.waits}
    return [whole, Source("hopper.py", Untyped("attention/triton/hopper.j2", names), arch="sm_90a")]


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
        self.hopper = plan_hopper(self.on_hopper)
        self.lowering, self.interface = KernelFields(plan), Interface(plan)
        self.at = placement(plan.spec.varlen, plan.grouped, plan.spec.head_dim.v, self.interface.kv_sizes())
        self.kernels = portable_kernels(self.lowering, self.at, self.decode, self.hopper)
        fused = self.hopper is not None and self.hopper.fused is not None
        self.shares = plan.spec.backward_in_parts and fused
        launches = launches_of(self.kernels, self.at)
        self.launcher = Launcher(self.interface, self.at, self.kernels, launches, self.shares)
        self.fields, self.helpers = self._hopper_fields()
        follows = self.hopper is not None and self.hopper.dkdv is not None
        waits = follows or (self.hopper is not None and self.hopper.dynamic)
        self.begins = ["gdc_launch_dependents"] if follows else []
        """The functions that let a kernel begin beside the end of a portable one."""
        self.waits = [*self.begins, *(["gdc_wait"] if waits else [])]
        """The same, and what it waits by."""

    def names(self, single: bool) -> dict[str, Any]:
        """The names of the file's template; `single` for one that does without others."""
        chip = _chip(self.hopper, self.fields, single)
        return self.of_hopper() | {
            "single": single,
            "opening": self._opening(single),
            "prelude": self._prelude(),
            "kernels": self.kernels.emitted,
            "launcher": self.launcher.parts(chip, self._which()),
            "gluon_tritons": GLUON,
        }

    def _opening(self, single: bool) -> Opening:
        plan, spec, hopper = self.plan, self.plan.spec, self.hopper is not None
        named = plan.block_mask is not None or (hopper if single else self.shares)
        modules = [] if single else ["importlib.util"]
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
            backward=plan.backward,
            by_tma=self.kernels.many_queries,
            modules=[*modules, "warnings"] if hopper else [],
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
        for stream in self.fields["streams"] if self.fields is not None else ():
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

    def _hopper_fields(self) -> tuple[dict[str, Any] | None, frozenset[str]]:
        """The names of the kernels for Hopper in templates, and the functions that all kernels call."""
        lowering, on_hopper = self.lowering, self.on_hopper
        free = lowering if on_hopper is self.plan else KernelFields(on_hopper)
        kernels = self.kernels if free is lowering else portable_kernels(free, self.at, None, None)
        loops = {name: fields_of(loop) for name, loop in kernels.loops.items()}
        shared = {"sinks": _sinks(self.plan.spec), "rows": self.at.of.rows, "group": self.at.of.group}
        fields = hopper_fields(on_hopper, free, shared | loops)
        return fields, self.kernels.helpers | (free.helpers if fields is not None else set())

    def of_hopper(self) -> dict[str, Any]:
        """The names of templates of the kernels for Hopper."""
        forward, backward, hopper = self.kernels.forward, self.kernels.backward, self.hopper
        return {
            "summary": opening(self.plan.spec),
            "hopper": self.fields,
            "hopper_forward": hopper is not None and hopper.forward is not None,
            "hopper_backward": hopper is not None and hopper.dkdv is not None,
            "shares": self.shares,
            "sinks": _sinks(self.plan.spec),
            "grouped": self.at.grouped,
            "packed": self.at.packed,
            "kv_head": self.at.kv_head,
            "kv_heads": self.at.kv_heads,
            "shape": self.at.of.shape,
            "sizes": self.at.sizes,
            "group": self.at.of.group,
            "op_names": ", ".join(self.launcher.op.names),
            "problem_params": forward.params.problem_params,
            "problem_args": ", ".join(forward.params.problem_args),
            "no_specialize": forward.no_specialize,
            "strides": {"o": forward.params.stride_params[-1]},
            "dq": backward and backward.dq.kernel.gradients,
        }


def _chip(hopper: HopperPlan | None, fields: Mapping[str, Any] | None, single: bool) -> ChipKernels:
    """The kernels for Hopper, as the launcher calls them."""
    if hopper is None or fields is None:
        return ChipKernels()
    return ChipKernels(
        forward=hopper.forward is not None,
        dq=hopper.dq is not None,
        backward=hopper.dkdv is not None,
        fused=hopper.fused is not None,
        dynamic=hopper.dynamic,
        streamed=tuple(fields["streamed"]),
        operands=tuple(fields["backward"]["operands"]),
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


def _sinks(spec: AttentionSpec) -> dict[str, object]:
    """The names of sinks in templates of the kernels for Hopper."""
    there = spec.sinks
    return {
        "there": there,
        "load": sink_load(),
        "params": declared(SINKS) if there else [],
        "args": arguments(SINKS) if there else [],
        "dead_rows": dead_rows(there),
    }
