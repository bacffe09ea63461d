"""Grids of the tiles that forward visits, for the length, heads and run-time parameters of the
options.
"""

from __future__ import annotations

import math

from kgen.diagnostics import Diagnostic, KgenError, did_you_mean, shown
from kgen.expr.nodes import Const, distinct, variables
from kgen.expr.parse import FLOAT32_MAX, INT32
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.picture import Run, conditions, picture
from kgen.pages.model import Drawing, Grid

SHORTEST, LONGEST = 1024, 2**16
"""Bounds of the default length."""


def grids(plan: AttentionPlan, drawing: Drawing) -> tuple[str, tuple[Grid, ...]]:
    """Return a sentence on the drawn batches and heads, and one grid for all heads with equal
    tiles.

    Raise `KgenError` for unknown parameters and if a bound cannot be evaluated.
    """
    given = given_params(plan, drawing)
    length = drawing.length or _telling(plan, given)
    depends = frozenset().union(*map(variables, conditions(plan)))
    heads = drawing.heads if "h" in depends and drawing.heads else 1
    whose = _whose(depends, heads)
    if unused := [f"`{name}`" for name in given if name not in depends]:
        whose += f" The tiles do not depend on {' or '.join(unused)}."
    found: dict[tuple[str, ...], tuple[list[int], Grid]] = {}
    for head in range(heads):
        try:
            drawn = picture(plan, Run(length, given, heads, head))
        except (ArithmeticError, ValueError) as error:
            raise _undrawable(plan, error) from None
        title = ", ".join([f"SQ = SK = {length}", *drawn.assumed])
        grid = Grid(drawn.rows, drawn.tile, length, title)
        found.setdefault(drawn.rows, ([], grid))[0].append(head)
    if heads > 1:
        titled = (
            Grid(g.rows, g.tile, length, f"h = {', '.join(map(str, same))}: {g.title}")
            for same, g in found.values()
        )
        return whose, tuple(titled)
    return whose, tuple(grid for _, grid in found.values())


def _whose(depends: frozenset[str], heads: int) -> str:
    if heads > 1:
        alike = (
            "Heads with the same tiles share a grid. All heads have the same assumed values of "
            "matrices."
        )
        return f"Drawn for b = 0 and each of {heads} heads. {alike}"
    differ = [name for index, name in (("b", "batches"), ("h", "heads")) if index in depends]
    if not differ:
        return "All batches and heads have these tiles."
    more = " `--heads 8` draws eight heads." if "h" in depends else ""
    return f"Drawn for b = 0, h = 0. Tiles differ between {' and '.join(differ)}.{more}"


def _telling(plan: AttentionPlan, given: dict[str, int | float]) -> int:
    """Return a length that is about four times the largest number of the mask, such as a window."""
    mask = plan.mask_mod
    if mask is None:
        return SHORTEST
    named = {
        name: param.value for name, param in plan.spec.params.items() if not param.runtime
    } | given
    values = [named.get(name) for name in variables(mask)]
    values += [node.value for node in distinct(mask) if isinstance(node, Const)]
    largest = max((v for v in values if isinstance(v, int) and 0 < v <= LONGEST), default=1)
    length: int = 2 ** (4 * largest - 1).bit_length()
    return min(LONGEST, max(SHORTEST, length))


def given_params(plan: AttentionPlan, drawing: Drawing) -> dict[str, int | float]:
    """Return run-time parameters as numbers.

    Raise `KgenError` for unknown names, and for texts that are not numbers of 32 bits.
    """
    runtime = {name: param for name, param in plan.spec.params.items() if param.runtime}
    found: dict[str, int | float] = {}
    for name, text in (drawing.given or {}).items():
        if name not in runtime:
            raise _no_param(plan, name, list(runtime))
        try:
            value: int | float = int(text) if runtime[name].type == "int" else float(text)
        except ValueError:
            value = math.nan
        if not (value in INT32 if isinstance(value, int) else abs(value) <= FLOAT32_MAX):
            kind = "an integer" if runtime[name].type == "int" else "a number"
            message = f"expected {kind} of 32 bits for `{name}`, got {shown(text)}"
            raise KgenError(Diagnostic("usage", message, hint=f"write `--set {name}=8`"))
        found[name] = value
    return found


def _no_param(plan: AttentionPlan, name: str, runtime: list[str]) -> KgenError:
    if name in plan.spec.params:
        message, hint = f"{shown(name)} is a compile-time parameter", "change its value in the spec"
    else:
        message = f"`{plan.spec.name}` has no run-time parameter {shown(name)}"
        named = f"it has {', '.join(f'`{one}`' for one in runtime)}" if runtime else "it has none"
        hint = did_you_mean(name, runtime) or named
    return KgenError(Diagnostic("usage", message, hint=hint))


def _undrawable(plan: AttentionPlan, error: Exception) -> KgenError:
    message = f"the tiles of `{plan.spec.name}` cannot be drawn: {error}"
    return KgenError(
        Diagnostic("usage", message, hint="pass other values with `--set`, or another `--length`")
    )
