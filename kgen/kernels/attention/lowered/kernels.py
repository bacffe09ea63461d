"""The kernels of attention in Triton: what each part of a plan is called in `_forward.j2` and `_backward.j2`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from kgen.expr import finiteness
from kgen.expr.differentiate import is_one
from kgen.expr.hoist import Binding, Program, hoist
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Node, Read, Type, Var, substitute, walk
from kgen.expr.softmax_form import QK
from kgen.expr.spelling import MUL
from kgen.kernels.attention.lowered.loads import LETTERS, SIDES, load_of, tile_loads, tma_row
from kgen.kernels.attention.lowered.ranges import listed_loops, range_fields, searches_of, span_loops
from kgen.kernels.attention.lowered.tile_reads import read_by_rows, read_once
from kgen.kernels.attention.plan.model import OFFS_N, AttentionPlan, ReadGradient, TileLoop
from kgen.kernels.attention.plan.tile_reads import asked_ahead
from kgen.kernels.attention.spec import ANY
from kgen.targets.code import (
    Assign,
    Code,
    If,
    Name,
    Run,
    Statement,
    as_type,
    assign,
    at_first_use,
    atom,
    op,
    row,
    text,
    times,
    uses_of,
)
from kgen.targets.triton.printer import BufferLayout, Printer, column


class KernelFields:
    """Spells the loops of one plan. `helpers` collects the functions that the file has to define."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.spec = plan.spec
        self.helpers: set[str] = set()
        self.open = {n: _open(n, b.shape) for n, b in self.spec.buffers.items()}
        self.layouts = {
            n: BufferLayout(b.dtype, tuple(self.open[n].get(d, s) for d, s in enumerate(b.shape)))
            for n, b in self.spec.buffers.items()
        }
        self.constants = frozenset(n for n, p in self.spec.params.items() if not p.runtime)
        self.runtime = {n: p for n, p in self.spec.params.items() if p.runtime}
        self.tf32 = self.spec.dtype == "fp32" and self.spec.precision == "tf32"
        self.packed = self.spec.varlen
        self.kv_head = "h_kv" if plan.grouped else "h"
        self.sizes = ("B", "HQ", "TQ", "TK") if self.packed else ("B", "HQ", "SQ", "SK")
        self.not_zero = finiteness.NOT_ZERO | {n for n, p in self.spec.params.items() if p.value}
        self.problem = self._problem()

    def _problem(self) -> dict[str, str]:
        """Parameters that every kernel takes, with their annotations."""
        params: dict[str, str] = {}
        for name in self.spec.buffers:
            params |= self.of_buffer(name)
        lengths = ("cu_seqlens_q_ptr", "cu_seqlens_k_ptr") if self.packed else ()
        params |= dict.fromkeys((*lengths, *self.sizes, "scale", *self.runtime), "")
        return params | ({"GQA": ": tl.constexpr"} if self.plan.grouped else {})

    @property
    def open_sizes(self) -> list[str]:
        """The extents that tensors have of their own."""
        return [size for sizes in self.open.values() for size in sizes.values()]

    def of_buffer(self, name: str) -> dict[str, str]:
        """The parameters that are of a buffer, with their annotations."""
        last = len(self.spec.buffers[name].shape) - 1
        strides = {f"stride_{name}_{d}": "" if d == last else ": tl.int64" for d in range(last + 1)}
        return {f"{name}_ptr": ""} | strides | dict.fromkeys(self.open[name].values(), "")

    def loop(self, loop: TileLoop, state: list[str], descriptors: bool = True) -> dict[str, Any]:
        """The names that one kernel and its tile function use; without `descriptors` it loads by pointers alone."""
        plan, forward = self.plan, loop is self.plan.forward
        printer = self.printer(loop)
        outer = loop.outer.index.name.removesuffix("_idx")
        inner = loop.inner.index.name.removesuffix("_idx")
        searches, found = ([], []) if loop.listed else searches_of(loop, printer)
        found = [span.over(_read_before(loop.program)) for span in found]
        spans = [
            span_loops(s, loop, printer, self._divisible(inner), i == 0, i == len(found) - 1)
            for i, s in enumerate(found)
        ]
        if loop.listed:
            assert plan.block_mask is not None
            spans = [listed_loops(plan.block_mask, loop)]
        if outer == "kv":
            # What is searched for may depend on the query head.
            spans[0]["bounds"], searches = searches + spans[0]["bounds"], []
        parts = [part for span in spans for part in span["loops"]]
        gapped = any("gap" in part for part in parts)
        for part in parts:
            rotates = loop.rotated and (not part["masked"] or not any(s.has_full for s in loop.spans))
            turn = [str("tile" if rotates else 0)] if loop.rotated else []
            gap = [str(end) for end in part.get("gap", (0, 0))] if gapped else []
            part["options"] = turn + gap
        fields = self.tile_fields(loop, printer, by_rows=descriptors)
        guards = plan.q if outer == "q" else plan.kv
        live, bound = loop.program.results["outer_live"], guards.bound
        exists = Name(f"{outer}_live") if guards.live == bound else printer.own(bound)
        guard = None if live == TRUE else column(f"{outer}_live")
        store = None if bound == TRUE else atom(exists, "{0}[:, None]")
        inner_guard = None if loop.inner_live == TRUE else column(f"{inner}_live")
        vector = None if bound == TRUE else exists
        # Of dq and forward these are the rows of the tile; of dkdv they are the loop's columns.
        rows = live if outer == "q" else loop.program.results["inner_live"]
        row_guard = None if rows == TRUE or forward else Name("q_live")
        before = self.lines_of(loop.program.before_loop(), printer)
        if live != TRUE:
            before = at_first_use(before, [assign(f"{outer}_live", printer.own(live))])
        if OFFS_N in {n for b in loop.program.before_loop() for n in walk(b.node)} and inner == "kv":
            before.insert(0, assign("offs_n", op("{tl}.arange(0, {0})", "BLOCK_N")))
        by_head, shared = self._split_by_head(loop, before) if outer == "kv" else (before, [])
        streamed = ("q", "do") if inner == "q" else ("k", "v")
        fields |= {
            "gapped": gapped,
            "listed": loop.listed,
            **range_fields(loop, outer, inner, gapped),
            "searches": searches,
            "state": state,
            "rotated": loop.rotated,
            "spans": spans,
            "prologue": by_head,
            "shared_prologue": shared,
            # Which keys are there may depend on the query head.
            "held_by_head": any(f"{outer}_live" in statement.defines for statement in by_head),
            "outer_qk": [load_of(c, guard, store) for c in plan.qk_chunks],
            "outer_v": [load_of(c, guard, store) for c in plan.v_chunks],
            "vector_guard": vector,
            "vector_load": row_guard,
            "row_rest": self._row_rest(loop, printer) if forward else None,
            "sink": self._sink(loop, printer),
        }
        held = ("q",) if forward else ("q", "do") if outer == "q" else ("k", "v")
        fields |= tile_loads(plan, self.kv_head, streamed, held, {inner: inner_guard, outer: guard})
        if not forward:
            fields |= self._gradient_fields(loop, printer)
            of = "dq" if outer == "q" else "dk"
            fields["outer_qk"] = [
                replace(x, scaled=atom(scaled(fields, f"{of}{x.tag}"))) for x in fields["outer_qk"]
            ]
        names, values = self._tile_arguments(loop, fields, streamed, before, descriptors)
        annotations = {"stride_kd": "", "GQA": ": tl.constexpr"}
        bounds = [statement for span in spans for statement in span["bounds"]]
        return fields | {
            "tile_params": [f"{n}{annotations.get(n, '')}" for n in names],
            "tile_args": [values.get(n, n) for n in names],
            # Whether the last position of a tile is asked for.
            "last": loop.outer.last.name in uses_of([*before, *searches, *bounds]) | {*names},
        }

    def tile_fields(
        self, loop: TileLoop, printer: Printer, by_rows: bool = False, given: Sequence[Binding] = ()
    ) -> dict[str, Any]:
        """Scores and mask of one tile; `by_rows`, addresses of what is read for each of its elements are made before
        the loop, and one element is read once. What is `given` is not computed here."""
        plan, program, form = self.plan, loop.program, self.plan.form
        inner = loop.inner.index.name.removesuffix("_idx")
        only_masked = ("mask", "inner_live")
        scale = printer.tile(program.results["qk_scale"])
        core = printer.tile(program.results["core"])
        bindings = program.in_loop(without=only_masked)
        ahead = asked_ahead(bindings) if by_rows else ()
        row_lines, read_lines, score_lines = list[Statement](), list[Statement](), list[Statement]()
        for binding in bindings:
            if binding in given:
                continue
            found = read_by_rows(binding, loop, printer) if by_rows else None
            rows, lines = found or ([], self.lines_of([binding], printer))
            row_lines += rows
            if by_rows:
                lines = read_once(binding, loop, printer, lines)
            (read_lines if binding.name in ahead else score_lines).extend(lines)
        if form.max_of_core:
            logits, scaled = ("qk" if form.core == QK else "s"), atom(scale)
            score_lines += [] if form.core == QK else [assign("s", core)]
        else:
            logits, scaled = "s", None
            score: Code = times(core, scale)
            if "bias" in program.results:
                score = row("add", score, printer.tile(program.results["bias"]))
            score_lines.append(assign("s", score))
        # Masks come first in a tile: what scores need too is spelled in both places.
        mask_lines = self.lines_of(program.in_loop(needed_by=only_masked), printer)
        if loop.inner_live != TRUE:
            live = assign(f"{inner}_live", printer.own(program.results["inner_live"]))
            mask_lines = at_first_use(mask_lines, [live])
        if loop.masked:
            mask_lines.append(assign("mask", printer.tile(program.results["mask"])))
        return {
            "masked": loop.masked,
            "mask_lines": mask_lines,
            "row_lines": row_lines,
            "read_lines": read_lines,
            "score_lines": score_lines,
            "logits": logits,
            "scaled": scaled,
            "dead_rows": loop.masked or not plan.form.finite,
            "lse_lines": self._lse_lines(loop, printer),
        }

    def _gradient_fields(self, loop: TileLoop, printer: Printer) -> dict[str, Any]:
        """What follows `ds`, the gradient of the modified score, inside a tile and after the loop."""
        kept = [g for g in loop.gradients if g.along != "pair"]
        scattered = [g for g in loop.gradients if g.along == "pair"]
        products, parts, open_ended = dict[str, Code](), dict[str, str](), list[str]()
        for g in kept:
            parts[g.name] = "ds"
            if not is_one(g.derivative):
                parts[g.name] = f"part_{g.name}"
                products[f"part_{g.name}"] = times("ds", printer.tile(loop.program.results[f"d_{g.name}"]))
                open_ended += [f"part_{g.name}"] * (loop.masked and self.may_be_nan(g.derivative))
        dqk = "ds" if is_one(loop.dscore) else "dqk"
        if dqk != "ds":
            products[dqk] = times("ds", printer.tile(loop.program.results["dscore"]))
            open_ended += [dqk] * (loop.masked and self.may_be_nan(loop.dscore))
        # A part that is not masked once more needs no name.
        inline = {p: v for p, v in products.items() if p not in (*open_ended, dqk)}
        lines: list[Statement] = [line for g in scattered for line in self._scattered(loop, printer, g)]
        lines += [assign(name, value) for name, value in products.items() if name not in inline]
        if open_ended:
            lines.append(If(Name("MASKED"), tuple(_where_masked(name) for name in open_ended)))
        lines += [_summed(name, inline.get(part, Name(part))) for name, part in parts.items()]
        params = [f"d_{g.name}_ptr" for g in kept]
        for g in scattered:
            params += [
                f"d_{g.name}_ptr",
                *(f"stride_d_{g.name}_{d}: tl.int64" for d in range(len(g.indices))),
            ]
        args = [f"d_{g.name}" for g in kept] + [
            a for g in scattered for a in (f"d_{g.name}", f"*d_{g.name}.stride()")
        ]
        also = [f"the gradient of {g.buffer}" for g in loop.gradients]
        dqk_product = self._scalar_product([Var("scale", Type.FLOAT), loop.dscore_factor], printer)
        return {
            "gradient_lines": lines,
            # The same for a kernel that masks here what others have masked before, and where there may be NaN.
            "products": [assign(name, value) for name, value in products.items()],
            "masked_late": list(dict.fromkeys([*parts.values(), dqk])),
            "sums": [_summed(name, Name(part)) for name, part in parts.items()],
            "open_ended": bool(open_ended),
            "dqk": dqk,
            "dqk_product": dqk_product,
            "dqk_scale": atom(dqk_product),
            "dqk_may_be_nan": self.may_be_nan(loop.dscore_factor),
            "accumulators": [f"d_{g.name}" for g in kept],
            "row_gradients": [
                {
                    "name": f"d_{g.name}",
                    "value": self.scaled(f"d_{g.name}", g, printer),
                }
                for g in kept
            ],
            "gradient_params": params,
            "gradient_args": args,
            "also": [f"and {a}" for a in dict.fromkeys(also)],
        }

    def _scattered(self, loop: TileLoop, printer: Printer, g: ReadGradient) -> list[Statement]:
        """The gradient of a read with an element for each pair, added to the buffer's own where its indices say."""
        lines, part = self.contribution(loop, printer, g)
        indices = tuple(loop.program.results[f"d_{g.name}[{i}]"] for i in range(len(g.indices)))
        address = printer.address(f"d_{g.name}", indices, ("q", "kv"))
        inside = printer.guard(g.buffer, indices, ("q", "kv"))
        if loop.program.results["outer_live"] != TRUE:
            of_rows = op("({0})[:, None]", row("lt", "lse", _INFINITY))
            inside = of_rows if inside is None else op("{0} & ({1})", of_rows, inside)
        if not is_one(g.factor):
            part = op("{0} * {1}", part, atom(self.scalar(g.factor, printer)))

        def added(guard: Code | None) -> Run:
            if guard is None:
                return Run(op("{tl}.atomic_add({0}, {1})", address, part))
            return Run(op("{tl}.atomic_add({0}, {1}, mask={2})", address, part, guard))

        if not loop.masked:
            return [*lines, added(inside)]
        both = Name("mask") if inside is None else op("{0} & ({1})", "mask", inside)
        return [*lines, If(Name("MASKED"), (added(both),), (added(inside),))]

    def _scatters(self, loop: TileLoop) -> bool:
        """True if a gradient has an element for each pair, which is added where its indices say."""
        return any(g.along == "pair" for g in loop.gradients)

    def contribution(self, loop: TileLoop, printer: Printer, g: ReadGradient) -> tuple[list[Statement], Code]:
        """What a tile adds to the gradient of a read, before it is summed, and the lines that make it."""
        if is_one(g.derivative):
            return [], Name("ds")
        part = times("ds", printer.tile(loop.program.results[f"d_{g.name}"]))
        if not (loop.masked and self.may_be_nan(g.derivative)):
            return [], part
        return [assign("part", part), If(Name("MASKED"), (_where_masked("part"),))], Name("part")

    def _divisible(self, x: str) -> bool:
        return (self.plan.kv if x == "kv" else self.plan.q).bound == TRUE

    def _split_by_head(
        self, loop: TileLoop, before: list[Statement]
    ) -> tuple[list[Statement], list[Statement]]:
        """What depends on the query head, and what does not; without groups there is nothing to split."""
        if not self.plan.grouped:
            return [], before
        changing = {"h"}
        by_head, shared = list[Statement](), list[Statement]()
        for statement in before:
            if changing & statement.uses:
                changing |= statement.defines
                by_head.append(statement)
            else:
                shared.append(statement)
        return by_head, shared

    def _tile_arguments(
        self,
        loop: TileLoop,
        fields: dict[str, Any],
        streamed: tuple[str, ...],
        before: list[Statement],
        descriptors: bool,
    ) -> tuple[list[str], dict[str, str]]:
        """Parameters of the tile function: what its body uses of the kernel's names; and what the kernel passes for
        those that have other names there."""
        plan = self.plan
        backward = loop is not plan.forward
        outer = loop.outer.index.name
        held = ("q",) if loop is plan.forward else ("q", "do") if outer == "q_idx" else ("k", "v")
        chunks = {"q": plan.qk_chunks, "k": plan.qk_chunks, "v": plan.v_chunks, "do": plan.v_chunks}
        names = [f"{x}{c.tag}" for x in held for c in chunks[x]]
        if backward and outer == "q_idx":
            names += ["lse", *["lse_low"] * plan.exact, "delta"]
        values = {n: n for n in names}
        for x in streamed:
            names.append(f"{x}_ptr")
            values[f"{x}_ptr"] = f"{x}_ptr" if outer == "q_idx" else f"{x}_head"
        if backward and outer == "kv_idx":
            names += ["lse_ptr", "delta_ptr"]
            values |= {"lse_ptr": "lse_head", "delta_ptr": "delta_head"}
        if descriptors:
            names += [f"{x}_desc{c.tag}" for x in streamed for c in chunks[x]]
            names += tma_row(self.packed, SIDES[streamed[0]], self.kv_head if outer == "q_idx" else "h")[1]
        names += [f"stride_{LETTERS[x]}{d}" for x in streamed for d in "sd"]
        body = [*fields["mask_lines"], *fields["read_lines"], *fields["score_lines"]]
        body += fields.get("gradient_lines", [])
        body += [*fields["row_lines"], fields["scaled"]]
        body += [*fields["lse_lines"], fields["vector_load"]] if outer == "kv_idx" else []
        used = uses_of(body)
        outside = [name for statement in before for name in statement.names_in_order]
        candidates = [
            "b",
            "h",
            outer,
            loop.outer.start.name,
            loop.outer.last.name,
            *outside,
            *self.problem,
            *("SQ", "SK") * self.packed,
            *(param.partition(":")[0] for param in fields.get("gradient_params", ())),
        ]
        candidates = [c for c in candidates if c != loop.inner.start.name]
        names += [c for c in dict.fromkeys(candidates) if c in used and c not in names]
        return names, values

    # --- printing ------------------------------------------------------------------------------------------------

    def printer(self, loop: TileLoop, program: Program | None = None) -> Printer:
        """A printer for the expressions of a loop, or for those of another program over the same indices."""
        rows = loop.outer.index.name.removesuffix("_idx")
        empty = frozenset[str]() if self.plan.self_attention else frozenset({loop.inner.size.name})
        return Printer(
            program or loop.program,
            rows,
            self.layouts,
            replace(self.plan.index_ranges, empty=empty),
            self.constants,
            self.spec.accuracy,
            self.helpers,
        )

    def lines_of(self, bindings: Iterable[Binding], printer: Printer) -> list[Statement]:
        return [assign(b.name, printer.over(b.node, b.place.axes)) for b in bindings]

    def _row_rest(self, loop: TileLoop, printer: Printer) -> Code | None:
        """What the log-sum-exp of a row gets back."""
        rest = loop.program.results.get("row_rest")
        return None if rest is None else self.returned(rest, printer)

    def returned(self, rest: Node, printer: Printer) -> Code:
        """What a row gets back, a number also in rows that see no key, whose own value may be infinite or NaN."""
        value = printer.own(rest)
        assert self.plan.form.row_rest is not None
        if not self.may_be_nan(self.plan.form.row_rest):
            return op("{0}", value, operand=MUL)
        if self.spec.sinks:
            # The sum of a row with a sink is never zero, and begins with the sink less this.
            return row("where", row("lt", row("abs", value), _INFINITY), value, _ZERO)
        return row("where", row("eq", "l_i", _ZERO), _ZERO, value)

    def _sink(self, loop: TileLoop, printer: Printer) -> Code:
        """The sink among the logits of a row."""
        rest = loop.program.results.get("row_rest") if self.spec.sinks else None
        return Name("sink") if rest is None else row("sub", "sink", self.returned(rest, printer))

    def _lse_lines(self, loop: TileLoop, printer: Printer) -> list[Statement]:
        """What turns the stored log-sum-exp into the one of the loop's logits."""
        rest = loop.program.results.get("row_rest")
        value: Code = Name("lse") if rest is None else row("sub", "lse", printer.own(rest))
        if not self.plan.form.finite:
            # Every logit of the row is -inf, and so is lse: -inf - inf makes P zero, where -inf - -inf would be NaN.
            nothing = row("eq", "lse", text('float("-inf")'))
            value = row("where", nothing, _INFINITY, value)
        if self._scatters(loop) and loop.program.results["outer_live"] != TRUE:
            # Scores of rows past the end may be anything, and no mask hides them: P times zero may be NaN.
            value = row("where", "q_live", value, _INFINITY)
        lines: list[Statement] = [] if value == Name("lse") else [assign("lse", value)]
        if self.plan.exact:
            high = as_type("lse", "float32")
            low = as_type(row("sub", "lse", high), "float32")
            # Of an infinite one nothing is left: inf - inf would be NaN.
            lines.append(assign("lse_low", row("where", row("eq", high, "lse"), text("0.0"), low)))
            lines.append(assign("lse", high))
        return lines

    def may_be_nan(self, node: Node) -> bool:
        """True if a value may be infinite or NaN where no pair is visible."""
        return finiteness.may_be_nan(node, self.not_zero)

    def scaled(self, x: Code | str, g: ReadGradient, printer: Printer) -> Code:
        """A sum times the factor of a gradient."""
        if is_one(g.factor):
            return op("{0}", x)
        product = times(x, self.scalar(g.factor, printer))
        return unless_zero(x, product) if self.may_be_nan(g.factor) else product

    def scalar(self, node: Node, printer: Printer) -> Code:
        """A number of one (b, h), written in full where it is used once, after a loop, but for what was read before."""
        alone = replace(printer, program=hoist({}, {}))
        return alone.own(substitute(node, _read_before(printer.program)))

    def _scalar_product(self, factors: list[Node], printer: Printer) -> Code:
        first, *rest = (self.scalar(f, printer) for f in factors if not is_one(f))
        return reduce(times, rest, first)


