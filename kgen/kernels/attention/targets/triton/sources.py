"""The Triton target of attention: a plan becomes the names that `templates/attention/triton/attention.j2` uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kgen.expr.functions import in_order
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.model import arguments, declared
from kgen.kernels.attention.lowered.params import SINKS
from kgen.kernels.attention.plan.decode import MOST_QUERIES, DecodePlan, DecodeTile, decodes, plan_decode
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.hopper import plan_hopper
from kgen.kernels.attention.plan.hopper_conditions import without_kernels
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.tuned import Tile
from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.block_mask import block_mask_fields
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.hopper import hopper_fields
from kgen.kernels.attention.targets.triton.kernels import KernelFields, fields_of
from kgen.kernels.attention.targets.triton.launcher import LauncherFields
from kgen.kernels.attention.targets.triton.launches import launches_of
from kgen.kernels.attention.targets.triton.placement import Placement, placement
from kgen.kernels.attention.targets.triton.portable import (
    PortableKernels,
    dead_rows,
    narrow_values,
    portable_kernels,
    sink_load,
)
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.template import Untyped
from kgen.targets.triton import tables
from kgen.targets.triton.text import TORCH_DTYPES
from kgen.targets.triton.tritons import FIELDS

TEMPLATE = "attention/triton/attention.j2"


def sources(loaded: Loaded) -> list[Source]:
    """`triton.py`, which runs on every chip, and beside it `hopper.py`, if there are kernels for Hopper."""
    decode = plan_decode(loaded) if decodes(loaded) else None
    plan, free = plan_attention(loaded), without_promises(loaded)
    # TMA ends with the tensor, whatever its length is.
    hopper = plan if free.spec == loaded.spec else plan_attention(free)
    context = _context(plan, hopper, decode)
    launches, waits = _overlaps(context)
    apart = context | {"single": False, "beside": "_hopper().", "gdc": launches}
    rings = ["NamedTuple"] * (context["hopper"] is not None or bool(context["block_mask"]))
    typing = ", ".join([*rings, *["Optional"] * plan.backward])
    alone = {"single": True, "beside": "", "gdc": waits, "typing": typing}
    offers = [f"{plan.spec.name}_kernels", *[f"{plan.spec.name}_block_mask"] * (plan.block_mask is not None)]
    offers += ["use_delta"] * bool(context["backward"] and context["outside_delta"])
    offers += [f"{plan.spec.name}_begin", f"{plan.spec.name}_end"] * bool(context["shares"])
    remarks = tuple(_not_on_hopper(plan.spec, without_kernels(hopper)))
    files = [
        Source(
            "triton.py",
            Untyped(TEMPLATE, apart),
            rank=1,
            alone=Untyped(TEMPLATE, context | alone),
            offers=tuple(offers),
            signature=context["signature"],
            docstring=Untyped("attention/triton/_docstring.j2", apart),
            remarks=remarks,
        )
    ]
    if context["hopper"] is not None:
        beside = apart | {"gdc": waits}
        files.append(Source("hopper.py", Untyped("attention/triton/hopper.j2", beside), arch="sm_90a"))
    return files


def _not_on_hopper(spec: AttentionSpec, missing: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each reason why passes have no kernels for Hopper."""
    asked = {name: missing[name] for name in spec.passes if name in missing}
    for reason in dict.fromkeys(asked.values()):
        passes = " and ".join(name for name, why in asked.items() if why == reason)
        yield f"no kernels for Hopper in {passes}: {reason}"


