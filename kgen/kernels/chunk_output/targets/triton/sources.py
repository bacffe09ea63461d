"""The Triton target of chunk_output: a plan becomes the names that its template `chunk_output.j2` uses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kgen.expr.algebra import call
from kgen.expr.differentiate import is_one
from kgen.expr.functions import in_order
from kgen.expr.hoist import Place, Program, hoist
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Const, Node, Type
from kgen.expr.show import show
from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan, plan_chunk_output
from kgen.kernels.chunk_output.plan.tiles import tile_tables
from kgen.kernels.chunk_output.targets.triton.launcher import launcher_fields, layouts
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.code import Code, Name, assign, atom, lines_of, row, times
from kgen.targets.template import Untyped
from kgen.targets.triton import tables as by_chip
from kgen.targets.triton.printer import Printer, along_row, column
from kgen.targets.triton.tritons import FIELDS

ROW = Place(False, ("q",))
"""A value for each token of a chunk; what does not vary with `i` is one number for a (chunk, head)."""

_NAMES = frozenset(
    {
        *(
            "b",
            "blocks",
            "chunk",
            "dc",
            "dh",
            "dk",
            "do",
            "dp",
            "dq",
            "ds",
            "dv",
            "end",
            "factor",
            "first",
            "h",
            "i",
        ),
        *(
            "k",
            "kq",
            "live",
            "number",
            "offs_k",
            "offs_v",
            "out",
            "p",
            "pair",
            "pds",
            "pid",
            "q",
            "qk",
            "seq",
        ),
        *("start", "state", "v", "scale", "g", "g_gamma", "H", "HV", "K", "V", "BT", "T", "NT", "LOG2E"),
    }
)


def sources(loaded: Loaded) -> list[Source]:
    """The one file of this target."""
    context = _context(plan_chunk_output(loaded))
    text = Untyped("chunk_output/triton/chunk_output.j2", context)
    return [
        Source(
            "triton.py",
            text,
            rank=1,
            alone=text,
            signature=str(context["signature"]),
            docstring=Untyped("chunk_output/triton/_docstring.j2", context),
        )
    ]


def _context(plan: ChunkOutputPlan) -> dict[str, object]:
    """Every name of the template."""
    spec, helpers = plan.spec, set[str]()
    decay = _decay(plan, helpers, with_slope=False)
    gradient = _decay(plan, helpers, with_slope=True)
    tables = tile_tables(spec)
    names = {"_FORWARD_TILES": tables.forward}
    if plan.backward:
        names |= {"_DVDH_TILES": tables.dvdh, "_DQDK_TILES": tables.dqdk}
    power = "exp({})" if plan.natural else "2**({})"
    return {
        "name": spec.name,
        "summary": opening(spec),
        "dtype": spec.dtype,
        "BT": spec.chunk_size,
        "K": spec.head_dim.qk,
        "V": spec.head_dim.v,
        "varlen": spec.varlen,
        "backward": plan.backward,
        "bf16": spec.dtype == "bf16",
        "decays": plan.exponent is not None,
        "natural": plan.exponent is not None and plan.natural,
        "formula": show(plan.decay) if plan.decay is not None else "",
        "before": power.format("c(i)") if plan.decay is not None else None,
        "between": power.format("c(i) - c(j)") if plan.decay is not None else None,
        "tile_tables": [
            {
                "name": name,
                "rows": [
                    {"chips": chips, "tile": tile.spelled}
                    for chips, tile in by_chip.rows({chip: [tile] for chip, tile in table.items()})
                ],
            }
            for name, table in names.items()
        ],
        "helpers": in_order(helpers),
        "common": decay.fields,
        "gradient": gradient.fields,
        "exponent": decay.power(Name(decay.c)),
        "difference": decay.power(row("sub", column(decay.c), along_row(decay.c))),
        "difference_t": decay.power(row("sub", along_row(decay.c), column(decay.c))),
        "slope": gradient.slope,
        "has_dg": plan.slope is not None,
        "state_cast": "" if spec.state == spec.dtype else ".to(q_ptr.dtype.element_ty)",
        **layouts(spec),
        **launcher_fields(plan),
        **FIELDS,
    }


@dataclass(frozen=True)
class _Decay:
    """How a kernel spells the decay: what `_parts.j2` prints, the name of c, and what dc is multiplied by."""

    fields: dict[str, Any]
    c: str
    natural: bool
    slope: Code | None

    def power(self, exponent: Code) -> Code:
        """The argument of `exp2` for an exponent of the spec's base."""
        return times("LOG2E", exponent) if self.natural else exponent


def _decay(plan: ChunkOutputPlan, helpers: set[str], *, with_slope: bool) -> _Decay:
    spec = plan.spec
    casts = {f"{g}_cast": "" if spec.gate_dtype == "fp32" else ".to(tl.float32)" for g in ("g", "g_gamma")}
    fields = {"varlen": spec.varlen, **{g: g in plan.gates for g in ("g", "g_gamma")}, **casts}
    roots: dict[str, tuple[Node, Place]] = {}
    if plan.exponent is not None and not plan.plain_gate:
        roots["c"] = (plan.exponent, ROW)
    if plan.slope is not None and with_slope:
        # d b**c / d c is log(b) * b**c.
        factor = Const(math.log(2), Type.FLOAT)
        roots["slope"] = (plan.slope if plan.natural else _scaled(plan.slope, factor), ROW)
    program = hoist(roots, {"i": ROW, "g": ROW}, reserved={*_NAMES, *roots})
    printer = Printer(program, "q", {}, IndexRanges({}, frozenset()), frozenset(), "usual", helpers)
    lines = [assign(b.name, printer.over(b.node, b.place.axes)) for b in program.bindings]
    if "c" in roots:
        lines.append(assign("c", _row(program, program.results["c"], printer)))
    slope = program.results.get("slope")
    return _Decay(
        fields | {"lines": lines_of(lines)},
        "c" if "c" in roots else "g",
        plan.natural,
        None if slope is None or is_one(slope) else atom(printer.own(slope)),
    )


def _scaled(node: Node, factor: Const) -> Node:
    return factor if node == Const(1, Type.INT) else call("mul", factor, node)


def _row(program: Program, node: Node, printer: Printer) -> Code:
    """A value as a float32 vector over the tokens of the chunk."""
    own = printer.own(node)
    if program.place(node).axes:
        return row("float", own) if node.type.integral else own
    return atom(own, "{tl}.zeros([BT], {tl}.float32) + {0}")
