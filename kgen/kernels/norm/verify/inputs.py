"""Difficult cases for a norm, drawn from its spec.

`draw` makes the tensors of a `Case`. The seed is the name of the case, so a failed case can be
drawn again anywhere.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.norm.verify.problem import Problem
from kgen.verify.deciding import edges
from kgen.verify.tensors import DTYPES, arrange

INT_EDGES = (3, 1, 40)
FLOAT_EDGES = (1.0, 0.125, 50.0)
MAX_WIDTH_OF_HEADS = 16384
"""Greatest width of cases with heads, unless the spec only has greater ones."""


@dataclass(frozen=True)
class Case:
    """One call of the kernel: x is [*rows, width], or with heads [*rows, heads, width].

    `layout` is one of `LAYOUTS`, for x and tensors of its shape. `dout` is `contiguous`, `strided`
    or `expanded`. `content` is `normal`, `constant` (one number per row), `zero` or `zero-weight`.
    `scale` multiplies x and the residual.
    """

    name: str
    width: int
    rows: tuple[int, ...]
    heads: int = 3
    layout: str = "contiguous"
    dout: str = "contiguous"
    content: str = "normal"
    scale: float = 1.0
    eps: float | None = None
    h: bool = True
    """True if a gradient also comes through the returned h."""
    edge: int = 0
    """Index of the edge values of run-time parameters."""


@dataclass
class Inputs:
    """The tensors of a case: every operand by name, `scale` if the spec quantizes by tensor, and
    cotangents.
    """

    case: Case
    eps: float
    operands: dict[str, Tensor]
    scale: Tensor | None
    cotangents: dict[str, Tensor]
    params: dict[str, int | float] = field(default_factory=dict)
    """All parameters of the spec, for the reference."""
    runtime: dict[str, int | float] = field(default_factory=dict)
    """The parameters of the emitted function."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a kernel must not write to."""
        scale = {} if self.scale is None else {"scale": self.scale}
        return {**self.operands, **scale, **{f"d{n}": c for n, c in self.cotangents.items()}}


def cases(problem: Problem, quick: bool) -> tuple[Case, ...]:
    """Return the cases of a spec. `quick` cases are small enough for Triton's interpreter."""
    found: dict[str, Case] = {}
    for number, case in enumerate(_wanted(quick)):
        fitted = _fit(problem, replace(case, edge=number if problem.runtime_params else 0), number)
        if fitted is not None and not any(replace(fitted, name=n) == c for n, c in found.items()):
            found[fitted.name] = fitted
    return tuple(found.values())


def _wanted(quick: bool) -> Iterator[Case]:
    yield Case("plain", 256, (37,))
    yield Case("one-row", 768, (1,))
    yield Case("vector", 64, ())
    yield Case("no-rows", 128, (4, 0))
    yield Case("three-rows", 1000, (3,))
    yield Case("odd", 257, (131,), dout="strided")
    yield Case("one-element", 1, (5,))
    yield Case("guarded", 100, (3, 7), layout="guarded", dout="strided")
    yield Case("padded", 768, (19,), layout="padded")
    yield Case("odd-spaced", 1003, (29,), layout="spaced")
    yield Case("transposed", 72, (3, 5, 6), layout="bshd")
    yield Case("broadcast", 96, (4, 9), layout="broadcast", dout="expanded")
    yield Case("stepped", 50, (11,), layout="stepped")
    yield Case("constant", 320, (9,), content="constant")
    yield Case("zeros", 128, (6,), content="zero")
    yield Case("zero-weight", 192, (8,), content="zero-weight")
    yield Case("huge", 512, (7,), scale=1e4)
    yield Case("tiny", 512, (7,), scale=1e-4)
    yield Case("tiny-without-eps", 512, (7,), scale=1e-4, eps=1e-20)
    yield Case("out-alone", 256, (6,), h=False)
    yield Case("wide", 4095, (5,))
    # shared by several programs, if they can wait for each other
    yield Case("few-16390", 16390, (2,))
    if quick:
        return
    for width in (64, 128, 257, 512, 1000, 1024, 2048, 4095, 4096, 5120, 8192, 12288, 14336, 16384):
        yield Case(f"width-{width}", width, (531,))
    for width in (8197, 20_011, 50_001, 100_003, 200_001):
        yield Case(f"width-{width}", width, (67,), layout="spaced")
    for width in (32768, 65536, 65544, 100_000, 131072, 262144):
        yield Case(f"width-{width}", width, (67,))
        yield Case(f"few-{width}", width, (3,), layout="guarded", dout="strided")
    yield Case("wide-huge", 40_000, (70,), scale=1e4)
    yield Case("wide-constant", 65536, (9,), content="constant")
    yield Case("million", 64, (1_000_000,))
    yield Case("many", 1024, (40_001,), layout="padded")


