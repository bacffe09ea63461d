"""One spec through every stage, in the forms that each stage has of it: what `docs/walkthrough.md` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from kgen.expr.nodes import Call, Const, Node, Read, Var
from kgen.expr.show import show
from kgen.kernels.attention.plan.hopper import plan_hopper
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.targets.triton.kernels import KernelFields
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, load
from kgen.targets.code import GLUON, TRITON, lines_of

ROOT = Path(__file__).resolve().parents[1]
SPEC = ROOT / "specs" / "causal_alibi.yaml"


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
    """Where what is computed."""
    loop = plan().forward
    for binding in loop.program.bindings:
        place = binding.place
        where = "in the loop" if place.in_loop else "before it"
        axes = " x ".join(place.axes) or "one number"
        yield f"{binding.name:10} = {show(binding.node):46} {where}, {axes}"
    for name, node in loop.program.results.items():
        yield f"-> {name:12} {show(node)}"


def spans() -> Iterable[str]:
    """Which keys a tile of queries visits."""
    for span in plan().forward.spans:
        yield f"visited:      [{show(span.lo)}, {show(span.hi)})"
        yield f"without mask: [{show(span.full_lo)}, {show(span.full_hi)})"


def hopper() -> Iterable[str]:
    """What the kernels for Hopper are."""
    found = plan_hopper(plan())
    assert found is not None
    assert found.forward is not None
    tile, bias = found.forward, found.idioms["forward"].bias
    yield f"forward: {tile.BLOCK_M} x {tile.BLOCK_N}, {tile.SLOTS} slots of K, {tile.SLOTS - tile.fewer_values} of V"
    yield f"         {tile.consumers} consumers of {tile.consumer_registers} registers a thread"
    yield f"         a producer of {tile.producer_registers}"
    assert bias is not None
    yield f"bias:    {show(bias.slope)} * ({show(bias.distance)} + column), of scores times {show(bias.scale)}"


def statements(language: str) -> Callable[[], Iterable[str]]:
    """The scores and the mask of a tile, spelled."""

    def lines() -> Iterable[str]:
        kernels = KernelFields(plan())
        printer = kernels.printer(plan().forward)
        fields = kernels.tile_fields(plan().forward, printer)
        before = kernels.lines_of(plan().forward.program.before_loop(), printer)
        return lines_of([*before, *fields["mask_lines"], *fields["score_lines"]], language)

    return lines


def emitted() -> Iterable[str]:
    """The softmax of the forward kernel for Hopper, as it stands in the file."""
    lines = render_spec(loaded())["hopper.py"].splitlines()
    first = lines.index("def _hopper_softmax(")
    last = next(i for i in range(first, len(lines)) if lines[i].startswith("    return "))
    return lines[first - 1 : last + 1]


STAGES: dict[str, tuple[str, Callable[[], Iterable[str]]]] = {
    "read": ("text", read),
    "softmax": ("text", softmax),
    "program": ("text", program),
    "spans": ("text", spans),
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
