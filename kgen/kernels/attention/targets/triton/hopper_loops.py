"""The range of a loop of a kernel for Hopper, and what a tile of it computes, from the fields of the kernels for every
chip."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

from kgen.expr.nodes import FIRST_AT_LEAST
from kgen.expr.spelling import MUL
from kgen.kernels.attention.plan.hopper import HALF
from kgen.targets.code import (
    Assign,
    Code,
    Name,
    Op,
    Statement,
    assign,
    calls,
    codes,
    minimum,
    needed,
    op,
    over,
    renamed,
    rewritten,
    row,
    text,
    uses_of,
    walk,
    with_names,
)

Fields = dict[str, Any]
FIRST_KEY = "_first_key_hopper"


@dataclass(frozen=True)
class Own:
    """The range `[own_lo, own_hi)` of half a tile, and what of it needs no mask, `[own_full_lo, own_full_hi)`: whether
    they may begin, or end, at other tiles than the whole's."""

    lines: list[Statement]
    ahead: bool
    past: bool
    full_ahead: bool
    full_past: bool
    before: bool = False
    """A half without any may begin before the whole does: where there is nothing, a range begins at the end of the
    tensor, and one beside it may begin past that."""


NO_OWN = Own([], ahead=False, past=False, full_ahead=False, full_past=False)
"""That of who has whole tiles."""


def own_range(fields: Fields, before: list[Statement], there: list[Statement], inner: str, block: int) -> Own:
    """What of a half's range is worth computing: nothing that is searched for, or where a tile is longer than it. Nor
    what is read at its first position, which may lie past the last one."""
    outer, rows, size = ("q", "OWN_M", "SQ") if inner == "kv" else ("kv", "OWN_N", "SK")
    moves = {f"{outer}_start", f"{outer}_last"}
    (span,) = fields["spans"]
    lines: list[Statement] = []

    def own(end: str) -> bool:
        found = needed([*before, *span["bounds"]], [f"{inner}_{end}"])
        searched = any(calls(code, FIRST_AT_LEAST, FIRST_KEY) for code in codes(found))
        parts = (part for code in codes(found) for part in walk(code))
        loads = [part for part in parts if isinstance(part, Op) and part.fn == "load"]
        read = f"{outer}_start" in uses_of(loads)
        if not moves & uses_of(found) or searched or read or block > HALF:
            return False
        lines.extend(line for line in found if line not in there and line not in lines)
        return True

    ahead, past = own("lo"), own("hi")
    masked = inner == "kv" and any(not part["masked"] for part in span["loops"])
    full_ahead, full_past = masked and own("full_lo"), masked and own("full_hi")
    if f"{outer}_last" in uses_of(lines):
        last = row("sub", minimum(row("add", f"{outer}_start", rows), size), 1)
        lines.insert(0, assign(f"{outer}_last", last))
    ends = {f"{inner}_{end}": f"own_{end}" for end in ("lo", "hi", "full_lo", "full_hi")}
    choices = [
        part for code in codes(lines) for part in walk(code) if isinstance(part, Op) and part.fn == "where"
    ]
    empty = Name({"kv": "SK", "q": "SQ"}[inner])
    before_whole = ahead and any(empty in choice.args for choice in choices)
    return Own([with_names(line, ends) for line in lines], ahead, past, full_ahead, full_past, before_whole)


def tile_loop(fields: Fields, before: list[Statement], own: list[str], problem: list[str]) -> Fields:
    """The range of a loop with one span, and what a tile computes; `own` and `before` is what it may be told."""
    (span,) = fields["spans"]
    if fields["listed"]:
        return _listed_loop(fields, span, before, own, problem)
    plain = next((part for part in span["loops"] if not part["masked"]), None)
    ends = span["loops"][0] if "gap" in span["loops"][0] else span["loops"][-1]
    lo, hi = span["loops"][0]["lo"], ends["hi"]
    full_lo, full_hi = (plain["lo"], plain["hi"]) if plain else (lo, lo)
    bounds = needed([*before, *span["bounds"]], uses_of([lo, hi, full_lo, full_hi]))
    return _tile(fields, before, own, problem) | {
        "lo": lo,
        "length": _less(hi, lo),
        "has_full": plain is not None,
        "head": None if full_lo == lo or "from_first_key" in fields else _less(full_lo, lo),
        "full_length": _less(full_hi, full_lo),
        "full_end": _less(full_hi, lo),
        "bounds": bounds,
        "last": bool({"q_last", "kv_last"} & uses_of(bounds)),
        "blocks": [],
        "searches": any(calls(code, FIRST_AT_LEAST) for code in codes(bounds)),
    }


