"""The blocks of `docs/walkthrough.md`: the form of one spec after every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from kgen.expr.canonical import canonical
from kgen.expr.nodes import Call, Const, Node, Read, Var
from kgen.expr.unparse import show
from kgen.kernels.attention.lowered.bodies import body_of
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.schedules.hopper.conditions import without_kernels
from kgen.kernels.attention.schedules.hopper.plan import HopperPlan, HopperTile, plan_hopper
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, load, loads
from kgen.targets.code import GLUON, TRITON, lines_of

ROOT = Path(__file__).resolve().parents[3]
SPEC = ROOT / "specs" / "causal_alibi.yaml"
SPELLED_OTHERWISE = {
    "score + slopes[h] * (kv_idx - q_idx)": "score - slopes[h] * (q_idx - kv_idx)",
    "q_idx >= kv_idx": "not (kv_idx > q_idx)",
}
WITHOUT_KERNELS = ("gpt_oss", "longformer", "causal_fp32")
"""Specs with a pass that has no kernels for Hopper."""


@cache
def loaded() -> Loaded:
    return load(SPEC)


@cache
def plan() -> AttentionPlan:
    return plan_attention(loaded())


def read() -> Iterable[str]:
    """The trees of a spec, as nodes."""
    for field, tree in loaded().trees.items():
        yield f"{field}:"
        yield from (f"  {line}" for line in _tree(tree))


def _tree(node: Node) -> Iterable[str]:
    match node:
        case Call(fn, args):
            yield f"{fn}  ({node.type.name.lower()})"
            children: tuple[Node, ...] = args
        case Read(buffer, indices):
            yield f"read {buffer}  ({node.type.name.lower()})"
            children = indices
        case Var(name) | Const(name):
            yield f"{name}  ({node.type.name.lower()})"
            children = ()
    for child in children:
        yield from (f"  {line}" for line in _tree(child))


def one_form() -> Iterable[str]:
    """Two spellings of the expressions, and the form that both have."""
    text = loaded().text
    for written, otherwise in SPELLED_OTHERWISE.items():
        assert written in text
        text = text.replace(written, otherwise)
    forms = []
    for spelling in (loaded(), loads(text, SPEC)):
        form = canonical(spelling.trees)
        forms.append(form)
        for field, tree in spelling.trees.items():
            yield f"{field + ':':10} {show(tree):40} -> {show(form[field])}"
    assert forms[0] == forms[1]


def softmax() -> Iterable[str]:
    """The logits of the loop."""
    form = plan().form
    yield f"core:       {show(form.core)}"
    yield f"multiplier: {show(form.multiplier)}"
    if form.bias is not None:
        yield f"bias:       {show(form.bias)}"
    if form.row_rest is not None:
        yield f"row_rest:   {show(form.row_rest)}"


def program() -> Iterable[str]:
    """The place of each value."""
    loop = plan().forward
    for binding in loop.program.bindings:
        place = binding.place
        where = "in the loop" if place.in_loop else "before it"
        axes = " x ".join(place.axes) or "one number"
        yield f"{binding.name:10} = {show(binding.node):46} {where}, {axes}"
    for name, node in loop.program.results.items():
        yield f"-> {name:12} {show(node)}"


def spans() -> Iterable[str]:
    """The keys that a tile of queries visits."""
    for span in plan().forward.spans:
        yield f"visited:      [{show(span.lo)}, {show(span.hi)})"
        yield f"without mask: [{show(span.full_lo)}, {show(span.full_hi)})"


def gradients() -> Iterable[str]:
    """The factors of P * (dP - delta) in the backward kernels."""
    for name, loop in (("dq", plan().dq), ("dk and dv", plan().dkdv)):
        assert loop is not None
        yield (
            f"{name + ':':10} {show(loop.dscore)} in the loop, scale and "
            f"{show(loop.dscore_factor)} after it"
        )


@cache
def hopper_plan() -> HopperPlan:
    found = plan_hopper(plan())
    assert found is not None
    return found


def reasons() -> Iterable[str]:
    """The passes with kernels for Hopper, and the reasons of the others."""
    for name in (SPEC.stem, *WITHOUT_KERNELS):
        missing = without_kernels(plan_attention(load(SPEC.with_stem(name))))
        for pass_ in ("forward", "backward"):
            yield f"{name + ',':13} {pass_ + ':':9} {missing.get(pass_, 'every condition holds')}"


def hopper() -> Iterable[str]:
    """The plan of the kernels for Hopper."""
    found = hopper_plan()
    tiles = {
        "forward": found.forward,
        "dq": found.dq,
        "dk and dv": found.dkdv,
        "all three": found.fused,
    }
    for name, tile in tiles.items():
        assert tile is not None
        yield (
            f"{name + ':':10} {tile.BLOCK_M:3} queries x {tile.BLOCK_N:3} keys, "
            f"{_slots(name, tile)}"
        )
    tile, bias = found.forward, found.idioms["forward"].bias
    assert tile is not None
    registers = (
        f"{tile.consumer_registers} registers a thread, a producer of {tile.producer_registers}"
    )
    yield f"warps:     {tile.consumers} consumer warpgroups of {registers}"
    yield f"tiles:     {'from a counter' if found.dynamic else 'in turn'}"
    assert bias is not None
    yield (
        f"bias:      {show(bias.slope)} * ({show(bias.distance)} + column), of scores times "
        f"{show(bias.scale)}"
    )


def _slots(kernel: str, tile: HopperTile) -> str:
    if kernel == "forward":
        return f"{tile.SLOTS} slots of K, {tile.SLOTS - tile.fewer_values} of V"
    return f"{tile.SLOTS} slots of {'K and V' if kernel == 'dq' else 'Q and dO'}"


def statements(language: str) -> Callable[[], Iterable[str]]:
    """The scores and the mask of a tile, spelled."""

    def lines() -> Iterable[str]:
        lowering, loop = Lowering(plan()), plan().forward
        printer = lowering.printer(loop)
        body = body_of(lowering, loop, printer)
        before = lowering.lines_of(loop.program.before_loop(), printer)
        return lines_of([*before, *body.mask_lines, *body.score_lines], language)

    return lines


def emitted() -> Iterable[str]:
    """The softmax of the forward kernel for Hopper, as it stands in the file."""
    lines = render_spec(loaded())["hopper.py"].splitlines()
    first = lines.index("def _hopper_softmax(")
    last = next(i for i in range(first, len(lines)) if lines[i].startswith("    return "))
    return lines[first - 1 : last + 1]


STAGES: dict[str, tuple[str, Callable[[], Iterable[str]]]] = {
    "read": ("text", read),
    "one_form": ("text", one_form),
    "softmax": ("text", softmax),
    "program": ("text", program),
    "spans": ("text", spans),
    "gradients": ("text", gradients),
    "reasons": ("text", reasons),
    "hopper": ("text", hopper),
    "triton": ("python", statements(TRITON)),
    "gluon": ("python", statements(GLUON)),
    "emitted": ("python", emitted),
}


def stage(name: str) -> str:
    """A block of the walkthrough."""
    language, lines = STAGES[name]
    body = "\n".join(line.rstrip() for line in lines())
    return f"```{language}\n{body}\n```\n"
