"""Conditions of the Hopper kernels, each with the sentence that states why it fails.

The kernels need tiles of 64, 128 or 256 columns of 16 bits, and TMA loads whole tiles. Rows that
only the mask removes may contain NaN, so TMA must not load them. Keys past an end are an exception:
only one tile has such keys, and a consumer replaces them with zeros in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kgen.expr.hoist import TILE, Binding
from kgen.expr.mask_form import conjuncts
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, children, reads, variables
from kgen.expr.softmax_form import KV_IDX, Q_IDX, QK
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.spec import ANY

WIDTHS = (64, 128)
WIDE = 256
"""Columns of the widest heads: a consumer has registers for either dk or dv."""
ROPE_DIMS = 64
"""Columns that keys may have in addition to 128, with values of 128 columns."""
LEAST_PAGE = 16
"""Rows of the smallest pages: TMA loads a tile page by page, and pages of 8 rows would need 16
loads.
"""

HEADS = Var("b", Type.INT), Var("h", Type.INT)
PAIR_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element of the buffer that scores read for each pair of positions."""


@dataclass(frozen=True)
class Condition:
    """A test of a plan and one of its loops, and the sentence for plans that fail it."""

    holds: Callable[[AttentionPlan, TileLoop], bool]
    otherwise: str

    def words(self, plan: AttentionPlan) -> str:
        """Return the sentence, with the numbers of a plan."""
        return self.otherwise.format(
            qk=plan.spec.head_dim.qk, v=plan.spec.head_dim.v, dtype=plan.spec.dtype
        )


OF_ALL = (
    Condition(lambda plan, loop: "forward" in plan.spec.passes, "the spec has no forward pass"),
    Condition(
        lambda plan, loop: plan.spec.dtype in ("bf16", "fp16"),
        "the dtype is {dtype}, and Hopper kernels need bf16 or fp16",
    ),
    Condition(
        lambda plan, loop: width_of(plan) is not None,
        (
            "no Hopper tile fits keys of {qk} and values of {v} columns (64, 128, 256; 192 with "
            "values of 128)"
        ),
    ),
    Condition(
        lambda plan, loop: plan.q.live == plan.q.bound,
        "the mask removes queries by their position alone, and TMA would load their rows",
    ),
    Condition(
        lambda plan, loop: plan.kv.live == plan.kv.bound or _ends_the_keys(plan),
        (
            "the mask removes keys by their position alone, not only past an end, and TMA would "
            "load their rows"
        ),
    ),
    Condition(
        lambda plan, loop: loop.listed or len(loop.spans) == 1,
        "the mask leaves several ranges of keys",
    ),
    Condition(
        # A list has a row for each 128 queries, and two consumers have 128 queries.
        lambda plan, loop: not loop.listed or (width_of(plan) or 0) >= max(WIDTHS),
        "the blocks of the block mask are larger than the tiles for heads of {v} columns",
    ),
    Condition(
        lambda plan, loop: (
            not (loop.listed and (plan.spec.varlen or plan.spec.paged_kv is not None))
        ),
        "Hopper kernels do not support block masks of packed sequences or of pages",
    ),
    Condition(
        lambda plan, loop: plan.spec.paged_kv is None or plan.spec.paged_kv.page_size >= LEAST_PAGE,
        f"a tile would need too many pages of fewer than {LEAST_PAGE} keys",
    ),
    Condition(
        lambda plan, loop: not (has_rope_dims(plan) and plan.spec.paged_kv is not None),
        "Hopper kernels do not support pages with keys that are wider than values",
    ),
    Condition(
        # Keys past an end would be in two tiles of K.
        lambda plan, loop: (
            not (has_rope_dims(plan) and plan.form.core != QK and plan.kv.live != plan.kv.bound)
        ),
        "the keys are wider than values, and a function of scores would read keys past an end",
    ),
    Condition(
        lambda plan, loop: (
            not ((has_rope_dims(plan) or width_of(plan) == WIDE) and _reads_pairs(plan, loop))
        ),
        (
            "heads of {qk} columns leave no shared memory for the buffer that the score reads for "
            "each pair"
        ),
    ),
    Condition(
        lambda plan, loop: (
            loop is not plan.forward or not _reads_pairs(plan, loop) or _whole_pairs(plan)
        ),
        "the score reads a buffer for each pair, which Hopper kernels do not support with packed "
        "sequences, "
        "block masks or masks of keys alone",
    ),
    Condition(
        lambda plan, loop: (
            loop is not plan.forward or not _reads_pairs(plan, loop) or pair_of(plan) is not None
        ),
        (
            "the score may read only one buffer for each pair, of fp32 or 16 bits, at [..., q_idx, "
            "kv_idx]"
        ),
    ),
)
"""Conditions of every kernel."""

OF_NARROW_FORWARD = (
    Condition(
        # Forward is 2 to 5 % faster with long ranges and 10 % slower with windows.
        lambda plan, loop: plan.problem.mask not in ("band", "search") and not plan.problem.varlen,
        "the ranges of keys are short, where portable kernels are faster for heads of {v} columns",
    ),
    Condition(
        lambda plan, loop: plan.problem.score != "reads",
        "heads of {v} columns leave no room for the buffer that the score reads for each pair",
    ),
    Condition(
        lambda plan, loop: plan.problem.score == "plain",
        (
            "Hopper kernels for heads of {v} columns are used only if score_mod adds no bias and "
            "applies no function"
        ),
    ),
    Condition(
        lambda plan, loop: plan.problem.light,
        "Hopper kernels for heads of {v} columns are used only if some tiles need no mask",
    ),
)
"""Conditions of forward for heads of 64 columns."""