def _listed_loop(
    fields: Fields, span: Fields, before: list[Statement], own: list[str], problem: list[str]
) -> Fields:
    """As `tile_loop`, over what a block mask lists: blocks with the mask come first."""
    *counts, blocks = span["bounds"]
    return _tile(fields, before, own, problem) | {
        "lo": Name("row"),
        "length": "(n_partial + n_full) * BLOCK_SIZE",
        "has_full": True,
        "head": None,
        "full_length": text("n_full * BLOCK_SIZE"),
        "bounds": counts,
        "last": False,
        "blocks": [blocks],
        "searches": False,
    }


def _tile(fields: Fields, before: list[Statement], own: list[str], problem: list[str]) -> Fields:
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
        "passed": passed,
    }


def _factor(fields: Fields) -> Fields:
    """How dS follows from dP: what multiplies it is there before, unless gradients of buffers want the parts of dS."""
    lines, dqk = fields.get("gradient_lines", []), fields.get("dqk", "")
    if dqk == "ds" or fields.get("accumulators"):
        return {"factor": "p", "factor_lines": [], "gradient_lines": lines, "dqk": dqk}
    names = {"ds": "p", dqk: "factor"}
    of_p = [with_names(line, names) for line in lines]
    return {"factor": "factor", "factor_lines": of_p, "gradient_lines": [], "dqk": "ds"}


def passed_names(
    body: Iterable[Statement | Code | None], before: Iterable[Statement | str], problem: list[str]
) -> list[str]:
    """Which names of the function outside, given or made there by statements, `body` uses."""
    used = uses_of(body)
    made = [name for b in before for name in ([b] if isinstance(b, str) else b.names_in_order)]
    return [n for n in dict.fromkeys([*made, *problem]) if n in used] or ["SQ"]


def tile_lines(fields: Fields) -> list[Statement | Code | None]:
    """What a tile computes with names from outside."""
    lines = [*fields["mask_lines"], *fields["score_lines"], *fields.get("gradient_lines", [])]
    return [*lines, *fields.get("documents", {}).values(), fields["scaled"]]


def _less(a: Code, b: Code) -> Code:
    return a if b == text("0") else row("sub", a, b)


def from_zero(code: Code, lo: str = "kv_lo") -> Code:
    """A bound of a range that begins with the first position."""

    def change(part: Code) -> Code | None:
        match part:
            case Op(fn="sub", args=(end, Name(name=begin))) if begin == lo:
                return end
        return None

    return rewritten(code, change)


def of_half(line: Statement, x: str) -> Statement:
    """A line of a tile, as the half of one has it that may begin past the end: what it reads there is not stored."""
    if not any(calls(code, "load") for code in codes([line])):
        return line
    first = minimum(f"{x}_start", row("sub", f"S{x[0].upper()}", 1))
    return line.map(lambda code: renamed(code, {f"{x}_start": first}))


def head_of(used: Set[str], packed: bool) -> Statement:
    """The head of a consumer's item, and its batch, which finds the rows of tensors that are not packed."""
    batch, head = over("b_h", "HQ"), op("{0} % {1}", "b_h", "HQ", binds=MUL, operand=MUL)
    return assign("h", head) if packed and "b" not in used else Assign(("b", "h"), (batch, head))


def offsets(length: str, dim: int) -> list[Statement]:
    """Keys of a tile, in the layout of scores without a dimension."""
    form = f"gl.arange(0, {{0}}, layout=gl.SliceLayout({dim}, SCORES))"
    return [assign("offs_n", op(form, length, fn="arange"))]
