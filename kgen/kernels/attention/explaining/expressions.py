"""Sections on the expressions of a spec, their softmax form, and the place of each value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kgen.expr.differentiate import is_one
from kgen.expr.hoist import Binding, Place, Program
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Node, Var, substitute, variables
from kgen.expr.softmax_form import QK, SCORE
from kgen.expr.spelling import MUL as TIMES
from kgen.expr.unparse import show
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop
from kgen.kernels.attention.plan.tile_reads import element_bounds
from kgen.kernels.attention.spec import Buffer
from kgen.pages.model import Block, Code, Formula, Line, Lines, Prose, Words, words


def formula(plan: AttentionPlan, written: Mapping[str, Node]) -> Iterator[Block]:
    """Yield the formula of the output."""
    allowed = ", over the keys that mask_mod allows" if "mask_mod" in written else ""
    yield Lines((Line(f"out = softmax(score_mod(scale * q @ k^T)) @ v{allowed}"),))


def as_read(plan: AttentionPlan, written: Mapping[str, Node]) -> Iterator[Block]:
    """Yield the expressions, and the parameters and buffers that they name."""
    spec = plan.spec
    score, mask = written.get("score_mod", SCORE), written.get("mask_mod", TRUE)
    yield Lines((Line(f"score_mod = {show(score)}"), Line(f"mask_mod  = {show(mask)}")))
    for name, found, first in (
        ("score_mod", plan.score_mod, score),
        ("mask_mod", plan.mask_mod, mask),
    ):
        if found is not None and found != first:
            yield Prose(words("Canonical form: ", Code(f"{name} = {show(found)}")))
    for name, param in spec.params.items():
        if param.runtime:
            yield Prose(words(Code(name), " is an argument of every call"))
        else:
            yield Lines((Line(f"{name} = {param.value}", "compiled in"),))
    for name, buffer in spec.buffers.items():
        shape = ", ".join(map(str, buffer.shape))
        yield Prose(
            words(
                Code(name),
                " is a tensor ",
                Code(f"[{shape}]"),
                f" of {buffer.dtype_words}{_promises(buffer)}",
            )
        )
    if spec.varlen:
        yield _said(
            "Sequences are packed: positions, SQ and SK belong to one sequence, and b is its number"
        )
    if spec.sinks:
        yield _said(
            "sinks is a tensor [HQ]: a logit that joins the sum of every row of its head, and has "
            "no value"
        )


def _promises(buffer: Buffer) -> str:
    """Describe the values that a spec promises for a buffer, and its gradient."""
    found = [", sorted"] if buffer.sorted else []
    if buffer.within is not None:
        found.append(f", within {buffer.within} of zero")
    if buffer.grad:
        found.append(", with a gradient")
    return "".join(found)


def _said(text: str) -> Prose:
    return Prose(words(text))


# --- softmax ------------------------


def softmax(plan: AttentionPlan) -> Iterator[Block]:
    """Yield the logits that the loop computes, and the terms that were folded, dropped and
    peeled.
    """
    form = plan.form
    yield Prose(
        words(
            "Kernels use 2^x instead of e^x: e^x is ", Code("2^(LOG2E * x)"),
            ", with LOG2E = log2(e).\n",
            "qk is the product of a query and a key, and ", Code("score = scale * qk"), ".\n",
            "For each (query, key) the loop computes",
        )
    )  # fmt: skip
    bias = "" if form.bias is None else f" + {show(form.bias)}"
    yield Formula((f"{product([form.core, form.multiplier])}{bias}",))
    if form.core == QK:
        factor = show(form.multiplier)
        names = (
            "scale and LOG2E"
            if _is_plain(form.multiplier)
            else "scale, LOG2E and the slope of score_mod"
        )
        yield Prose(
            words(
                f"Folded: score_mod is linear in the score, so {names} are one factor, ",
                Code(factor),
                ".",
            )
        )
    else:
        yield _said("Not folded: score_mod is not linear in the score, so scale is applied first.")
        peeled = sorted(variables(form.multiplier) - {"LOG2E"})
        if peeled:
            yield _said(
                f"Peeled: the factor of the whole score ({', '.join(peeled)}) is multiplied with "
                "LOG2E, once."
            )
    if form.row_rest is not None:
        yield Prose(
            words(
                "Dropped: ", Code(show(form.row_rest)),
                ". It is the same for all keys of a query, so it does not change the\n"
                "softmax. Only the log-sum-exp adds it, once for each query.",
            )
        )  # fmt: skip
        if form.bias is not None and "q_start" in variables(form.bias):
            yield _said("The bias uses q_start, the first query of a tile, instead of q_idx.")
    if form.max_of_core:
        yield _said(
            "The factor is positive: row maxima are taken before it, and it needs no extra "
            "instruction."
        )
    if not form.finite:
        yield _said(
            "A score may be infinite or NaN: kernels check for rows without a finite logit."
        )


def _is_plain(multiplier: Node) -> bool:
    return variables(multiplier) == {"LOG2E", "scale"}


def product(factors: Iterable[Node]) -> str:
    """Return the product of the factors that are not 1, with brackets where they are needed."""
    kept = [f for f in factors if not is_one(f)]
    multiplied = TIMES if len(kept) > 1 else 0
    return (
        " * ".join(show(f, multiplied + (i > 0 and multiplied > 0)) for i, f in enumerate(kept))
        or "1"
    )


# --- places ------------------------


def places(loop: TileLoop) -> Iterator[Block]:
    """Yield the values of the loop, by the place where each is computed."""
    program = loop.program
    yield _said("The emitted file uses the same names.")
    groups: dict[str, list[Line]] = {heading: [] for heading in _HEADINGS}
    for binding in program.bindings:
        group = groups[_heading(binding.place, binding.node, program)]
        once = (_read_once(low, high) for low, high in element_bounds(binding, loop).values())
        group.append(Line(f"{binding.name} = {show(binding.node)}", below=tuple(once)))
    results = program.results
    axis = {"outer_live": loop.outer, "inner_live": loop.inner}
    for name, side in axis.items():
        if results[name] != TRUE:
            live = Var(f"{side.index.name.removesuffix('_idx')}_live", results[name].type)
            group = groups[_heading(program.place(live), live, program)]
            group.append(Line(f"{live.name} = {show(results[name])}"))
    if "row_rest" in results:
        groups[_QUERY].append(Line(f"lse = lse of the loop + {show(results['row_rest'])}"))
    if loop.masked:
        groups[_PAIR].append(Line(f"mask = {show(results['mask'])}"))
    bias = f" + {show(results['bias'])}" if "bias" in results else ""
    groups[_PAIR].append(Line(f"s = {product([results['core'], results['qk_scale']])}{bias}"))
    for heading, lines in groups.items():
        if lines:
            yield Lines(tuple(lines), words(heading))


def _read_once(low: Node, high: Node) -> Words:
    return words(
        "read once for all pairs of a tile if the least and greatest index are equal,\n",
        Code(show(low)),
        " and\n",
        Code(show(high)),
    )


_KERNEL, _HEAD, _QUERIES = (
    "the same everywhere",
    "once for each (b, h)",
    "once for each tile of queries",
)
_QUERY, _KEYS, _KEY, _PAIR = (
    "for each query, before the loop",
    "for each tile of keys",
    "for each key of a tile",
    "for each (query, key)",
)
_HEADINGS = (_KERNEL, _HEAD, _QUERIES, _QUERY, _KEYS, _KEY, _PAIR)


def _heading(place: Place, node: Node, program: Program) -> str:
    if len(place.axes) == 2:
        return _PAIR
    if place.axes:
        return _QUERY if place.axes == ("q",) else _KEY
    if place.in_loop:
        return _KEYS
    names = variables(_in_full(node, program.bindings))
    if names & {"q_start", "q_last"}:
        return _QUERIES
    return _HEAD if names & {"b", "h"} else _KERNEL


def _in_full(node: Node, bindings: Iterable[Binding]) -> Node:
    """Replace the names of bindings by their definitions."""
    full: dict[Node, Node] = {}
    for binding in bindings:
        full[Var(binding.name, binding.node.type)] = substitute(binding.node, full)
    return substitute(node, full)