def _overlaps(context: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What lets a kernel begin beside the end of the one before it, as delta's kernel needs it and all of them do."""
    if context["hopper_backward"]:
        return ["gdc_launch_dependents"], ["gdc_launch_dependents", "gdc_wait"]
    return [], ["gdc_wait"] * (context["hopper"] is not None and context["hopper"]["dynamic"])


def _context(plan: AttentionPlan, on_hopper: AttentionPlan, decode: DecodePlan | None) -> dict[str, Any]:
    """Every name of the template, from the plan of the portable kernels and of those for Hopper."""
    spec, lowering, of_hopper = plan.spec, KernelFields(plan), plan_hopper(on_hopper)
    launcher = LauncherFields(lowering)
    at = placement(spec.varlen, plan.grouped, spec.head_dim.v, launcher.kv_sizes())
    kernels = portable_kernels(lowering, at, decode, of_hopper)
    context = _named(plan, lowering, launcher, at) | _beside(kernels)
    free = lowering if on_hopper is plan else KernelFields(on_hopper)
    loops = kernels.loops if free is lowering else portable_kernels(free, at, None, None).loops
    hopper = hopper_fields(on_hopper, free, context | {name: fields_of(loop) for name, loop in loops.items()})
    shares = spec.backward_in_parts and of_hopper is not None and of_hopper.fused is not None
    context |= {
        "kernels": kernels.emitted,
        "launches": launches_of(kernels, at),
        "tile_tables": _tile_tables(plan, decode),
        "forward_kernel": kernels.many_queries,
        "decode_always": decode is not None and decode.alone,
        "decode_few": decode is not None and not decode.alone,
        "decode_kernels": decode is not None,
        "most_queries": MOST_QUERIES,
        "hopper": hopper,
        "hopper_forward": of_hopper is not None and of_hopper.forward is not None,
        "hopper_dq": of_hopper is not None and of_hopper.dq is not None,
        "hopper_backward": of_hopper is not None and of_hopper.dkdv is not None,
        "shares": shares,
        "of_gradients": "_gradients" if shares else "_backward_op",
        "typing": ", ".join(
            ["NamedTuple"] * (shares or plan.block_mask is not None) + ["Optional"] * plan.backward
        ),
        "multiprocessors": hopper is not None or decode is not None,
        "many_queries": kernels.many_queries or hopper is not None,
        "block_mask": plan.block_mask and block_mask_fields(plan.block_mask, lowering, launcher),
        "asked": _asked(hopper, without_kernels(on_hopper), decode, plan),
        "helpers": in_order(kernels.helpers | (free.helpers if hopper is not None else set())),
        "tf32": lowering.tf32,
    }
    return context | launcher.fields() | FIELDS


def _named(
    plan: AttentionPlan, lowering: Lowering, launcher: LauncherFields, at: Placement
) -> dict[str, Any]:
    """What the file says of the spec, and what all kernels have in common."""
    spec = plan.spec
    of_gqa = {"any": "a multiple of", 1: "equal to"}
    return {
        "name": spec.name,
        "summary": opening(spec),
        "formula": _formula(spec),
        "dead_row": "zeros and its sink" if spec.sinks else "zeros and -inf",
        "head_dim": spec.head_dim,
        "dtype": spec.dtype,
        "torch_dtype": TORCH_DTYPES[spec.dtype],
        "usage_args": [f"{name}={name}" for name in launcher.required()],
        "backward": plan.backward,
        "outside_delta": spec.targets.cuda is not None,
        "bf16": spec.dtype == "bf16",
        "gqa_words": of_gqa.get(spec.gqa, f"{spec.gqa} times"),
        "constants": [
            {"name": n.upper(), "value": repr(spec.params[n].value)}
            for n in spec.params
            if n in lowering.constants
        ],
        "sinks": _sinks(spec),
        "exact": Exact(plan.exact),
        "narrow_values": narrow_values(plan),
        "grouped": at.grouped,
        "kv_head": at.kv_head,
        "kv_heads": at.kv_heads,
        "packed": at.packed,
        "rows": at.of.rows,
        "axes": at.of.axes,
        "shape": at.of.shape,
        "like": at.of.like,
        "group": at.of.group,
        "programs": at.programs,
        "sizes": at.sizes,
        "empty_out": at.empty_out,
    }


def _beside(kernels: PortableKernels) -> dict[str, Any]:
    """What the templates of kernels for Hopper have from the portable ones."""
    forward, dq = kernels.forward, kernels.dq
    return {
        "problem_params": forward.params.problem_params,
        "no_specialize": forward.no_specialize,
        "strides": {"o": forward.params.stride_params[-1]},
        "dq": dq and dq.kernel.gradients,
    }


def _asked(
    hopper: Mapping[str, Any] | None,
    missing: Mapping[str, str],
    decode: DecodePlan | None,
    plan: AttentionPlan,
) -> dict[str, object]:
    """The tensors on which it depends which kernels a call takes, and what each pass takes."""
    asked = {name: name for name in ("q", "k", "v")}
    if hopper is not None:
        for stream in hopper["streams"]:
            name = plan.called.get(stream.buffer, stream.buffer)
            asked[name] = name + stream.tensor.removeprefix(stream.buffer)
    quoted = ", ".join(f'"{name}"' for name in asked)
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
    if not plan.backward:
        del passes["backward"]
    return {
        "names": ", ".join(asked),
        "by_name": f"zip(({quoted}), ({', '.join(asked.values())}))",
        "passes": passes.items(),
    }


def _sinks(spec: AttentionSpec) -> dict[str, object]:
    """What sinks add to the kernels for Hopper, and to calls that share what they have in common."""
    there = spec.sinks
    return {
        "there": there,
        "load": sink_load(),
        "params": declared(SINKS) if there else [],
        "args": arguments(SINKS) if there else [],
        "given": ["sinks"] if there else [],
        "shared": ["d_sinks.sum((0, 2))"] if there else [],
        "dead_rows": dead_rows(there),
    }


def _tile_tables(plan: AttentionPlan, decode: DecodePlan | None) -> list[dict[str, Any]]:
    named: dict[str, Mapping[int, Sequence[Tile | DecodeTile]]] = {}
    if decode is None or not decode.alone:
        named["_FORWARD_TILES"] = plan.tiles.forward
    if decode is not None:
        named["_DECODE_TILES"] = {chip: [tile] for chip, tile in decode.tiles.items()}
    if plan.backward:
        named |= {"_DQ_TILES": plan.tiles.dq, "_DKDV_TILES": plan.tiles.dkdv}
    if plan.pairs:
        named["_PAIR_TILES"] = plan.tiles.pair
    if plan.diagonals:
        named["_DIAGONAL_TILES"] = plan.tiles.diagonal
    return [
        {
            "name": name,
            "rows": [{"chips": chips, "fields": _fields(name, tile)} for chips, tile in tables.rows(table)],
        }
        for name, table in named.items()
    ]


def _fields(table: str, tile: Tile | DecodeTile) -> str:
    """A tile as the arguments of a launch."""
    fields = asdict(tile)
    if table in ("_PAIR_TILES", "_DIAGONAL_TILES"):
        del fields["TMA"]
    if table == "_DIAGONAL_TILES":
        fields = {"BLOCK": fields.pop("BLOCK_M")} | fields
        del fields["BLOCK_N"]
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def _formula(spec: AttentionSpec) -> str:
    lines = []
    for label in ("score_mod", "mask_mod"):
        text = getattr(spec, label)
        if text is not None:
            first, *rest = (line.in_docstring() for line in text.lines())
            lines += [f"{label} = {first}", *(" " * (len(label) + 3) + line for line in rest)]
    if spec.sinks:
        lines.append("softmax: exp(sinks[h]) is one more term of each row's sum, without a value")
    return "\n".join(lines) or "score_mod = score"