def _fit(problem: Problem, case: Case, number: int) -> Case | None:
    """Fit a case to the widths and heads of the spec. Return None for a case of other widths."""
    width, wide = case.width, case.name.startswith(("width-", "few-", "wide-"))
    if problem.widths and width not in problem.widths:
        if wide and (width > 2 * max(problem.widths) or "few" in case.name):
            return None
        width = problem.widths[number % len(problem.widths)]
        if width > 4096:
            # The case is for narrow rows: use few wide ones.
            case = replace(case, rows=tuple(min(n, 3) for n in case.rows))
    if problem.heads is None:
        return replace(case, width=width, heads=0)
    if (width > MAX_WIDTH_OF_HEADS and not problem.widths) or math.prod(case.rows) >= 10**6:
        return None
    heads = (3, 1, 8, 40)[number % 4] if problem.heads == "any" else int(problem.heads)
    return replace(case, width=width, heads=heads)


def draw(problem: Problem, case: Case, device: str) -> Inputs:
    """Return the tensors of a case, with the same values on every device."""
    random = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    shape = (*case.rows, *([case.heads] if case.heads else []), case.width)
    shapes = {
        "element": shape,
        "row": shape[:-1],
        "column": shape[-2:] if case.heads else shape[-1:],
    }
    operands = {}
    trees = [t for t in (problem.input_mod, problem.output_mod) if t is not None]
    for place, o in enumerate(problem.operands):
        values = _values(o.name, o.dtype, shapes[o.along], case, random, edges(trees, o.name))
        if o.along == "element" and case.layout == "broadcast":
            values = values[:1].expand_as(values)
        layout = (
            case.layout
            if o.along == "element"
            else {"bshd": "contiguous"}.get(case.layout, case.layout)
        )
        operands[o.name] = arrange(
            values.to(device), layout if values.ndim > 1 else "offset", place
        )
    dtypes = {"out": problem.dtypes["output"], "h": problem.dtypes["residual"]}
    cotangents: dict[str, Tensor] = {}
    if "backward" in problem.passes:
        for name in [n for n in problem.outputs if n == "out" or case.h]:
            grad = torch.randn(shape, generator=random).to(DTYPES[dtypes[name]])
            if case.dout == "expanded":
                grad = grad[(slice(0, 1),) * grad.ndim].expand_as(grad)
            layout = "guarded" if case.dout == "strided" and grad.ndim > 1 else case.dout
            cotangents[name] = arrange(grad.to(device), layout, len(operands) + len(cotangents))
    runtime: dict[str, int | float] = {}
    for p in problem.runtime_params:
        choice = (*INT_EDGES, *edges(trees, p.name)) if p.type == "int" else FLOAT_EDGES
        runtime[p.name] = choice[case.edge % len(choice)]
    fixed = {p.name: p.value for p in problem.params if p.value is not None}
    scale = torch.tensor(0.0173, device=device) if problem.quantize == "per_tensor" else None
    eps = problem.eps if case.eps is None else case.eps
    return Inputs(case, eps, operands, scale, cotangents, {**fixed, **runtime}, dict(runtime))


def _values(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    case: Case,
    random: Any,
    compared: tuple[int, ...],
) -> Tensor:
    """Return plausible values of an operand, in its dtype.

    Integers include those around `compared` constants.
    """
    kind = DTYPES[dtype]
    if not kind.is_floating_point:
        choice = torch.tensor(sorted({0, 1, *compared} if kind != torch.bool else {0, 1}))
        values = choice[torch.randint(0, len(choice), shape, generator=random)]
        if kind == torch.int64:
            values += 2**32 * torch.randint(-1, 2, shape, generator=random)
        return values.to(kind)
    values = torch.randn(shape, generator=random)
    if name == "weight":
        return (torch.zeros(shape) if case.content == "zero-weight" else 1 + 0.2 * values).to(kind)
    if name in ("x", "residual"):
        if case.content in ("constant", "zero"):
            values = values[..., :1].expand(shape) * (case.content == "constant")
        # The mean is not zero, so that a kernel without it fails.
        values = (values + (0.0 if case.content == "zero" else 0.5)) * case.scale
    return values.to(kind)


def sized(problem: Problem, name: str, device: str) -> Inputs:
    """Return inputs of a small plain call. The name is the seed."""
    width = problem.widths[0] if problem.widths else 96
    (case,) = (c for c in cases(problem, quick=True) if c.name == "plain")
    return draw(
        problem, replace(case, name=name, width=width, rows=(13 if width <= 4096 else 3,)), device
    )


def arguments(problem: Problem, inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of a call."""
    by_name = dict(inputs.operands)
    args = tuple(by_name.pop(n) for n in problem.positional)
    scale = {} if inputs.scale is None else {"scale": inputs.scale}
    return args, {**by_name, **scale, **inputs.runtime, "eps": inputs.eps}


def call(problem: Problem, function: Any, inputs: Inputs) -> dict[str, Tensor]:
    """Call an emitted function, and return its outputs by name."""
    args, keywords = arguments(problem, inputs)
    result = function(*args, **keywords)
    results = result if isinstance(result, tuple) else (result,)
    return dict(zip(problem.outputs, results, strict=True))


def differentiable(problem: Problem, inputs: Inputs) -> dict[str, Tensor]:
    """Return the operands that need gradients by name, with `requires_grad` set."""
    return {o.name: inputs.operands[o.name].requires_grad_() for o in problem.operands if o.grad}
