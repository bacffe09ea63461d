"""The forward kernel for Hopper: what `_forward_hopper.j2` names, from the fields of the kernel for every chip.

It is written in Gluon, which has Triton's functions under its own name; whatever has positions gets its layout from the
index vectors that the template makes.
"""

from __future__ import annotations

import re
from typing import Any

from kgen.plan.hopper import WIDTH, HopperTile
from kgen.targets.triton.kernels import KernelFields
from kgen.targets.triton.text import wrapped


def hopper_fields(
    tile: HopperTile, kernels: KernelFields, forward: dict[str, Any], sinks: dict[str, Any]
) -> dict[str, Any]:
    """The names under `hopper`; `forward` and `sinks` are those of the kernel for every chip."""
    (span,) = forward["spans"]
    plain = next((part for part in span["loops"] if not part["masked"]), None)
    ends = span["loops"][0] if "gap" in span["loops"][0] else span["loops"][-1]
    lo, hi = span["loops"][0]["lo"], ends["hi"]
    full_lo, full_hi = (plain["lo"], plain["hi"]) if plain else ("", "")
    prologue = [line for line in forward["prologue"] if not line.startswith("offs_n = ")]
    bounds = _needed([*prologue, *forward["searches"], *span["bounds"]], [lo, hi, full_lo, full_hi])
    mask_lines = forward["mask_lines"]
    mask = next((line for line in mask_lines if line.startswith("mask = ")), "")
    problem = list(kernels.problem)
    made = [line.partition(" = ")[0] for line in prologue]
    body = "\n".join([*mask_lines, *forward["score_lines"], forward["scaled"]])
    used = set(re.findall(r"\w+", body))
    passed = [n for n in dict.fromkeys(["b", "h", "q_idx", "q_start", *made, *problem]) if n in used]
    fields: dict[str, Any] = {
        "lo": lo,
        "length": _less(hi, lo),
        "has_full": plain is not None,
        "head": "" if full_lo == lo else _less(full_lo, lo),
        "full_length": _less(full_hi, full_lo),
        "bounds": bounds,
        "searches": any("_first_at_least(" in line for line in bounds),
        "prologue": prologue,
        "offs_n": any(re.search(r"\boffs_n\b", line) for line in prologue),
        "masked": forward["masked"],
        "mask_lines": [line for line in mask_lines if line != mask],
        "mask": mask,
        "score_lines": forward["score_lines"],
        "logits": forward["logits"],
        "scaled": forward["scaled"],
        "row_rest": forward["row_rest"],
        "sink": forward["sink"],
        "sink_load": sinks["load"],
    }
    spelled: dict[str, Any] = _in_gluon(fields)
    return spelled | {
        "width": WIDTH,
        "tile_params": wrapped([*passed, *["SQ"] * (not passed)], 4),
        "tile_args": wrapped([*passed, *["SQ"] * (not passed)], 12),
        "problem_params": wrapped([f"{n}{': tl.constexpr' if n == 'GQA' else ''}" for n in problem], 4),
        "problem_args": wrapped(problem, 16),
        "sink_args": "sinks_ptr, stride_sinks," if sinks["there"] else "",
        "dynamic": tile.dynamic,
        "counter_param": "counter_ptr," if tile.dynamic else "",
        "counter_arg": "q.new_zeros(1, dtype=torch.int32), " if tile.dynamic else "",
        "group": 4,
        "BLOCK_N": tile.BLOCK_N,
        "SLOTS": tile.SLOTS,
        "consumer_registers": tile.consumer_registers,
        "producer_registers": tile.producer_registers,
    }


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