def _open(buffer: str, shape: Sequence[int | str]) -> dict[int, str]:
    """How kernels call the extents that a tensor has of its own, by axis."""
    return {axis: f"size_{buffer}_{axis}" for axis, size in enumerate(shape) if size == ANY}


def buffer_arguments(buffer: str, shape: Sequence[int | str]) -> list[str]:
    """What a launch is given of a buffer, as the kernels' parameters have it."""
    strides = [f"*{buffer}.stride()"] if shape else []
    return [buffer, *strides, *(f"{buffer}.shape[{axis}]" for axis in _open(buffer, shape))]


_ZERO, _INFINITY = text("0.0"), text('float("inf")')


def unless_zero(x: Code | str, product: Code) -> Code:
    """A product whose other factor may be infinite or NaN where no pair is visible: zero stays zero."""
    return row("where", row("eq", x, _ZERO), _ZERO, product)


def scaled(fields: Mapping[str, Any], x: str) -> Code:
    """A sum of dq or dk times what its loop leaves out."""
    product = times(x, fields["dqk_scale"])
    return unless_zero(x, product) if fields["dqk_may_be_nan"] else product


def _where_masked(name: str) -> Assign:
    return assign(name, op("{tl}.where({0}, {1}, 0.0)", "mask", name))


def _summed(name: str, part: Code) -> Assign:
    """What a row of a tile adds to the gradient of a buffer."""
    return Assign((f"d_{name}",), (op("{tl}.sum({0}, 1)", part),), "+=")


def _read_before(program: Program) -> dict[Node, Node]:
    """What a program reads once, ahead of everything else, and by which name."""
    once = (b for b in program.before_loop() if isinstance(b.node, Read) and not b.place.axes)
    return {b.node: Var(b.name, b.node.type) for b in once}


def accumulators(loop: TileLoop) -> list[str]:
    return [f"d_{g.name}" for g in loop.gradients if g.along != "pair"]
