"""The kernels of attention in Triton: what each part of a plan is called in `_forward.j2` and `_backward.j2`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kgen.expr.differentiate import is_one
from kgen.expr.functions import MUL
from kgen.expr.hoist import TILE, Binding, Program, hoist
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, substitute, walk
from kgen.expr.softmax_form import QK
from kgen.expr.tile_ranges import FIRST_AT_LEAST, Span
from kgen.plan.attention import OFFS_N, AttentionPlan, Chunk, ReadGradient, TileLoop
from kgen.targets.triton.placement import tma_row
from kgen.targets.triton.printer import BufferLayout, Printer
from kgen.targets.triton.text import bracketed, value_of, wrapped

# How strides of an operand are called, and along which positions its rows lie.
LETTERS = {"k": "k", "v": "v", "q": "q", "do": "g"}
SIDES = {"q": "q", "k": "kv", "v": "kv", "do": "q"}


@dataclass(frozen=True)
class _Bound:
    """Whether a side of a tile ends before the tensor does, and the mask of a store where it may not."""

    whole: str
    guard: str


NO_LISTS = {"list_params": "", "list_args": ""}


def lists_of(inner: str) -> tuple[str, str, str]:
    """What a block mask calls its lists of blocks of keys (`kv`) or of queries (`q`), as FlexAttention does."""
    return f"{inner}_num_blocks", f"full_{inner}_num_blocks", f"{inner}_indices"


@dataclass(frozen=True)
class _Load:
    """One block of columns in a load or store: its place, and what guards it."""

    tag: str
    columns: str
    size: int
    guard: str = ""
    store_guard: str = ""
    do_guard: str = ""


class KernelFields:
    """Spells the loops of one plan. `helpers` collects the functions that the file has to define."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.spec = plan.spec
        self.helpers: set[str] = set()
        self.layouts = {n: BufferLayout(b.dtype, tuple(b.shape)) for n, b in self.spec.buffers.items()}
        self.constants = frozenset(n for n, p in self.spec.params.items() if not p.runtime)
        self.runtime = {n: p for n, p in self.spec.params.items() if p.runtime}
        self.tf32 = self.spec.dtype == "fp32" and self.spec.precision == "tf32"
        self.packed = self.spec.varlen
        self.sizes = ("B", "HQ", "TQ", "TK") if self.packed else ("B", "HQ", "SQ", "SK")
        self.problem = self._problem()

    def _problem(self) -> dict[str, str]:
        """Parameters that every kernel takes, with their annotations."""
        params: dict[str, str] = {}
        for name, buffer in self.spec.buffers.items():
            params[f"{name}_ptr"] = ""
            last = len(buffer.shape) - 1
            params |= {f"stride_{name}_{d}": "" if d == last else ": tl.int64" for d in range(last + 1)}
        lengths = ("cu_seqlens_q_ptr", "cu_seqlens_k_ptr") if self.packed else ()
        params |= dict.fromkeys((*lengths, *self.sizes, "scale", *self.runtime), "")
        return params | {"GQA": ": tl.constexpr"}

    def loop(self, loop: TileLoop, state: list[str], descriptors: bool = True) -> dict[str, Any]:
        """The names that one kernel and its tile function use; without `descriptors` it loads by pointers alone."""
        plan, forward = self.plan, loop is self.plan.forward
        printer = self.printer(loop)
        outer = loop.outer.index.name.removesuffix("_idx")
        inner = loop.inner.index.name.removesuffix("_idx")
        searches, found = ([], []) if loop.listed else self._searches(loop, printer)
        spans = [
            self._span(s, loop, printer, first=i == 0, last=i == len(found) - 1) for i, s in enumerate(found)
        ]
        if loop.listed:
            spans = [self._lists(loop)]
        if outer == "kv":
            # What is searched for may depend on the query head.
            spans[0]["bounds"], searches = searches + spans[0]["bounds"], []
        parts = [part for span in spans for part in span["loops"]]
        gapped = any("gap" in part for part in parts)
        for part in parts:
            rotates = loop.rotated and (not part["masked"] or not any(s.has_full for s in loop.spans))
            turn = [str("tile" if rotates else 0)] if loop.rotated else []
            gap = [part.get("gap", "0, 0")] if gapped else []
            part["options"] = "".join(f"{o}, " for o in turn + gap)
        fields = self._tile_fields(loop, printer, by_rows=descriptors)
        guards = plan.q if outer == "q" else plan.kv
        live, bound = loop.program.results["outer_live"], guards.bound
        exists = f"{outer}_live" if guards.live == bound else printer.own(bound)
        guard = "" if live == TRUE else f"{outer}_live[:, None]"
        store = "" if bound == TRUE else f"{bracketed(exists)}[:, None]"
        inner_guard = "" if loop.inner_live == TRUE else f"{inner}_live[:, None]"
        vector = "" if bound == TRUE else f", mask={exists}"
        # Of dq and forward these are the rows of the tile; of dkdv they are the loop's columns.
        rows = live if outer == "q" else loop.program.results["inner_live"]
        row_guard = "" if rows == TRUE else ", mask=q_live"
        before = self._lines(loop.program.before_loop(), printer)
        if live != TRUE:
            before.append(f"{outer}_live = {printer.own(live)}")
        if OFFS_N in {n for b in loop.program.before_loop() for n in walk(b.node)} and inner == "kv":
            before.insert(0, "offs_n = tl.arange(0, BLOCK_N)")
        by_head, shared = self._split_by_head(loop, before) if outer == "kv" else (before, [])
        streamed = ("q", "do") if inner == "q" else ("k", "v")
        fields |= {
            "gapped": gapped,
            "listed": loop.listed,
            **self._range(loop, outer, inner, gapped),
            "searches": searches,
            "state": state,
            "rotated": loop.rotated,
            "spans": spans,
            "prologue": by_head,
            "shared_prologue": shared,
            "outer_qk": [self.load(c, guard, store) for c in plan.qk_chunks],
            "outer_v": [self.load(c, guard, store) for c in plan.v_chunks],
            "vector_guard": vector,
            "vector_load": f"{row_guard}, other=0.0" if row_guard and not forward else "",
            "row_rest": self._row_rest(loop, printer, "+") if forward else "",
            "sink": f"sink{self._row_rest(loop, printer, '-')}" if forward else "",
        }
        held = ("q",) if forward else ("q", "do") if outer == "q" else ("k", "v")
        fields |= self._operands(streamed, held, {inner: inner_guard, outer: guard})
        if not descriptors:
            columns = {"k": plan.qk_chunks, "v": plan.v_chunks}
            fields |= {f"{x}_loads": [self._streamed(c, inner_guard) for c in columns[x]] for x in columns}
        if not forward:
            fields |= self._gradient_fields(loop, printer)
        params, args = self._tile_arguments(loop, fields, streamed, before, descriptors)
        return fields | {"tile_params": params, "tile_args": args}

    def _tile_fields(self, loop: TileLoop, printer: Printer, by_rows: bool = False) -> dict[str, Any]:
        """Scores and mask of one tile; `by_rows`, addresses of what is read for each of its elements are made before
        the loop."""
        plan, program, form = self.plan, loop.program, self.plan.form
        inner = loop.inner.index.name.removesuffix("_idx")
        only_masked = ("mask", "inner_live")
        scale = printer.tile(program.results["qk_scale"])
        scale = scale if re.fullmatch(r"[\w.]+(\[.*\])?", scale) else f"({scale})"
        core = printer.tile(program.results["core"])
        row_lines, score_lines = [], []
        for binding in program.in_loop(without=only_masked):
            found = self._read_by_rows(binding, loop, printer) if by_rows else None
            rows, lines = found or ([], self._lines([binding], printer))
            row_lines += rows
            score_lines += lines
        if form.max_of_core:
            logits, scaled = ("qk" if form.core == QK else "s"), f" * {scale}"
            score_lines += [] if form.core == QK else [f"s = {core}"]
        else:
            logits, scaled = "s", ""
            bias = f" + {printer.tile(program.results['bias'])}" if "bias" in program.results else ""
            core = core if re.fullmatch(r"[\w.]+(\(.*\))?", core) else f"({core})"
            score_lines.append(f"s = {core} * {scale}{bias}")
        # Masks come first in a tile: what scores need too is spelled in both places.
        mask_lines = self._lines(program.in_loop(needed_by=only_masked), printer)
        if loop.inner_live != TRUE:
            live = f"{inner}_live = {printer.own(program.results['inner_live'])}"
            first_use = next(
                (i for i, line in enumerate(mask_lines) if f"{inner}_live" in line), len(mask_lines)
            )
            mask_lines.insert(first_use, live)
        if loop.masked:
            mask_lines.append(f"mask = {printer.tile(program.results['mask'])}")
        return {
            "masked": loop.masked,
            "mask_lines": mask_lines,
            "row_lines": row_lines,
            "score_lines": score_lines,
            "logits": logits,
            "scaled": scaled,
            "dead_rows": loop.masked or not plan.form.finite,
            "lse_lines": self._lse_lines(loop, printer),
        }

    def _read_by_rows(
        self, binding: Binding, loop: TileLoop, printer: Printer
    ) -> tuple[list[str], list[str]] | None:
        """How a tile of a buffer is read that has the loop's index as one of its own: addresses of its first tile,
        before the loop, and the loads in it, which in tiles without a mask ask only for what exists of the outer index.
        None for any other read."""
        read, inner, place = binding.node, loop.inner.index, loop.program.place
        if not (
            isinstance(read, Read)
            and binding.place == TILE
            and loop.masked
            and read.indices.count(inner) == 1
        ):
            return None
        if any(place(index).in_loop for index in read.indices if index != inner):
            return None
        axes, side = printer.axes, inner.name.removesuffix("_idx")
        whole = {**printer.ranges.greatest, inner.name: {loop.inner.size.name: 1, "": -1}}
        unmasked = replace(printer, ranges=replace(printer.ranges, greatest=whole))
        offsets = {"kv": "offs_n", "q": "offs_m"}[side]
        rows = re.sub(rf"\b{inner.name}\b", offsets, printer.address(read.buffer, read.indices, axes))
        at = f"{binding.name}_rows + {side}_start * stride_{read.buffer}_{read.indices.index(inner)}"
        masked, full = (
            printer.loaded(read.buffer, at, p.guard(read.buffer, read.indices, axes))[0]
            for p in (printer, unmasked)
        )
        lines = [f"{binding.name} = {full}"]
        if masked != full:
            lines = ["if MASKED:", f"    {binding.name} = {masked}", "else:", f"    {binding.name} = {full}"]
        return [f"{binding.name}_rows = {rows}"], lines

    def _gradient_fields(self, loop: TileLoop, printer: Printer) -> dict[str, Any]:
        """What follows `ds`, the gradient of the modified score, inside a tile and after the loop."""
        program = loop.program
        lines: list[str] = []
        for g in loop.gradients:
            part = self._contribution(loop, printer, g, lines)
            if g.along == "pair":
                address = printer.address(
                    f"d_{g.name}",
                    tuple(program.results[f"d_{g.name}_{i}"] for i in range(len(g.indices))),
                    ("q", "kv"),
                )
                guards = [
                    printer.guard(
                        g.buffer,
                        tuple(program.results[f"d_{g.name}_{i}"] for i in range(len(g.indices))),
                        ("q", "kv"),
                    )
                ]
                factor = "" if is_one(g.factor) else f" * {self._scalar(g.factor, printer)}"
                inside = " & ".join(x for x in guards if x)
                if loop.masked:
                    both = f"mask & {inside}" if inside else "mask"
                    lines += [
                        "if MASKED:",
                        f"    tl.atomic_add({address}, {part}{factor}, mask={both})",
                        "else:",
                    ]
                    lines.append(
                        f"    tl.atomic_add({address}, {part}{factor}{', mask=' + inside if inside else ''})"
                    )
                else:
                    lines.append(
                        f"tl.atomic_add({address}, {part}{factor}{', mask=' + inside if inside else ''})"
                    )
            else:
                lines.append(f"d_{g.name} += tl.sum({part}, 1)")
        dqk = "ds"
        if not is_one(loop.dscore):
            dqk = "dqk"
            lines.append(f"dqk = ds * {bracketed(printer.tile(program.results['dscore']))}")
            if loop.masked and self._may_be_nan(loop.dscore):
                lines += ["if MASKED:", "    dqk = tl.where(mask, dqk, 0.0)"]
        kept = [g for g in loop.gradients if g.along != "pair"]
        scattered = [g for g in loop.gradients if g.along == "pair"]
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
        return {
            "gradient_lines": lines,
            "dqk": dqk,
            "dqk_scale": self._scalar_product([Var("scale", Type.FLOAT), loop.dscore_factor], printer),
            "accumulators": [f"d_{g.name}" for g in kept],
            "row_gradients": [
                {
                    "name": f"d_{g.name}",
                    "value": f"d_{g.name}"
                    if is_one(g.factor)
                    else f"d_{g.name} * {self._scalar(g.factor, printer)}",
                }
                for g in kept
            ],
            "gradient_params": " ".join(f"{p}," for p in params),
            "gradient_args": " ".join(f"{a}," for a in args),
            "also": "".join(f", and {a}" for a in dict.fromkeys(also)),
        }

    def _contribution(self, loop: TileLoop, printer: Printer, g: ReadGradient, lines: list[str]) -> str:
        """What a tile adds to the gradient of a read, before it is summed."""
        if is_one(g.derivative):
            return "ds"
        part = f"ds * {bracketed(printer.tile(loop.program.results[f'd_{g.name}']))}"
        if not (loop.masked and self._may_be_nan(g.derivative)):
            return part
        lines += [f"part = {part}", "if MASKED:", "    part = tl.where(mask, part, 0.0)"]
        return "part"

    def pair(self, loop: TileLoop) -> dict[str, Any]:
        """The kernel for a gradient with an element for each (query, key)."""
        program, (g,) = loop.program, loop.gradients
        assert g.summed is not None
        printer = self.printer(loop)
        fields = self._recomputed(loop, printer)
        present = [d for d in ("b", "h") if d in g.summed]
        at = {
            (): ("", ""),
            ("b",): ("outer", ""),
            ("h",): ("", "outer"),
            ("b", "h"): ("outer // HQ", "outer % HQ"),
        }
        b, h = at[tuple(present)]
        name, bounds = fields["name"], self._bounds()
        address = printer.address(
            name,
            tuple(Var({"b": "outer_b", "h": "outer_h"}.get(n, n), Type.INT) for n in g.summed),
            ("q", "kv"),
        )
        lines, inside = (self._lines(program.before_loop(), p) for p in (printer, self._inside(printer)))
        unguarded = {line: other for line, other in zip(lines, inside, strict=True) if line != other}
        return fields | {
            "stride_params": ", ".join(f"stride_{name}_{d}: tl.int64" for d in range(len(g.indices))),
            "inside": " & ".join(f"({b.whole})" for b in bounds),
            "bounded": bool(bounds),
            "given": [f"{n} = {value}" for n, value in (("b", b), ("h", h)) if value],
            "prologue": [
                x
                for line in _at_first_use(lines, self._conditions(loop, printer, in_loop=False))
                for x in _in_two(line, unguarded.get(line))
            ],
            "count": {(): "B * HQ", ("b",): "HQ", ("h",): "B", ("b", "h"): "1"}[tuple(present)],
            "summed": {
                (): ["b, h = inner // HQ, inner % HQ"],
                ("b",): ["h = inner"],
                ("h",): ["b = inner"],
                ("b", "h"): [],
            }[tuple(present)],
            "programs": {(): "", ("b",): " * B", ("h",): " * HQ", ("b", "h"): " * B * HQ"}[tuple(present)],
            "address": address.replace("outer_b", b).replace("outer_h", h),
            "store_guard": f", mask={' & '.join(b.guard for b in bounds)}" if bounds else "",
        }

    def diagonal(self, loop: TileLoop) -> dict[str, Any]:
        """The kernel for a gradient with an element for each distance of each (b, h)."""
        program, printer = loop.program, self.printer(loop)
        allowed = program.results.get("allowed")
        return self._recomputed(loop, printer) | {
            "prologue": _at_first_use(
                self._lines(program.before_loop(), printer), self._conditions(loop, printer, in_loop=False)
            ),
            "bounded": allowed is not None,
            "allowed": "" if allowed is None else printer.tile(allowed),
        }

    def _recomputed(self, loop: TileLoop, printer: Printer) -> dict[str, Any]:
        """A tile of the gradient of the modified score, recomputed by a kernel that is for the gradient of a buffer."""
        plan, program, (g,) = self.plan, loop.program, loop.gradients
        fields = self._tile_fields(loop, printer)
        lines: list[str] = []
        part = self._contribution(loop, printer, g, lines)
        lines = [line.strip() for line in lines if line.strip() != "if MASKED:"]
        q_live, kv_live = program.results["outer_live"], program.results["inner_live"]
        q_guard = "" if q_live == TRUE else "q_live[:, None]"
        kv_guard = "" if kv_live == TRUE else "kv_live[:, None]"
        # Loads need what a mask leaves of either side, too.
        mask_lines = _at_first_use(
            self._lines(program.in_loop(needed_by=("mask", "inner_live", "outer_live")), printer),
            self._conditions(loop, printer, in_loop=True),
        )
        scored = [line for line in fields["score_lines"] if line not in mask_lines]
        return fields | {
            "name": f"d_{g.name}",
            "mask_lines": mask_lines,
            "score_lines": scored,
            "q_loads": [self.load(c, q_guard) for c in plan.qk_chunks],
            "k_loads": [self._streamed(c, kv_guard) for c in plan.qk_chunks],
            "v_loads": [
                replace(self._streamed(c, kv_guard), do_guard=self.load(c, q_guard).guard)
                for c in plan.v_chunks
            ],
            "vector_load": ", mask=q_live, other=0.0" if q_live != TRUE else "",
            "gradient_lines": lines,
            "part": part,
            "factor": "" if is_one(g.factor) else f" * {self._scalar(g.factor, printer)}",
        }

    def _conditions(self, loop: TileLoop, printer: Printer, in_loop: bool) -> list[str]:
        """Which positions of each side of a tile are there, and its mask: computed in the loop, or before it."""
        program, names = loop.program, {"q_live": "outer_live", "kv_live": "inner_live"}
        own = {name: printer.own(program.results[result]) for name, result in names.items()}
        own |= {"mask": printer.tile(program.results["mask"])}
        return [
            f"{name} = {text}"
            for name, text in own.items()
            if (node := program.results[names.get(name, name)]) != TRUE
            and program.place(node).in_loop == in_loop
        ]

    def _bounds(self) -> list[_Bound]:
        """Of a tile of both sides: which of its sides may reach past the end."""
        sides = (
            (self.plan.q, _Bound("q_start + BLOCK_M <= SQ", "(q_idx < SQ)[:, None]")),
            (self.plan.kv, _Bound("kv_start + BLOCK_N <= SK", "(kv_idx < SK)[None, :]")),
        )
        return [bound for guards, bound in sides if guards.bound != TRUE]

    def _inside(self, printer: Printer) -> Printer:
        """A printer for tiles that no side of reaches past the end."""
        greatest = {"q_idx": {"SQ": 1, "": -1}, "kv_idx": {"SK": 1, "": -1}}
        return replace(
            printer, ranges=replace(printer.ranges, greatest={**printer.ranges.greatest, **greatest})
        )

    def _searches(self, loop: TileLoop, printer: Printer) -> tuple[list[str], list[Span]]:
        """Searches of sorted buffers that the bounds of a loop ask for, two of one row at a time, and the spans
        over their results."""
        rows: dict[tuple[str, tuple[Node, ...]], list[Read]] = {}
        for node in (
            n for s in loop.spans for bound in (s.lo, s.hi, s.full_lo, s.full_hi) for n in walk(bound)
        ):
            if isinstance(node, Read) and node.buffer.endswith(FIRST_AT_LEAST):
                searches = rows.setdefault((node.buffer, node.indices[:-1]), [])
                searches += [node] * (node not in searches)
        names: dict[Node, Var] = {}
        lines = []
        for searches in rows.values():
            for first, second in zip(searches[::2], [*searches[1::2], searches[-1]], strict=False):
                for node in (first, second):
                    stem = node.buffer.removesuffix(FIRST_AT_LEAST)
                    names.setdefault(node, Var(f"{stem}_first_{len(names)}", Type.INT))
                other = names[second].name if first != second else "_"
                lines.append(f"{names[first].name}, {other} = {printer.search(first, second)}")
        found = dict[Node, Node](names)
        return lines, [
            replace(
                s,
                lo=substitute(s.lo, found),
                hi=substitute(s.hi, found),
                full_lo=substitute(s.full_lo, found),
                full_hi=substitute(s.full_hi, found),
            )
            for s in loop.spans
        ]

    def _span(self, span: Span, loop: TileLoop, printer: Printer, first: bool, last: bool) -> dict[str, Any]:
        """Tile-aligned loop bounds of one span, and the loops between them."""
        x = loop.inner.index.name.removesuffix("_idx")
        block = "BLOCK_N" if x == "kv" else "BLOCK_M"
        size = loop.inner.size
        lines: list[str] = []
        lo = "0"
        if span.lo != Const(0, Type.INT):
            lines.append(f"{x}_lo = {bracketed(printer.own(span.lo))} // {block} * {block}")
            lo = f"{x}_lo"
        if not first:
            # What the span before this one has visited is done.
            lines[-1:] = (
                [f"{x}_lo = tl.maximum({value_of(lines[-1])}, {x}_done)"]
                if lo != "0"
                else [f"{x}_lo = {x}_done"]
            )
            lo = f"{x}_lo"
        lines.append(f"{x}_hi = {printer.own(span.hi)}")
        if not last:
            lines.append(f"{x}_done = tl.cdiv({x}_hi, {block}) * {block}")
        if not span.has_full or not loop.masked:
            return {"bounds": lines, "loops": [{"lo": lo, "hi": f"{x}_hi", "masked": loop.masked}]}
        full_lo, full_hi = lo, f"{x}_full_hi"
        from_start = span.full_lo == span.lo == Const(0, Type.INT) and first
        if not from_start:
            aligned = f"tl.cdiv({printer.own(span.full_lo)}, {block}) * {block}"
            lines.append(f"{x}_full_lo = {f'tl.maximum({aligned}, {lo})' if lo != '0' else aligned}")
            full_lo = f"{x}_full_lo"
        if span.full_hi == span.hi == size and self._divisible(x):
            head = {"lo": lo, "hi": f"tl.minimum({full_lo}, {x}_hi)", "masked": True}
            rest = {"lo": full_lo, "hi": f"{x}_hi", "masked": False}
            return {"bounds": lines, "loops": [rest] if from_start else [head, rest]}
        lines.append(f"{x}_full_hi = {bracketed(printer.own(span.full_hi))} // {block} * {block}")
        full = {"lo": full_lo, "hi": full_hi, "masked": False}
        if from_start:
            return {"bounds": lines, "loops": [full, {"lo": full_hi, "hi": f"{x}_hi", "masked": True}]}
        lines.append(f"{x}_gap = tl.maximum({full_hi} - {full_lo}, 0)")
        ends = {"lo": lo, "hi": f"{x}_hi", "masked": True, "gap": f"{full_lo}, {x}_gap"}
        return {"bounds": lines, "loops": [ends, full]}

    def _range(self, loop: TileLoop, outer: str, inner: str, gapped: bool) -> dict[str, str]:
        """What a tile function is told of the tiles to visit, and the lists that its kernel takes."""
        words = {"q": "query", "kv": "KV"}[inner]
        if not loop.listed:
            names = [f"{inner}_lo", f"{inner}_hi", *["turn"] * loop.rotated, *["gap_lo", "gap"] * gapped]
            visited = f"{words} tiles of [{inner}_lo, {inner}_hi)"
            return {"range_params": "".join(f"{n}, " for n in names), "visited": visited} | NO_LISTS
        lists = lists_of(inner)
        return {
            "range_params": f"{inner}_blocks, n_blocks, ",
            "visited": f"{words} tiles of n_blocks listed blocks",
            "list_params": "".join(f"{n}_ptr, " for n in lists),
            "list_args": "".join(f"{n}, " for n in lists),
        }

    def _lists(self, loop: TileLoop) -> dict[str, Any]:
        """The loops over what the block mask lists for a tile: blocks with the mask, and blocks without it."""
        assert self.plan.block_mask is not None
        outer, inner = (axis.index.name.removesuffix("_idx") for axis in (loop.outer, loop.inner))
        num_blocks, full_num_blocks, indices = (f"{n}_ptr" for n in lists_of(inner))
        head = {(True, True): "(b * HQ + h)", (True, False): "b", (False, True): "h", (False, False): ""}
        plane = head[self.plan.block_mask.by_batch, self.plan.block_mask.by_head]
        blocks = {"q": "tl.cdiv(SQ, BLOCK_SIZE)", "kv": "tl.cdiv(SK, BLOCK_SIZE)"}
        own = f"{loop.outer.start.name} // BLOCK_SIZE"
        lines = [
            f"row = {plane} * {blocks[outer]} + {own}" if plane else f"row = {own}",
            f"n_partial, n_full = tl.load({num_blocks} + row), tl.load({full_num_blocks} + row)",
            f"{inner}_blocks = {indices} + row.to(tl.int64) * {blocks[inner]}",
        ]
        listed = f"{inner}_blocks"
        return {
            "bounds": lines,
            "loops": [
                {"lo": listed, "hi": "n_partial", "masked": loop.masked},
                {"lo": f"{listed} + n_partial", "hi": "n_full", "masked": False},
            ],
        }

    def _divisible(self, x: str) -> bool:
        return (self.plan.kv if x == "kv" else self.plan.q).bound == TRUE

    def _split_by_head(self, loop: TileLoop, before: list[str]) -> tuple[list[str], list[str]]:
        """Lines that depend on the query head, and those that do not; without groups there is nothing to split."""
        if self.spec.gqa == 1:
            return [], before
        changing = {"h"}
        by_head, shared = [], []
        for line in before:
            name, _, value = line.partition(" = ")
            if changing & set(re.findall(r"\w+", value)):
                changing.add(name)
                by_head.append(line)
            else:
                shared.append(line)
        return by_head, shared

    def _tile_arguments(
        self,
        loop: TileLoop,
        fields: dict[str, Any],
        streamed: tuple[str, ...],
        before: list[str],
        descriptors: bool,
    ) -> tuple[str, str]:
        """Parameters of the tile function: what its body uses of the kernel's names; and what the kernel passes."""
        plan = self.plan
        backward = loop is not plan.forward
        outer = loop.outer.index.name
        held = ("q",) if loop is plan.forward else ("q", "do") if outer == "q_idx" else ("k", "v")
        chunks = {"q": plan.qk_chunks, "k": plan.qk_chunks, "v": plan.v_chunks, "do": plan.v_chunks}
        names = [f"{x}{c.tag}" for x in held for c in chunks[x]]
        names += ["lse", "delta"] if backward and outer == "q_idx" else []
        values = {n: n for n in names}
        for x in streamed:
            names.append(f"{x}_ptr")
            values[f"{x}_ptr"] = f"{x}_ptr" if outer == "q_idx" else f"{x}_head"
        if backward and outer == "kv_idx":
            names += ["lse_ptr", "delta_ptr"]
            values |= {"lse_ptr": "lse_head", "delta_ptr": "delta_head"}
        if descriptors:
            names += [f"{x}_desc{c.tag}" for x in streamed for c in chunks[x]]
            names += tma_row(self.packed, SIDES[streamed[0]], "h_kv" if outer == "q_idx" else "h")[1]
        names += [f"stride_{LETTERS[x]}{d}" for x in streamed for d in "sd"]
        body = [*fields["mask_lines"], *fields["score_lines"], *fields.get("gradient_lines", [])]
        body += [*fields["row_lines"], fields["scaled"]]
        body += [*fields["lse_lines"], fields["vector_load"]] if outer == "kv_idx" else []
        used = set(re.findall(r"\w+", "\n".join(body)))
        outside = [line.partition(" = ")[0] for line in before]
        candidates = [
            "b",
            "h",
            outer,
            "q_start",
            *outside,
            *self.problem,
            *("SQ", "SK") * self.packed,
            *_pointer_names(fields.get("gradient_params", "")),
        ]
        candidates = [c for c in candidates if c != loop.inner.start.name]
        names += [c for c in dict.fromkeys(candidates) if c in used and c not in names]
        annotations = {"stride_kd": "", "GQA": ": tl.constexpr"}
        return (
            wrapped([f"{n}{annotations.get(n, '')}" for n in names], 4),
            wrapped([values.get(n, n) for n in names], 8),
        )

    # --- printing ------------------------------------------------------------------------------------------------

    def printer(self, loop: TileLoop, program: Program | None = None) -> Printer:
        """A printer for the expressions of a loop, or for those of another program over the same indices."""
        rows = loop.outer.index.name.removesuffix("_idx")
        return Printer(
            program or loop.program,
            rows,
            self.layouts,
            self.plan.index_ranges,
            self.constants,
            self.spec.fast_math,
            self.helpers,
        )

    def _lines(self, bindings: Iterable[Binding], printer: Printer) -> list[str]:
        return [f"{b.name} = {printer.over(b.node, b.place.axes)}" for b in bindings]

    def _row_rest(self, loop: TileLoop, printer: Printer, sign: str) -> str:
        rest = loop.program.results.get("row_rest")
        return "" if rest is None else f" {sign} {printer.own(rest, MUL)}"

    def _lse_lines(self, loop: TileLoop, printer: Printer) -> list[str]:
        """What turns the stored log-sum-exp into the one of the loop's logits."""
        rest = self._row_rest(loop, printer, "-")
        lines = [f"lse = lse{rest}"] if rest else []
        if not self.plan.form.finite:
            # Every logit of the row is -inf, and so is lse: -inf - inf makes P zero, where -inf - -inf would be NaN.
            lines.append('lse = tl.where(lse == float("-inf"), float("inf"), lse)')
        return lines

    def _may_be_nan(self, node: Node) -> bool:
        """Whether a value may be infinite or NaN at a position that does not count; zero times it would be NaN."""
        params = self.spec.params

        def divides_by_zero(n: Call) -> bool:
            divisor = n.args[-1]
            if isinstance(divisor, Var) and divisor.name in params:
                return not params[divisor.name].value
            return not (isinstance(divisor, Const) and divisor.value)

        def open_ended(n: Node) -> bool:
            if isinstance(n, Call):
                unbounded = n.fn in ("log", "log2", "sqrt", "rsqrt", "exp", "exp2")
                return unbounded or (n.fn == "div" and divides_by_zero(n))
            return (isinstance(n, Read) and n.type is Type.FLOAT) or (isinstance(n, Var) and n.name == "inf")

        return any(open_ended(n) for n in walk(node))

    def _scalar(self, node: Node, printer: Printer) -> str:
        """A number of one (b, h), printed in full where it is used once, after a loop."""
        program = hoist({}, {})
        alone = replace(printer, program=program)
        return bracketed(alone.own(node))

    def _scalar_product(self, factors: list[Node], printer: Printer) -> str:
        kept = [self._scalar(f, printer) for f in factors if not is_one(f)]
        return kept[0] if len(kept) == 1 else f"({' * '.join(kept)})"

    def chunk(self, chunk: Chunk) -> dict[str, Any]:
        first = chunk.start == 0
        return {
            "tag": chunk.tag,
            "columns": chunk.columns,
            "range": f"{chunk.start} + tl.arange(0, {chunk.size})"
            if chunk.start
            else f"tl.arange(0, {chunk.size})",
            "streamed": streamed_columns(chunk),
            "size": chunk.size,
            "onto_qk": "" if first else ", qk",
            "onto_dp": "" if first else ", dp",
        }

    def _operands(
        self, streamed: tuple[str, ...], held: tuple[str, ...], guards: dict[str, str]
    ) -> dict[str, Any]:
        """How a kernel loads the tiles that stream through its loop and those that it holds: by TMA, or by pointers.

        TMA reads zeros past the end of a tensor, or of a packed sequence. Rows that only the mask hides may hold NaN:
        pointers leave them out.
        """
        hidden = {"q": self.plan.q.live != self.plan.q.bound, "kv": self.plan.kv.live != self.plan.kv.bound}
        tiles = {x: self._operand(x, guards[SIDES[x]]) for x in (*streamed, *held)}
        by_tma = [x for x in SIDES if x in streamed or (x in held and not hidden[SIDES[x]])]
        blocks = [(block, tiles[x]["rows"]) for x in by_tma for block in tiles[x]["blocks"]]
        side = SIDES[streamed[0]]
        stream = {"by_tma": "TMA and not MASKED" if hidden[side] else "TMA", "guarded": bool(guards[side])}
        return {
            "stream": stream | {"tiles": [tiles[x] for x in streamed]},
            **{f"{x}_stream": stream | {"tiles": [tiles[x]]} for x in streamed},
            "held": [tiles[x] | {"by_tma": x in by_tma} for x in held],
            "desc_params": " ".join(f"{block['desc']}," for block, _ in blocks),
            "desc_names": ", ".join(block["desc"] for block, _ in blocks),
            "desc_blocks": ", ".join(
                f'({block["tensor"]}, tile["{rows}"], {block["size"]})' for block, rows in blocks
            ),
            "tma_tensors": "".join(f", {x}" for x in dict.fromkeys(block["tensor"] for block, _ in blocks)),
        }

    def _operand(self, x: str, guard: str) -> dict[str, Any]:
        """A tile of q, k, v or dO in its blocks of columns."""
        side = SIDES[x]
        rows, offsets, head = ("BLOCK_M", "offs_m", "h") if side == "q" else ("BLOCK_N", "offs_n", "h_kv")
        stride = f"stride_{LETTERS[x]}"
        chunks = self.plan.qk_chunks if x in ("q", "k") else self.plan.v_chunks
        return {
            "rows": rows,
            "step": f"{side}_start * {stride}s",
            "guard": f", mask={guard}, other=0.0" if guard else "",
            "blocks": [
                {
                    "name": f"{x}{c.tag}",
                    "tensor": "dout" if x == "do" else x,
                    "size": c.size,
                    "desc": f"{x}_desc{c.tag}",
                    "at": f"{tma_row(self.packed, side, head)[0]}, {c.start}",
                    "pointers": f"{x}_rows{c.tag}",
                    "own": f"{x}_ptr + {offsets}[:, None] * {stride}s + {c.columns}[None, :] * {stride}d",
                    "own_guard": self.load(c, guard).guard,
                }
                for c in chunks
            ],
        }

    def _streamed(self, chunk: Chunk, rows: str) -> _Load:
        guard = f", mask={rows}, other=0.0" if rows else ""
        return _Load(chunk.tag, streamed_columns(chunk), chunk.size, guard)

    def load(self, chunk: Chunk, rows: str, store_rows: str = "") -> _Load:
        exists = (
            f"({chunk.columns} < {chunk.start + chunk.width})[None, :]" if chunk.width < chunk.size else ""
        )
        both = " & ".join(x for x in (rows, exists) if x)
        stored = " & ".join(x for x in (store_rows, exists) if x)
        return _Load(
            chunk.tag,
            chunk.columns,
            chunk.size,
            guard=f", mask={both}, other=0.0" if both else "",
            store_guard=f", mask={stored}" if stored else "",
        )


