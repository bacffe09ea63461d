"""The page of `kgen explain` for linear_attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kgen.expr.nodes import variables
from kgen.expr.operations import READ, operations
from kgen.expr.unparse import show
from kgen.kernels.linear_attention.plan.kernels import (
    Kernel,
    kernels,
    recomputed,
    saved,
    tensor_sizes,
)
from kgen.kernels.linear_attention.plan.planning import (
    Formula,
    LinearAttentionPlan,
    plan_linear_attention,
)
from kgen.kernels.linear_attention.schedules import SCHEDULES
from kgen.pages.model import (
    Block,
    Code,
    Drawing,
    Line,
    Lines,
    Page,
    Prose,
    Section,
    Table,
    quoting,
    words,
)
from kgen.pages.model import Formula as CodeBlock
from kgen.pages.tables import counts
from kgen.sizes import ELEMENT_SIZE
from kgen.spec.load import Loaded


def explain_linear_attention(loaded: Loaded, _drawing: Drawing | None = None) -> Page:
    """Build the page: recurrence, chunked form, expressions, operations, memory and gradients.

    It has no drawing.
    """
    plan = plan_linear_attention(loaded)
    sections = {
        "Recurrence": _recurrence(plan),
        "Chunked form": _chunked(plan),
        "Expressions": _expressions(plan),
        "Operations": _operations(plan),
        "Kernels": _kernels(plan),
        "Gradients": _gradients(plan),
    }
    return Page(
        plan.spec.name,
        plan.spec.summary.on_terminal(),
        tuple(Section(title, tuple(blocks)) for title, blocks in sections.items()),
        _facts(plan),
    )


def recurrence(plan: LinearAttentionPlan) -> list[str]:
    """Return the lines of the recurrence for token t of a sequence."""
    formulas, lines = plan.formulas, list[str]()
    for name in ("q", "k"):
        lines += _features(plan, name)
    before = "S[t - 1]"
    if "decay" in formulas:
        factor = _power(plan, "decay[t]")
        lines.append(f"decay[t] = {_written(formulas['decay'])}")
        lines.append(f"S' = {f'diag({factor})' if plan.by_column else factor} * S[t - 1]")
        before = "S'"
    beta = "beta[t] * " if "beta" in formulas else ""
    if beta:
        lines.append(f"beta[t] = {_written(formulas['beta'])}")
    value = f"(v[t] - {before}^T @ k[t])" if plan.delta else "v[t]"
    lines.append(f"u[t] = {beta}{value}")
    lines.append(f"S[t] = {before} + outer(k[t], u[t])")
    skip = f" + {_written(formulas['skip'])}" if "skip" in formulas else ""
    lines.append(f"o[t] = scale * S[t]^T @ q[t]{skip}")
    return [*lines, *finish(plan)]


def finish(plan: LinearAttentionPlan) -> Iterator[str]:
    """Yield the lines of the gate, the norm and the expression of the output."""
    if "output_gate" in plan.formulas:
        yield f"o[t] = o[t] * ({_written(plan.formulas['output_gate'])})"
    if (eps := plan.spec.output_norm_eps) is not None:
        yield f"o[t] = o[t] / sqrt(mean(o[t]**2) + {eps:g})"
    if "output" in plan.formulas:
        yield f"o[t] = {_written(plan.formulas['output'])}, with o = o[t]"


def _features(plan: LinearAttentionPlan, name: str) -> Iterator[str]:
    formula = plan.formulas.get(f"{name}_map")
    if formula is not None:
        yield f"{name} = {show(formula.tree)}, with x = {name}"
    if (eps := plan.spec.norm_eps) is not None:
        yield f"{name} = {name} / sqrt(sum({name}**2) + {eps:g})"


def chunked(plan: LinearAttentionPlan) -> list[str]:
    """Return the lines of the chunked form, for one chunk with the state S before it."""
    lines, decays = list[str](), "decay" in plan.formulas
    beta = "beta * " if "beta" in plan.formulas else ""
    to_each, to_last, pair, whole = ("", "", "", "")
    if decays:
        lines.append("G(i) = sum of decay(j) over j <= i")
        to_each, to_last = f"{_power(plan, 'G')} * ", f"{_power(plan, 'G(last) - G')} * "
        pair, whole = f" * {_power(plan, 'G(i) - G(j)')}", f"{_power(plan, 'G(last)')} * "
    new = f"{beta}v"
    if plan.delta:
        lines.append(f"A[i, j] = {beta.replace('beta', 'beta(i)')}{_product('k', pair)}, j < i")
        lines.append(f"W = (I + A)^-1 @ ({beta}{to_each}k)")
        lines.append(f"N = (I + A)^-1 @ ({new}) - W @ S")
    else:
        lines.append(f"N = {new}")
    lines.append(f"P[i, j] = {_product('q', pair)}, j <= i")
    skip = " + skip" if "skip" in plan.formulas else ""
    lines.append(f"o = scale * (({to_each}q) @ S + P @ N){skip}")
    lines.append(f"S = {whole}S + ({to_last}k)^T @ N")
    return lines


def _product(name: str, pair: str) -> str:
    return f"({name}(i){pair}) . k(j)" if pair else f"{name}(i) . k(j)"


def _power(plan: LinearAttentionPlan, exponent: str) -> str:
    return f"exp({exponent})" if plan.natural else f"2**({exponent})"


def _written(formula: Formula) -> str:
    return show(formula.tree)


def _recurrence(plan: LinearAttentionPlan) -> Iterator[Block]:
    yield Prose(words("For each token t of a sequence and each value head, with a state S [K, V]:"))
    yield CodeBlock(tuple(recurrence(plan)))


def _chunked(plan: LinearAttentionPlan) -> Iterator[Block]:
    yield Prose(words(f"Kernels compute chunks of C = {plan.spec.chunk_size} tokens:"))
    yield CodeBlock(tuple(chunked(plan)))
    if "decay" in plan.formulas:
        where = " of each column of the keys" if plan.by_column else ""
        yield Prose(words(f"Exponents{where} are subtracted before the power."))


def _expressions(plan: LinearAttentionPlan) -> Iterator[Block]:
    if not plan.formulas:
        yield Prose(words("None: nothing decays, and q, k and v are used as they are."))
        return
    for field, formula in plan.formulas.items():
        yield Lines((Line(f"{field} = {show(formula.value)}"),))


def _operations(plan: LinearAttentionPlan) -> Iterator[Block]:
    columns = {field: operations([formula.value]) for field, formula in plan.formulas.items()}
    columns |= {
        f"d {field} / d {name}": operations([slope])
        for field, formula in plan.formulas.items()
        for name, slope in formula.slopes.items()
    }
    for found in columns.values():
        found.pop(READ, None)
    if any(columns.values()):
        yield counts(columns)
    else:
        yield Prose(words("None beside the products of matrices."))


def _kernels(plan: LinearAttentionPlan) -> Iterator[Block]:
    h, hv = _heads(plan)
    yield Prose(
        words(
            f"For each token with H={h} and HV={hv}: bytes if every tensor is read and written "
            "once, and multiplications of matrix products."
        )
    )
    rows = [_row(one, h, hv) for one in kernels(plan)]
    yield Table(("kernel", "reads", "writes", "bytes", "products"), tuple(rows))
    for name, backward in (("Forward", False), ("Backward", True)):
        own = [one for one in kernels(plan) if one.backward is backward]
        if own:
            moved = sum(one.bytes(h, hv) for one in own)
            count = sum(one.products(hv) for one in own)
            yield Prose(words(f"{name}: {moved:,.0f} bytes and {count:,.0f} multiplications."))
    if "decode" in plan.spec.passes:
        yield Prose(words(_step_words(plan)))
    if plan.backward:
        yield Prose(words(_saved_words(plan)))
    for schedule in SCHEDULES:
        yield Prose(quoting(schedule.explained(plan)))


def _heads(plan: LinearAttentionPlan) -> tuple[int, int]:
    heads = plan.spec.heads
    return heads.qk or 1, heads.v or heads.ratio or 1


def _step_words(plan: LinearAttentionPlan) -> str:
    """Describe the bytes of a call of decode."""
    dims = plan.spec.head_dim
    size = 2 * dims.qk * dims.v * ELEMENT_SIZE[plan.spec.state_dtype]
    return (
        f"One kernel, decode, steps T tokens. It reads and writes each state once: {size:,} bytes "
        "for each sequence and value head."
    )


def _saved_words(plan: LinearAttentionPlan) -> str:
    """Describe the tensors that forward keeps for backward."""
    h, hv = _heads(plan)
    if not plan.spec.saves_states:
        return (
            "Forward saves only its arguments, because of save: recompute. Backward first runs "
            f"{', '.join(recomputed(plan))} again."
        )
    sizes = tensor_sizes(plan)
    size = sum(sizes[name].of(h, hv) for name in saved(plan))
    return (
        f"Forward saves {size:,.0f} bytes for each token in addition to its arguments: "
        f"{', '.join(saved(plan))}."
    )


def _row(kernel: Kernel, h: int, hv: int) -> tuple[Any, ...]:
    return (
        words(kernel.name),
        words(", ".join(kernel.reads)),
        words(", ".join(kernel.writes)),
        words(f"{kernel.bytes(h, hv):,.0f}"),
        words(f"{kernel.products(hv):,.0f}"),
    )


def _gradients(plan: LinearAttentionPlan) -> Iterator[Block]:
    if not plan.backward:
        yield Prose(quoting("None: `passes` does not ask for backward."))
        return
    yield Prose(words("Of q, k, v and the initial state."))
    for name in plan.learned:
        terms = [
            f"d {field} / d {name} = {show(formula.slopes[name])}"
            for field, formula in plan.formulas.items()
            if name in formula.slopes
        ]
        yield Prose(words(f"Of {name}: ", Code("; ".join(terms))))


def _facts(plan: LinearAttentionPlan) -> dict[str, Any]:
    """Return the fields of the JSON output, which docs/commands.md lists."""
    h, hv = _heads(plan)
    return {
        "recurrence": recurrence(plan),
        "chunked": chunked(plan),
        "expressions": {
            field: {
                "value": show(formula.value),
                "uses": sorted(variables(formula.value)),
                "slopes": {name: show(slope) for name, slope in formula.slopes.items()},
            }
            for field, formula in plan.formulas.items()
        },
        "kernels": [
            {
                "kernel": one.name,
                "pass": "backward" if one.backward else "forward",
                "reads": list(one.reads),
                "writes": list(one.writes),
                "bytes_per_token": one.bytes(h, hv),
                "products_per_token": one.products(hv),
            }
            for one in kernels(plan)
        ],
        "saved": list(saved(plan)),
    }
