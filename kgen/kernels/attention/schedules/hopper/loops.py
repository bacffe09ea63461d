"""The range of a loop of a Hopper kernel, and the statements for one tile, built from the portable
kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from kgen.expr.spelling import MUL
from kgen.kernels.attention.lowered.model import Gradients, LoopKernel, SpanLoops
from kgen.kernels.attention.plan.ends import Ends
from kgen.kernels.attention.schedules.hopper.plan import HALF
from kgen.targets.code import (
    Assign,
    Code,
    If,
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
    with_names,
)

FIRST_KEY = "_first_key_hopper"
ZERO = text("0")
_ZERO_P = op("{tl}.where(mask, {0}, 0.0)", "p", fn="where")


@dataclass(frozen=True)
class DocumentEnds:
    """The names in a producer for the documents of the first and the last query of a tile."""

    first: str
    last: str


@dataclass(frozen=True)
class DocumentMask:
    """The part of a mask that compares documents, needed only if a tile of queries has several."""

    several: Code
    load: Statement
    same: Code


@dataclass(frozen=True)
class MaskLoad:
    """The reads of a mask for each key of a tile."""

    name: str
    dtype: Code
    """The type of the mask's elements in the kernel."""
    line: Statement

    @property
    def statements(self) -> list[Statement]:
        """The statements that read it if the tile has the mask."""
        zeros = op("gl.full([BLOCK_N], 0, {0}, layout=gl.SliceLayout(0, SCORES))", self.dtype)
        return [assign(self.name, zeros), If(Name("MASKED"), (self.line,))]


@dataclass(frozen=True)
class TileRange:
    """The range of inner tiles of a program's tile, as the producer computes it."""

    lo: Code
    length: Code
    bounds: list[Statement]
    """The statements that compute its ends."""
    has_full: bool
    """True if some tiles may need no mask."""
    full_length: Code
    """The length of the part that needs no mask."""
    full_end: Code
    """The end of the part without a mask, relative to the start of the range."""
    head: Code | None = None
    """The length of the range before the part without a mask; None if that part begins the
    range.
    """
    last: bool = False
    """True if the bounds use the last position of a program's tile."""
    blocks: list[Statement] = field(default_factory=list)
    """The statements that find the list of a block mask for a program's tile."""
    searches: bool = False
    """True if the producer searches for two keys."""
    listed: bool = False
    from_first_key: DocumentEnds | None = None
    """The names of a range that begins with the first key of a document."""

    def last_position(self, side: str, block: str, length: str) -> list[Statement]:
        """Return the statement that finds the last position of a program's tile, if the bounds use
        it.
        """
        end = minimum(row("add", f"{side}_start", block), length)
        return [assign(f"{side}_last", row("sub", end, 1))] if self.last else []

    def masked_at_start(self, block: str) -> list[Statement]:
        """Return the number of masked tiles at the start of the range, unless there are none."""
        if self.head is None:
            return []
        return [assign("n_first_masked", op("({0}) // {1}", self.head, block))]

    @property
    def from_start(self) -> bool:
        """True if the range begins with the first position."""
        return self.lo == ZERO


