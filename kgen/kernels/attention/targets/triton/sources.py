"""The Triton target of attention: a plan becomes the names that `templates/attention/triton/attention.j2` uses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kgen.expr.functions import in_order
from kgen.kernels.attention.plan.decode import MOST_QUERIES, DecodePlan, DecodeTile, decodes, plan_decode
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.plan.tuned import Tile
from kgen.kernels.attention.schedules.hopper.conditions import without_kernels
from kgen.kernels.attention.schedules.hopper.kernels import Kernels
from kgen.kernels.attention.schedules.hopper.lowering import hopper_kernels
from kgen.kernels.attention.schedules.hopper.portable import call_of, placement_of, portable_of
from kgen.kernels.attention.schedules.hopper.templates import file_of, names_of, parts_of
from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.block_mask import block_mask_fields
from kgen.kernels.attention.targets.triton.decode import decode_fields
from kgen.kernels.attention.targets.triton.exact import exact_fields
from kgen.kernels.attention.targets.triton.kernels import KernelFields, accumulators
from kgen.kernels.attention.targets.triton.launcher import LauncherFields
from kgen.kernels.attention.targets.triton.loads import block_of, columns_of, load_of
from kgen.kernels.attention.targets.triton.placement import placement
from kgen.kernels.attention.targets.triton.recomputed import diagonal_fields, pair_fields
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.code import as_type, load, op, printed, row
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
    on_hopper = plan if free.spec == loaded.spec else plan_attention(free)
    context = _context(plan, on_hopper, decode)
    hopper: Kernels | None = context["hopper"]
    launches, waits = _overlaps(context)
    apart = context | {"single": False, "beside": "_hopper().", "gdc": launches}
    rings = ["NamedTuple"] * (hopper is not None or bool(context["block_mask"]))
    typing = ", ".join([*rings, *["Optional"] * plan.backward])
    alone = {"single": True, "beside": "", "gdc": waits, "typing": typing}
    offers = [f"{plan.spec.name}_kernels", *[f"{plan.spec.name}_block_mask"] * (plan.block_mask is not None)]
    offers += ["use_delta"] * bool(context["backward"] and context["outside_delta"])
    offers += [f"{plan.spec.name}_begin", f"{plan.spec.name}_end"] * bool(context["shares"])
    remarks = tuple(_not_on_hopper(plan.spec, without_kernels(on_hopper)))
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
    if hopper is not None:
        beside = file_of(hopper, context["hopper_parts"], context["of_hopper"], context["summary"], waits)
        files.append(Source("hopper.py", beside, arch="sm_90a"))
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
    return [], ["gdc_wait"] * (context["hopper"] is not None and context["hopper"].dynamic)


def _context(plan: AttentionPlan, on_hopper: AttentionPlan, decode: DecodePlan | None) -> dict[str, Any]:
    """Every name of the template, from the plan of the portable kernels and of those for Hopper."""
    spec, kernels, sinks = plan.spec, KernelFields(plan), _sinks(plan.spec)
    launcher = LauncherFields(plan)
    context: dict[str, object] = {
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
        "grouped": plan.grouped,
        "kv_head": kernels.kv_head,
        "kv_head_of_query": "h // GQA" if plan.grouped else "h",
        "kv_heads": "HKV" if plan.grouped else "HQ",
        "gqa_words": "a multiple of"
        if spec.gqa == "any"
        else "equal to"
        if spec.gqa == 1
        else f"{spec.gqa} times",
        "constants": [
            {"name": n.upper(), "value": repr(spec.params[n].value)}
            for n in spec.params
            if n in kernels.constants
        ],
        "dot": "_tf32_dot" if kernels.tf32 else "tl.dot",
        "precision": [f'input_precision="{spec.precision}"']
        if spec.dtype == "fp32" and not kernels.tf32
        else [],
        "qk_chunks": [block_of(c, "qk") for c in plan.qk_chunks],
        "v_chunks": [block_of(c, "dp") for c in plan.v_chunks],
        "columns": {
            "both": columns_of([*plan.qk_chunks, *plan.v_chunks]),
            "v": columns_of(plan.v_chunks),
        },
        # As rounded as in dP = dO @ V^T, from which delta is subtracted.
        "delta_do": "_tf32(do)" if kernels.tf32 else "do.to(tl.float32)",
        "delta_loads": [load_of(c, op("({0})[:, None]", row("lt", "q_idx", "SQ"))) for c in plan.v_chunks],
        "problem_params": [f"{p}{t}" for p, t in kernels.problem.items()],
        "no_specialize": f"do_not_specialize={json.dumps([*kernels.sizes, *kernels.open_sizes, *kernels.runtime])}",
        **placement(spec.varlen, plan.grouped, spec.head_dim.v, launcher.kv_sizes()),
        "sinks": sinks,
        "exact": exact_fields(plan.exact),
        "tile_tables": _tile_tables(plan, decode),
        "forward_kernel": decode is None or not decode.alone,
        "narrow_values": _narrow_values(plan),
        "decode_always": decode is not None and decode.alone,
        "decode_few": decode is not None and not decode.alone,
        "decode": False,
    }
    loops = _loops(plan, kernels)
    context |= printed(loops)
    free = kernels if on_hopper is plan else KernelFields(on_hopper)
    of_hopper = loops if free is kernels else _loops(on_hopper, free)
    fields = context | of_hopper
    hopper = hopper_kernels(on_hopper, free, portable_of(fields), placement_of(fields))
    shares = spec.backward_in_parts and hopper is not None and hopper.fused is not None
    context |= {
        "hopper": hopper,
        "hopper_forward": hopper is not None and hopper.forward is not None,
        "hopper_dq": hopper is not None and hopper.dq is not None,
        "hopper_backward": hopper is not None and hopper.dkdv is not None,
        "shares": shares,
        "of_gradients": "_gradients" if shares else "_backward_op",
        "typing": ", ".join(
            ["NamedTuple"] * (shares or plan.block_mask is not None) + ["Optional"] * plan.backward
        ),
        "delta_before": _before(hopper),
        "multiprocessors": hopper is not None or decode is not None,
        "many_queries": context["forward_kernel"] or hopper is not None,
    }
    context["block_mask"] = plan.block_mask and block_mask_fields(plan.block_mask, kernels, launcher)
    helpers = kernels.helpers | (free.helpers if hopper is not None else set())
    if decode is not None:
        packed = KernelFields(decode.attention)
        context["decode"] = printed(decode_fields(decode, packed))
        helpers = packed.helpers if not context["many_queries"] else helpers | packed.helpers
    context |= launcher.fields() | FIELDS
    context["decode_kernels"] = decode is not None
    context["asked"] = _asked(hopper, without_kernels(on_hopper), decode, plan)
    context["helpers"] = in_order(helpers)
    context["tf32"] = kernels.tf32
    if hopper is not None:
        context["of_hopper"] = free
        context["gluon_names"] = names_of(hopper)
    context["hopper_parts"] = parts_of(hopper, free, call_of(context)) if hopper is not None else []
    return context


def _loops(plan: AttentionPlan, kernels: KernelFields) -> dict[str, object]:
    forward = kernels.loop(plan.forward, ["m_i", "l_i", *(f"acc{c.tag}" for c in plan.v_chunks)])
    if plan.dq is None or plan.dkdv is None:
        return {"forward": forward}
    dq_state = [f"dq{c.tag}" for c in plan.qk_chunks]
    dkdv_state = [f"dk{c.tag}" for c in plan.qk_chunks] + [f"dv{c.tag}" for c in plan.v_chunks]
    return {
        "forward": forward,
        "dq": kernels.loop(plan.dq, dq_state + accumulators(plan.dq)),
        "dkdv": kernels.loop(plan.dkdv, dkdv_state + accumulators(plan.dkdv)),
        "pairs": [pair_fields(kernels, p) for p in plan.pairs],
        "diagonals": [diagonal_fields(kernels, p) for p in plan.diagonals],
    }


def _asked(
    hopper: Kernels | None,
    missing: Mapping[str, str],
    decode: DecodePlan | None,
    plan: AttentionPlan,
) -> dict[str, object]:
    """The tensors on which it depends which kernels a call takes, and what each pass takes."""
    asked = {name: name for name in ("q", "k", "v")}
    if hopper is not None:
        for stream in hopper.streams:
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


def _before(hopper: Kernels | None) -> dict[str, list[str] | bool]:
    """What the kernel of delta has where kernels for Hopper may follow: it tells them to begin, counters at zero."""
    follow = hopper is not None and hopper.dkdv is not None
    counted = hopper is not None and follow and hopper.dynamic
    return {
        "counts": counted,
        "params": ["BEFORE_HOPPER: tl.constexpr"] * follow,
        "args": ["BEFORE_HOPPER=on_hopper"] * follow,
        "counter_ptr": ["counter_ptr"] * counted,
        "counters": ["counters"] * counted,
    }


def _sinks(spec: AttentionSpec) -> dict[str, object]:
    """What a sink adds to the forward kernel and to delta's."""
    there = spec.sinks
    return {
        "there": there,
        "load": row(
            "mul", as_type(load(row("add", "sinks_ptr", row("mul", "h", "stride_sinks"))), "float32"), "LOG2E"
        ),
        "params": ["sinks_ptr", "stride_sinks"] if there else [],
        "args": ["sinks", "*sinks.stride()"] if there else [],
        "given": ["sinks"] * there,
        "shared": ["d_sinks.sum((0, 2))"] * there,
        "gradient_params": ["lse_ptr", "sinks_ptr", "stride_sinks", "d_sinks_ptr"] if there else [],
        "gradient_args": ["lse", "sinks", "*sinks.stride()", "d_sinks"] if there else [],
        "dead_rows": "A sink of -inf is none: rows that saw no key then have zeros and a log-sum-exp of -inf."
        if there
        else "Rows that saw no key: zeros, and a log-sum-exp of -inf.",
    }


def _narrow_values(plan: AttentionPlan) -> bool:
    """Whether heads of the values are one whole block of 16 or 32 columns, beside wider heads of the keys."""
    (first, *rest), keys = plan.v_chunks, plan.qk_chunks[0]
    return not rest and first.width == first.size < min(64, keys.size)


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