OF_BACKWARD = (
    Condition(
        lambda plan, loop: not _reads_pairs(plan, loop),
        "the score reads a buffer for each pair, which only the forward kernel supports",
    ),
    Condition(
        lambda plan, loop: plan.kv.live == plan.kv.bound or width_of(plan) != min(WIDTHS),
        (
            "heads of {v} columns have their keys in registers, where keys past an end cannot be "
            "cleared"
        ),
    ),
    Condition(
        lambda plan, loop: plan.kv.live == plan.kv.bound or not has_rope_dims(plan),
        "the keys are wider than values, so keys past an end would have to be cleared in two tiles",
    ),
    Condition(
        lambda plan, loop: plan.kv.live == plan.kv.bound or _clears_for_all(plan),
        "query heads share keys, and each has its own end of the keys",
    ),
    Condition(
        # The kernel of dq keeps one sum for each row.
        lambda plan, loop: _sums_by_row(plan),
        "the gradient of a buffer is not a sum over keys alone",
    ),
)
"""Conditions of the kernels of dq, and of dk and dv."""


def without_kernels(plan: AttentionPlan) -> dict[str, str]:
    """Return the passes that have no Hopper kernels, with the reasons.

    If the conditions of all kernels fail for forward, no pass has Hopper kernels.
    """
    forward = _first(OF_ALL, plan, [plan.forward])
    narrow = forward is None and (width_of(plan) or 0) < max(WIDTHS)
    backward = forward
    if backward is None and plan.dq is not None and plan.dkdv is not None:
        backward = _first((*OF_ALL, *OF_BACKWARD), plan, [plan.dq, plan.dkdv])
    if narrow:
        forward = _first(OF_NARROW_FORWARD, plan, [plan.forward])
    found = {"forward": forward, "backward": backward if plan.backward else None}
    return {name: why for name, why in found.items() if why is not None}


def _first(
    conditions: Iterable[Condition], plan: AttentionPlan, loops: list[TileLoop]
) -> str | None:
    failing = (c.words(plan) for c in conditions if not all(c.holds(plan, loop) for loop in loops))
    return next(failing, None)


def has_rope_dims(plan: AttentionPlan) -> bool:
    """True if keys are wider than values."""
    return plan.spec.head_dim.qk > plan.spec.head_dim.v


def width_of(plan: AttentionPlan) -> int | None:
    """Return the columns of a tile, or None if no tile fits.

    Narrower heads need rows at multiples of 16 bytes, which TMA requires.
    """
    qk, v = plan.spec.head_dim.qk, plan.spec.head_dim.v
    if (qk, v) == (max(WIDTHS) + ROPE_DIMS, max(WIDTHS)):
        return v
    fitting = [width for width in (*WIDTHS, WIDE) if width // 2 < v <= width]
    return fitting[0] if fitting and qk == v and v % 8 == 0 else None


def pair_of(plan: AttentionPlan) -> Binding | None:
    """Return the read of a buffer for each pair of positions, or None.

    It must be the only such read, and TMA must be able to load tiles of the buffer. So its last
    indices are q_idx and kv_idx, and the indices before them are the same for a whole tile.
    """
    spec, program = plan.spec, plan.forward.program
    found = [b for b in program.bindings if b.place == TILE and reads(b.node)]
    if len(found) != 1 or not _whole_pairs(plan):
        return None
    (pair,) = found
    if pair.roots & {"mask", "inner_live"} or not isinstance(pair.node, Read):
        return None
    buffer = spec.buffers[pair.node.buffer]
    if buffer.dtype not in PAIR_BYTES or ANY in buffer.shape:
        return None
    before, last = pair.node.indices[:-2], pair.node.indices[-2:]
    simple = len(before) <= 2 and all(isinstance(i, Const) or i in HEADS for i in before)
    return pair if simple and last == (Q_IDX, KV_IDX) else None


def _whole_pairs(plan: AttentionPlan) -> bool:
    """True if tiles of a buffer for each pair are at the positions of tiles, and all keys exist."""
    return not (plan.spec.varlen or plan.forward.listed) and plan.kv.live == plan.kv.bound


def _reads_pairs(plan: AttentionPlan, loop: TileLoop) -> bool:
    """True if scores read a buffer for each pair of positions."""
    scored = any(
        b.place == TILE and reads(b.node) and not b.roots <= {"mask", "inner_live"}
        for b in loop.program.bindings
    )
    return scored or plan.problem.score == "reads"


def _sums_by_row(plan: AttentionPlan) -> bool:
    of_queries = plan.dq.gradients if plan.dq is not None else ()
    of_keys = plan.dkdv.gradients if plan.dkdv is not None else ()
    return all(g.along == "q" for g in of_queries) and not of_keys


def _clears_for_all(plan: AttentionPlan) -> bool:
    """True if all kernels name the ends of the keys alike, and heads that share keys have one
    end.
    """
    ends = [c.args[1] for c in conjuncts(plan.kv.live) if isinstance(c, Call)]
    known = all(
        not isinstance(end, Call) and all(isinstance(n, (Const, Var)) for n in children(end))
        for end in ends
    )
    return known and (not plan.grouped or "h" not in variables(plan.kv.live))


def _ends_the_keys(plan: AttentionPlan) -> bool:
    """True if each condition on keys alone is an end of the keys, `kv_idx < end`.

    Such keys are then past the last key of a range.
    """
    ends = all(
        isinstance(c, Call)
        and c.fn in ("lt", "le")
        and c.args[0] == KV_IDX
        and _is_whole(c.args[1])
        for c in conjuncts(plan.kv.live)
    )
    # In the list of a block mask, the last key can be in any block.
    return ends and plan.problem.mask not in ("scan", "listed")


def _is_whole(end: Node) -> bool:
    return end.type.integral and "kv_idx" not in variables(end)
