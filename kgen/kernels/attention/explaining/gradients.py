"""The section on gradients: the factors of the backward pass, and the sums for gradients of
buffers.
"""

from __future__ import annotations

from collections.abc import Iterator

from kgen.expr.differentiate import is_one
from kgen.expr.nodes import Read, Type, Var
from kgen.expr.softmax_form import QK
from kgen.expr.spelling import MUL as TIMES
from kgen.expr.unparse import show
from kgen.kernels.attention.explaining.expressions import product
from kgen.kernels.attention.plan.model import AttentionPlan, ReadGradient
from kgen.pages.model import Block, Code, Line, Lines, Prose, Remarks, quoting, words


def gradients(plan: AttentionPlan) -> Iterator[Block]:
    """Yield the gradients of the score, of q and k, and of buffers."""
    if plan.dq is None or plan.dkdv is None:
        yield Prose(quoting("None: `passes` does not contain `backward`."))
        return
    ds = "ds is the gradient of the loss by score_mod, for each (query, key): "
    yield Prose(words(ds, Code("p * (dp - delta)"), "."))
    yield Lines(
        (Line(f"d score_mod / d score = {product([plan.dq.dscore_factor, plan.dq.dscore])}"),)
    )
    for name, loop in (("dq", plan.dq), ("dk", plan.dkdv)):
        inside = "ds" if is_one(loop.dscore) else "ds * (d score_mod / d score)"
        if not (is_one(loop.dscore) or is_one(loop.dscore_factor)):
            inside = f"ds * {show(loop.dscore, TIMES)}"
        after = product([Var("scale", QK.type), loop.dscore_factor])
        side = "keys" if name == "dq" else "queries"
        rest = (f" times {side}, and is multiplied by ", Code(after), " after the loop")
        yield Prose(words(Code(name), " adds up ", Code(inside), *rest))
    for gradient in plan.gradients:
        read = show(Read(gradient.buffer, gradient.indices, Type.FLOAT))
        of = Code(f"d score_mod / d {read} = {product([gradient.factor, gradient.derivative])}")
        yield Remarks(of, tuple(map(words, _reduction(gradient))))
    wanted = [name for name, buffer in plan.spec.buffers.items() if buffer.grad]
    if not wanted and plan.spec.buffers:
        yield Prose(quoting("No buffer has `grad: true`."))


def _reduction(gradient: ReadGradient) -> Iterator[str]:
    if gradient.along == "pair":
        if gradient.summed is None:
            yield (
                "The dq kernel adds it to its element for each (query, key), with an atomic "
                "addition:"
            )
            yield "the order of the sum, and thus its last bits, may differ from run to run."
            return
        absent = [name for name in ("b", "h") if name not in gradient.summed]
        over = (
            f", which loops over {' and '.join({'b': 'batches', 'h': 'heads'}[n] for n in absent)}"
            if absent
            else ""
        )
        yield (
            f"A separate kernel writes each tile of it once{over}: no atomics, the same bits "
            "every time."
        )
        return
    if gradient.along == "distance":
        yield (
            "A separate kernel adds up the tiles on each diagonal of each (b, h), then the "
            "diagonals of their sum;"
        )
        yield (
            "the launcher adds the number of each distance = q_idx - kv_idx to its element of "
            "the buffer"
        )
        yield "(index_put with accumulation): no atomics for pairs, the same bits every time."
        return
    one, kernel = ("query", "dq") if gradient.along == "q" else ("key", "dk and dv")
    yield f"The {kernel} kernel keeps one number for each {one} of each (b, h) and writes it once;"
    if gradient.summed is not None:
        kept = f"all but {', '.join(gradient.summed)}" if gradient.summed else "everything"
        yield f"the launcher sums over {kept}: no atomics, the same bits every time."
    else:
        yield (
            "the launcher adds each number to its element of the buffer (index_put with "
            "accumulation)."
        )
