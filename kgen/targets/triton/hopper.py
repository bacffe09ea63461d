"""The kernels for Hopper: what `_forward_hopper.j2` and `_backward_hopper.j2` name, from the fields of the kernels for
every chip.

They are written in Gluon, which has Triton's functions under its own name; whatever has positions gets its layout from
the index vectors that the templates make.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from kgen.plan.attention import AttentionPlan
from kgen.plan.hopper import HALF, WIDTH, plan_hopper
from kgen.targets.triton.kernels import KernelFields
from kgen.targets.triton.placement import in_items
from kgen.targets.triton.text import wrapped

Fields = dict[str, Any]


def hopper_fields(plan: AttentionPlan, kernels: KernelFields, context: Mapping[str, Any]) -> Fields | None:
    """The names under `hopper`, from those of the kernels for every chip in `context`; None without such a kernel."""
    hopper = plan_hopper(plan)
    if hopper is None:
        return None
    problem, sinks, programs = list(kernels.problem), context["sinks"], context["programs"]
    # Lengths of packed sequences are told with each item of work.
    known = [*problem, *("SQ", "SK") * kernels.packed]
    loops = {"forward": _of_queries(context["forward"], known)}
    if hopper.dq is not None:
        loops |= {"dq": _of_queries(context["dq"], known), "dkdv": _of_keys(context["dkdv"], known)}
    return {
        **{name: _in_gluon(fields) | {"tile": getattr(hopper, name)} for name, fields in loops.items()},
        "sink_load": _in_gluon(sinks["load"]),
        **in_items(kernels.packed),
        "vectors": _in_gluon(context["rows"]),
        "programs": {
            "forward": programs["q"].replace('tile["BLOCK_M"]', "BLOCK_M"),
            "dq": programs["q"].replace('tile["BLOCK_M"]', str(2 * HALF)),
            "dkdv": programs["kv"].replace('tile["BLOCK_N"]', str(2 * HALF)),
        },
        "width": WIDTH,
        "half": HALF,
        "problem_params": wrapped([f"{n}{': tl.constexpr' if n == 'GQA' else ''}" for n in problem], 4),
        "problem_args": wrapped(problem, 16),
        "sink_args": "sinks_ptr, stride_sinks," if sinks["there"] else "",
        "searches": any(fields["searches"] for fields in loops.values()),
        # Tiles of one length need no counter.
        "dynamic": hopper.dynamic,
        "counter_param": "counter_ptr," if hopper.dynamic else "",
        "counter_arg": "q.new_zeros(1, dtype=torch.int32), " if hopper.dynamic else "",
    }


def _of_queries(fields: Fields, problem: list[str]) -> Fields:
    """A kernel whose tiles are queries: forward, and dq."""
    before = [line for line in fields["prologue"] if not line.startswith("offs_n = ")]
    loop = _loop(fields, [*before, *fields["searches"]], ["b", "h", "q_idx", "q_start"], problem)
    after = [fields["row_rest"], fields["sink"], *fields["lse_lines"], fields["vector_load"]]
    prologue = _needed(before, [*_body(fields), *after, fields.get("dqk_scale", "")])
    return loop | {
        "prologue": prologue,
        "offs_n": any(re.search(r"\boffs_n\b", line) for line in prologue),
        **{name: fields[name] for name in ("row_rest", "sink", "vector_load")},
    }


def _of_keys(fields: Fields, problem: list[str]) -> Fields:
    """The kernel whose tiles are keys, of dk and dv; its loop over query heads has a prologue of its own."""
    shared, by_head = fields["shared_prologue"], fields["prologue"]
    loop = _loop(fields, [*shared, *by_head], ["b", "h", "kv_idx"], problem)
    needed = _needed([*shared, *by_head], [*_body(fields), *fields["lse_lines"], fields["dqk_scale"]])
    return loop | {
        "tile_args": textwrap.indent(loop["tile_args"], " " * 4),
        "shared_prologue": [line for line in needed if line in shared],
        "prologue": [line for line in needed if line in by_head],
    }


def _loop(fields: Fields, before: list[str], own: list[str], problem: list[str]) -> Fields:
    """The range of a loop with one span, and what a tile computes; `own` and `before` is what it may be told."""
    (span,) = fields["spans"]
    plain = next((part for part in span["loops"] if not part["masked"]), None)
    ends = span["loops"][0] if "gap" in span["loops"][0] else span["loops"][-1]
    lo, hi = span["loops"][0]["lo"], ends["hi"]
    full_lo, full_hi = (plain["lo"], plain["hi"]) if plain else ("", "")
    bounds = _needed([*before, *span["bounds"]], [lo, hi, full_lo, full_hi])
    mask_lines = fields["mask_lines"]
    mask = next((line for line in mask_lines if line.startswith("mask = ")), "")
    made = [line.partition(" = ")[0] for line in before]
    # In the kernel of dk and dv the log-sum-exp belongs to what streams.
    body = _body(fields) + fields["lse_lines"] * ("kv_idx" in own)
    used = set(re.findall(r"\w+", "\n".join(body)))
    passed = [n for n in dict.fromkeys([*own, *made, *problem]) if n in used] or ["SQ"]
    return {
        "lo": lo,
        "length": _less(hi, lo),
        "has_full": plain is not None,
        "head": "" if full_lo == lo else _less(full_lo, lo),
        "full_length": _less(full_hi, full_lo),
        "bounds": bounds,
        "searches": any("_first_at_least(" in line for line in bounds),
        "masked": fields["masked"],
        "mask_lines": [line for line in mask_lines if line != mask],
        "mask": mask,
        "score_lines": fields["score_lines"],
        "logits": fields["logits"],
        "scaled": fields["scaled"],
        "lse_lines": fields["lse_lines"],
        "gradient_lines": fields.get("gradient_lines", []),
        "dqk": fields.get("dqk", ""),
        "dqk_scale": fields.get("dqk_scale", ""),
        "tile_params": wrapped(passed, 4),
        "tile_args": wrapped(passed, 12),
    }


def _body(fields: Fields) -> list[str]:
    """What a tile computes with names from outside."""
    lines = [*fields["mask_lines"], *fields["score_lines"], *fields.get("gradient_lines", [])]
    return [*lines, fields["scaled"]]


def _less(a: str, b: str) -> str:
    return a if b == "0" else f"{a} - {b}"


def _needed(lines: list[str], by: list[str]) -> list[str]:
    """The lines whose names others use, directly or not."""
    used = set(re.findall(r"\w+", "\n".join(by)))
    found: list[str] = []
    for line in reversed(lines):
        if used & set(re.findall(r"\w+", line.partition(" = ")[0])):
            used |= set(re.findall(r"\w+", line))
            found.insert(0, line)
    return found


def _in_gluon(value: Any) -> Any:
    """Text that Triton would compile, as Gluon has it."""
    if isinstance(value, str):
        return re.sub(r"\btl\.", "gl.", value).replace("_first_at_least(", "_first_at_least_hopper(")
    if isinstance(value, list):
        return [_in_gluon(v) for v in value]
    return {k: _in_gluon(v) for k, v in value.items()} if isinstance(value, dict) else value