def streamed_columns(chunk: Chunk) -> str:
    """Columns of a load inside the loop, all of which exist.

    A padded block repeats its last column: the resident operand is zero there, or the product is not
    stored. (A mask would do, but Triton 3.6 reads outside of it where rows are not aligned.)
    """
    if chunk.width == chunk.size:
        return chunk.columns
    return f"tl.minimum({chunk.columns}, {chunk.start + chunk.width - 1})"


def accumulators(loop: TileLoop) -> list[str]:
    return [f"d_{g.name}" for g in loop.gradients if g.along != "pair"]


def _at_first_use(lines: list[str], definitions: list[str]) -> list[str]:
    """Lines with each definition ahead of the first that uses it, or at the end."""
    lines = list(lines)
    for definition in definitions:
        name = definition.partition(" = ")[0]
        if name == "mask":  # bindings are made of its parts, and loads have a `mask=`
            lines.append(definition)
            continue
        uses = (i for i, line in enumerate(lines) if name in re.findall(r"\w+", line.partition(" = ")[2]))
        lines.insert(next(uses, len(lines)), definition)
    return lines


def _in_two(line: str, unguarded: str | None) -> list[str]:
    """A line, or what it is in tiles that are inside of both tensors and in the others."""
    return [line] if unguarded is None else ["if whole:", f"    {unguarded}", "else:", f"    {line}"]


def _pointer_names(params: str) -> list[str]:
    return [p.split(":")[0].strip() for p in params.split(",") if p.strip()]
