"""The range of a loop of a kernel for Hopper, and what a tile of it computes, from the fields of the kernels for every
chip."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kgen.kernels.attention.plan.hopper import HALF
from kgen.targets.triton.text import wrapped

Fields = dict[str, Any]


@dataclass(frozen=True)
class Own:
    """The range `[own_lo, own_hi)` of half a tile, and what of it needs no mask, `[own_full_lo, own_full_hi)`: whether
    they may begin, or end, at other tiles than the whole's."""

    lines: list[str]
    ahead: bool
    past: bool
    full_ahead: bool
    full_past: bool


def own_range(fields: Fields, before: list[str], there: list[str], inner: str, block: int) -> Own:
    """What of a half's range is worth computing: nothing that is searched for, or where a tile is longer than it."""
    outer, rows, size = ("q", "OWN_M", "SQ") if inner == "kv" else ("kv", "OWN_N", "SK")
    moves = {f"{outer}_start", f"{outer}_last"}
    (span,) = fields["spans"]
    lines: list[str] = []

    def own(end: str) -> bool:
        needed = lines_needed([*before, *span["bounds"]], [f"{inner}_{end}"])
        words = set(re.findall(r"\w+", "\n".join(needed)))
        searched = words & {"_first_at_least", "_first_key_hopper"}
        if not words & moves or searched or block > HALF:
            return False
        lines.extend(line for line in needed if line not in there and line not in lines)
        return True

    ahead, past = own("lo"), own("hi")
    masked = inner == "kv" and any(not part["masked"] for part in span["loops"])
    full_ahead, full_past = masked and own("full_lo"), masked and own("full_hi")
    if any(re.search(rf"\b{outer}_last\b", line) for line in lines):
        lines.insert(0, f"{outer}_last = tl.minimum({outer}_start + {rows}, {size}) - 1")
    lines = [re.sub(rf"\b{inner}_((full_)?(lo|hi))\b", r"own_\1", line) for line in lines]
    return Own(lines, ahead, past, full_ahead, full_past)


@dataclass(frozen=True)
class LinearBias:
    """A bias of a row's logits: slope * (distance + column), added to the scores times scale."""

    slope: str
    distance: str
    scale: str


def linear_bias(fields: Fields) -> LinearBias | None:
    """The bias of a loop that adds nothing else, if it grows by the same from key to key."""
    columns = [m for line in fields["prologue"] if (m := re.fullmatch(r"(\w+) = (\w+) \* offs_n", line))]
    if len(columns) != 1 or len(fields["score_lines"]) != 2:
        return None
    column, slope = columns[0][1], columns[0][2]
    whole = re.fullmatch(rf"(\w+) = {column} \+ {slope} \* (\(.+\)|\w+)", fields["score_lines"][0])
    added = whole and re.fullmatch(rf"s = qk \* (\w+) \+ {whole[1]}\[None, :\]", fields["score_lines"][1])
    return LinearBias(slope, whole[2], added[1]) if whole and added else None


def tile_loop(fields: Fields, before: list[str], own: list[str], problem: list[str]) -> Fields:
    """The range of a loop with one span, and what a tile computes; `own` and `before` is what it may be told."""
    (span,) = fields["spans"]
    if fields["listed"]:
        return _listed_loop(fields, span, before, own, problem)
    plain = next((part for part in span["loops"] if not part["masked"]), None)
    ends = span["loops"][0] if "gap" in span["loops"][0] else span["loops"][-1]
    lo, hi = span["loops"][0]["lo"], ends["hi"]
    full_lo, full_hi = (plain["lo"], plain["hi"]) if plain else (lo, lo)
    bounds = lines_needed([*before, *span["bounds"]], [lo, hi, full_lo, full_hi])
    return _tile(fields, before, own, problem) | {
        "lo": lo,
        "length": _less(hi, lo),
        "has_full": plain is not None,
        "head": "" if full_lo == lo or "from_first_key" in fields else _less(full_lo, lo),
        "full_length": _less(full_hi, full_lo),
        "bounds": bounds,
        "searches": any("_first_at_least(" in line for line in bounds),
    }


def _listed_loop(
    fields: Fields, span: Fields, before: list[str], own: list[str], problem: list[str]
) -> Fields:
    """As `tile_loop`, over what a block mask lists: blocks with the mask come first."""
    *counts, blocks = span["bounds"]
    return _tile(fields, before, own, problem) | {
        "lo": "row",
        "length": "(n_partial + n_full) * BLOCK_SIZE",
        "has_full": True,
        "head": "",
        "full_length": "n_full * BLOCK_SIZE",
        "bounds": counts,
        "blocks": blocks,
        "searches": False,
    }


def _tile(fields: Fields, before: list[str], own: list[str], problem: list[str]) -> Fields:
    """What a tile computes, and what it is told."""
    # In the kernel of dk and dv the log-sum-exp belongs to what streams.
    body = tile_lines(fields) + fields["lse_lines"] * ("kv_idx" in own)
    passed = passed_names(body, [*own, *before], problem)
    return {
        "documents": fields.get("documents"),
        "from_first_key": fields.get("from_first_key"),
        "masked": fields["masked"],
        "dead_rows": fields.get("dead_rows"),
        "mask_lines": fields["mask_lines"],
        "score_lines": fields["score_lines"],
        "logits": fields["logits"],
        "scaled": fields["scaled"],
        "lse_lines": fields["lse_lines"],
        **_factor(fields),
        **{name: fields.get(name, []) for name in ("products", "masked_late", "sums")},
        "dqk_scale": fields.get("dqk_scale", ""),
        "tile_params": wrapped(passed, 4),
        "tile_args": wrapped(passed, 12),
    }


def _factor(fields: Fields) -> Fields:
    """How dS follows from dP: what multiplies it is there before, unless gradients of buffers want the parts of dS."""
    lines, dqk = fields.get("gradient_lines", []), fields.get("dqk", "")
    if dqk == "ds" or fields.get("accumulators"):
        return {"factor": "p", "factor_lines": [], "gradient_lines": lines, "dqk": dqk}
    of_p = [re.sub(r"\bds\b", "p", re.sub(rf"\b{dqk}\b", "factor", line)) for line in lines]
    return {"factor": "factor", "factor_lines": of_p, "gradient_lines": [], "dqk": "ds"}


def passed_names(body: list[str], before: list[str], problem: list[str]) -> list[str]:
    """Which names of the function outside, or left of `=` in its lines, the lines of `body` use."""
    used = set(re.findall(r"\w+", "\n".join(body)))
    made = [line.partition(" = ")[0] for line in before]
    return [n for n in dict.fromkeys([*made, *problem]) if n in used] or ["SQ"]


def tile_lines(fields: Fields) -> list[str]:
    """What a tile computes with names from outside."""
    lines = [*fields["mask_lines"], *fields["score_lines"], *fields.get("gradient_lines", [])]
    return [*lines, *fields.get("documents", {}).values(), fields["scaled"]]


def _less(a: str, b: str) -> str:
    return a if b == "0" else f"{a} - {b}"


def lines_needed(lines: list[str], by: list[str]) -> list[str]:
    """The lines whose names others use, directly or not."""
    used = set(re.findall(r"\w+", "\n".join(by)))
    found: list[str] = []
    for line in reversed(lines):
        if used & set(re.findall(r"\w+", line.partition(" = ")[0])):
            used |= set(re.findall(r"\w+", line))
            found.insert(0, line)
    return found