@dataclass(frozen=True)
class ConsumedTile:
    """The values that a consumer computes for one tile."""

    masked: bool
    mask_loads: list[MaskLoad]
    """The loads that are issued before the wait for the product."""
    mask_lines: list[Statement]
    mask: Statement | None
    """The statement of the mask, if `mask_lines` does not contain it."""
    documents: DocumentMask | None
    score_lines: list[Statement]
    logits: str
    scaled: Code | None
    dead_rows: bool
    lse_lines: list[Statement]

    @property
    def mask_reads(self) -> list[Statement]:
        """The statements of the loads."""
        return [statement for load in self.mask_loads for statement in load.statements]

    @property
    def masked_logits(self) -> list[Statement]:
        """The statements that apply the mask to the logits, if a tile has it."""
        if not self.masked:
            return []
        lines = [*self.mask_lines, self._hidden(Name("mask"))]
        if (found := self.documents) is not None:
            lines.append(If(found.several, (found.load, self._hidden(found.same))))
        return [If(Name("MASKED"), tuple(lines))]

    @property
    def mask_values(self) -> list[Statement]:
        """The statements of a mask before the scores, if a tile has it."""
        if not self.masked or not self.mask_lines:
            return []
        return [If(Name("MASKED"), tuple(self.mask_lines))]

    @property
    def masked_p(self) -> list[Statement]:
        """The statements that apply the mask to P, if a tile has it."""
        if not self.masked:
            return []
        if self.mask is not None:
            return [If(Name("MASKED"), (self.mask, assign("p", _ZERO_P)))]
        why = "mask p, not the scores: in a row without keys, lse is -inf, and -inf - lse is NaN"
        zero = assign("p", _ZERO_P, why)
        return [If(Name("MASKED"), (*self.mask_lines, zero))]

    def _hidden(self, mask: Code) -> Statement:
        form = '{tl}.where({0}, {1}, float("-inf"))'
        return assign(self.logits, op(form, mask, self.logits, fn="where"))

    @property
    def defines(self) -> frozenset[str]:
        """The names that the statements of a tile define."""
        lines = [*self.mask_lines, *self.score_lines, *(load.line for load in self.mask_loads)]
        return frozenset().union(*(line.defines for line in lines))


@dataclass(frozen=True)
class GradientOfScores:
    """The computation of dS from dP.

    The factor of dP is computed before dP, unless gradients of buffers need the parts of dS.
    """

    factor: str
    factor_lines: list[Statement]
    lines: list[Statement]
    dqk: str
    """The gradient of q @ k^T."""


@dataclass(frozen=True)
class Own:
    """The range `[own_lo, own_hi)` of half a tile, and its part without a mask,
    `[own_full_lo, own_full_hi)`.

    The flags are true if an end may be in another tile than the end of the whole range.
    """

    lines: list[Statement]
    ahead: bool
    past: bool
    full_ahead: bool
    full_past: bool
    before: bool = False
    """True if the range of a half may begin before the whole range.

    An empty range begins at the end of the tensor. The range of the other half may begin past it.
    """


NO_OWN = Own([], ahead=False, past=False, full_ahead=False, full_past=False)
"""The value for kernels whose consumers use the range of the whole tile."""


def own_range(
    kernel: LoopKernel,
    ends: Ends,
    before: list[Statement],
    there: list[Statement],
    by_query: bool,
    block: int,
) -> Own:
    """Return the ends of a half's range that are worth computing: none if a tile is longer than the
    half.
    """
    if block > HALF:
        return NO_OWN
    outer, inner, rows, size = (
        ("q", "kv", "OWN_M", "SQ") if by_query else ("kv", "q", "OWN_N", "SK")
    )
    found = {"lo": ends.lo, "hi": ends.hi}
    if by_query and ends.has_full:
        found |= {"full_lo": ends.full_lo, "full_hi": ends.full_hi}
    own = {name: end for name, end in found.items() if end.of_parts}
    (span,) = kernel.ranges.spans
    lines: list[Statement] = []
    for name in own:
        made = needed([*before, *span.bounds], [f"{inner}_{name}"])
        lines += [line for line in made if line not in there and line not in lines]
    if f"{outer}_last" in uses_of(lines):
        last = row("sub", minimum(row("add", f"{outer}_start", rows), size), 1)
        lines.insert(0, assign(f"{outer}_last", last))
    renamed_ends = {f"{inner}_{name}": f"own_{name}" for name in ("lo", "hi", "full_lo", "full_hi")}
    return Own(
        [with_names(line, renamed_ends) for line in lines],
        ahead="lo" in own,
        past="hi" in own,
        full_ahead="full_lo" in own,
        full_past="full_hi" in own,
        before="lo" in own and any(end.may_be_length for end in own.values()),
    )


