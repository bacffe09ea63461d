"""The kernels of rows of the output in Triton: gate, norm and expression, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.differentiate import is_one
from kgen.expr.nodes import Node
from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.targets.triton.functions import RESULTS, Functions
from kgen.kernels.linear_attention.targets.triton.signatures import (
    TOKENS,
    KernelSignature,
    Operand,
    buffer_operand,
)
from kgen.targets.code import Code, Statement
from kgen.targets.template import Template

FIELDS = ("output_gate", "output")
PACKED = "tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + N), 0), T)"
"""The end of the last packed sequence. Clamped, invalid offsets read nothing outside of tensors."""


@dataclass(frozen=True)
class Rows(Template):
    """A kernel of rows of V columns. Each is the output of one token and head."""

    signature: KernelSignature
    end: str
    """The end of the tokens."""
    reads: list[Statement]
    """The loads of the buffers."""
    gate: Code | None
    eps: str | None
    """The number under the root of the norm; None without a norm."""


@dataclass(frozen=True)
class Finish(Rows):
    """The kernel that computes rows of o from `o_raw`, their values before gate and norm."""

    template: ClassVar[str] = "linear_attention/triton/_finish.j2"

    output: Code | None


@dataclass(frozen=True)
class FinishBack(Rows):
    """The kernel of the gradients of `o_raw` and of the buffers of gate and expression."""

    template: ClassVar[str] = "linear_attention/triton/_finish_back.j2"

    slope: Code | str | None
    """The derivative of the expression with respect to o; None if it is one."""
    of_output: list[str]
    """Statements after `do` is loaded."""
    of_gate: list[str]
    """Statements after the gradient passed through the norm."""
    stores: list[str]


class Finishing:
    """Build both kernels of one plan."""

    def __init__(self, plan: LinearAttentionPlan, functions: Functions) -> None:
        self.plan, self.functions, self.formulas = plan, functions, plan.formulas
        read = {n for f in FIELDS if f in self.formulas for n in self.formulas[f].read}
        self.buffers = [name for name in plan.buffers if name in read]
        eps = plan.spec.output_norm_eps
        self.eps = None if eps is None else repr(eps)
        self.end = PACKED if plan.spec.varlen else "T"

    def forward(self) -> Finish:
        """Return the kernel of forward and of decoding."""
        return Finish(
            self._signature("_finish_kernel", [], [Operand("o")]),
            self.end,
            RESULTS.reads(self.plan, self.buffers),
            self._call("output_gate"),
            self.eps,
            self._call("output"),
        )

    def backward(self) -> FinishBack:
        """Return the kernel of backward."""
        learned = self.learned()
        results = [Operand("do_raw"), *(Operand(f"finish_{name}") for name in learned)]
        lines = {field: list(self._terms(field)) for field in FIELDS}
        return FinishBack(
            self._signature("_finish_back_kernel", [Operand("do", TOKENS)], results),
            self.end,
            RESULTS.reads(self.plan, self.buffers),
            self._call("output_gate"),
            self.eps,
            self._slope(),
            of_output=lines["output"],
            of_gate=lines["output_gate"],
            stores=[line for name in learned for line in self._stores(name)],
        )

    def learned(self) -> list[str]:
        """Return the buffers with gradients, in the order of the arguments."""
        found = {name for field in FIELDS for name in self._slopes_of(field)}
        return [name for name in self.plan.learned if name in found]

    def _signature(self, name: str, more: list[Operand], results: list[Operand]) -> KernelSignature:
        buffers = [buffer_operand(self.plan, n) for n in self.buffers]
        packing = [Operand("cu_seqlens")] if self.plan.spec.varlen else []
        operands = (Operand("o_raw"), *more, *buffers, *results, *packing)
        sizes = ("N", "T") if self.plan.spec.varlen else ("T",)
        return KernelSignature(name, operands, sizes, ("HV",), ("ROWS",))

    def _call(self, field: str) -> Code | None:
        return self.functions.call(field, RESULTS) if field in self.formulas else None

    def _slope(self) -> Code | str | None:
        slopes = self._slopes_of("output")
        if "output" not in self.formulas or ("o" in slopes and is_one(slopes["o"])):
            return None
        if "o" not in slopes:
            return "tl.zeros([ROWS, V], tl.float32)"
        return self.functions.slope("output", "o", RESULTS)

    def _terms(self, field: str) -> Iterator[str]:
        """Yield the statements that add the terms of the gradients of buffers in an expression."""
        change = {"output": "do", "output_gate": "dx * o_raw"}[field]
        for name in self.learned():
            slopes = self._slopes_of(field)
            if name not in slopes:
                continue
            term = change
            if not is_one(slopes[name]):
                term += f" * {self.functions.slope(field, name, RESULTS)}"
            both = field == "output_gate" and name in self._slopes_of("output")
            yield f"finish_{name} {'+=' if both else '='} tl.where(live[:, None], {term}, 0.0)"

    def _slopes_of(self, field: str) -> Mapping[str, Node]:
        formula = self.formulas.get(field)
        return {} if formula is None else formula.slopes

    def _stores(self, name: str) -> Iterator[str]:
        if self.plan.spec.buffers[name].columns is None:
            yield f"finish_{name} = tl.sum(finish_{name}, 1)"
        yield gradient_store(self.plan, name, f"finish_{name}", "offs_v")


def gradient_store(plan: LinearAttentionPlan, name: str, made: str, columns: str) -> str:
    """Return the statement that stores the gradient of a buffer.

    A buffer with tokens has an element for each token. Of the others, each program has a part.
    """
    buffer, width = plan.spec.buffers[name], {"c": "K", "offs_v": "V"}[columns]
    if not buffer.tokens:
        at = "(slot.to(tl.int64) * HV + h)"
        at += f" * {width} + {columns}" if buffer.columns else ""
        return f"tl.store({made}_ptr + {at}, tl.sum({made}, 0))"
    rows, guard = "((batch * T + first + i) * HV + h)", "live"
    if buffer.columns:
        rows = f"((batch * T + first + i[:, None]) * HV + h) * {width} + {columns}[None, :]"
        guard = "live[:, None]"
    return f"tl.store({made}_ptr + {rows}, {made}.to({made}_ptr.dtype.element_ty), mask={guard})"