def tile_range(
    kernel: LoopKernel,
    searches: bool,
    before: list[Statement],
    of_documents: DocumentEnds | None = None,
) -> TileRange:
    """Return the range of a loop with one span.

    `before` has the statements that the bounds may use.
    """
    (span,) = kernel.ranges.spans
    if kernel.ranges.listed:
        return _listed_range(span)
    plain = next((part for part in span.loops if not part.masked), None)
    ends = span.loops[-1] if span.loops[0].gap is None else span.loops[0]
    lo, hi = span.loops[0].lo, ends.hi
    full_lo, full_hi = (plain.lo, plain.hi) if plain else (lo, lo)
    documents = set() if of_documents is None else {of_documents.first, of_documents.last}
    bounds = needed([*before, *span.bounds], uses_of([lo, hi, full_lo, full_hi]) | documents)
    return TileRange(
        lo=lo,
        length=_less(hi, lo),
        bounds=bounds,
        has_full=plain is not None,
        full_length=_less(full_hi, full_lo),
        full_end=_less(full_hi, lo),
        head=None if full_lo == lo or of_documents is not None else _less(full_lo, lo),
        last=bool({"q_last", "kv_last"} & uses_of(bounds)),
        searches=searches,
        from_first_key=of_documents,
    )


def _listed_range(span: SpanLoops) -> TileRange:
    """Return the range for the lists of a block mask, in which partial blocks come first."""
    *counts, blocks = span.bounds
    full = text("n_full * BLOCK_SIZE")
    return TileRange(
        lo=Name("row"),
        length=text("(n_partial + n_full) * BLOCK_SIZE"),
        bounds=counts,
        has_full=True,
        full_length=full,
        full_end=full,
        blocks=[blocks],
        listed=True,
    )


def gradient_of_scores(gradients: Gradients) -> GradientOfScores:
    """Return the computation of dS from dP in a kernel."""
    lines, dqk = gradients.gradient_lines, gradients.dqk
    if dqk == "ds" or gradients.row_gradients:
        return GradientOfScores("p", [], lines, dqk)
    names = {"ds": "p", dqk: "factor"}
    return GradientOfScores("factor", [with_names(line, names) for line in lines], [], "ds")


def names_of_tile(kernel: LoopKernel, documents: DocumentMask | None = None) -> frozenset[str]:
    """Return the names that the statements of a tile use."""
    body, gradients = kernel.body, kernel.gradients
    lines: list[Statement | Code | None] = [*body.mask_lines, *body.score_lines, body.scaled]
    if gradients is not None:
        lines += gradients.gradient_lines
    if documents is not None:
        lines += [documents.several, documents.load, documents.same]
    return uses_of(lines)


def passed_names(
    used: Set[str], before: Iterable[Statement | str], problem: list[str]
) -> list[str]:
    """Return the `used` names of the outer function: its parameters, and names that its statements
    define.
    """
    made = [name for b in before for name in ([b] if isinstance(b, str) else b.names_in_order)]
    return [n for n in dict.fromkeys([*made, *problem]) if n in used] or ["SQ"]


def _less(a: Code, b: Code) -> Code:
    return a if b == ZERO else row("sub", a, b)


def from_zero(code: Code, lo: str = "kv_lo") -> Code:
    """Return a bound without the start of the range, if the range begins with the first
    position.
    """

    def change(part: Code) -> Code | None:
        match part:
            case Op(fn="sub", args=(end, Name(name=begin))) if begin == lo:
                return end
        return None

    return rewritten(code, change)


def of_half(line: Statement, x: str) -> Statement:
    """Return a line of a tile for a half that may begin past the end.

    Its loads are clamped to the last position, and the kernel does not store such rows.
    """
    if not any(calls(code, "load") for code in codes([line])):
        return line
    first = minimum(f"{x}_start", row("sub", f"S{x[0].upper()}", 1))
    return line.map(lambda code: renamed(code, {f"{x}_start": first}))


def head_of(used: Set[str], packed: bool) -> Statement:
    """Return the statement for the head of a consumer's item, and for its batch if it is needed."""
    batch, head = over("b_h", "HQ"), op("{0} % {1}", "b_h", "HQ", binds=MUL, operand=MUL)
    return assign("h", head) if packed and "b" not in used else Assign(("b", "h"), (batch, head))


def offsets(length: str, dim: int) -> list[Statement]:
    """Return the offsets of keys of a tile, in the layout of scores without dimension `dim`."""
    form = f"gl.arange(0, {{0}}, layout=gl.SliceLayout({dim}, SCORES))"
    return [assign("offs_n", op(form, length, fn="arange"))]


def begin_of_range(found: TileRange, name: str) -> Code:
    """Return the start of a tile's range in its consumers."""
    return ZERO if found.from_start else op("{0}", name)
