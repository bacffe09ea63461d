"""The decay of chunk_output in CuTe DSL: its exponent at a row and at a column of the chunk.

Exponents are subtracted before they are scaled to base 2: the difference of neighbours is exact,
however large they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.nodes import Node, variables
from kgen.expr.spelling import MUL
from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan
from kgen.targets.code import Code, Name, Statement, assign, op, row
from kgen.targets.cute.printer import real


@dataclass(frozen=True)
class Decay:
    """The decay in a kernel."""

    gamma: list[Statement]
    """The statement that reads the gate of the head, g_gamma."""
    of_row: Code
    """The exponent at `row`."""
    of_column: Code
    """The exponent at `col`."""
    to_base_2: Code | None
    """The factor that converts an exponent to base 2, log2(e); None for base 2."""
    head_needed: bool
    """True if exponents depend on the head."""

    def weighted(self, product: str) -> Code:
        """Multiply element `e` of q @ k^T by its decay."""
        difference: Code = row("sub", op("c_row[e // 2 % 2]"), "c_col")
        if self.to_base_2 is not None:
            difference = row("mul", difference, "LOG2E")
        return op("{0} * cute.math.exp2({1}, fastmath=True)", product, difference, binds=MUL)


def decay(plan: ChunkOutputPlan) -> Decay | None:
    """Return the decay of a plan."""
    exponent = plan.exponent
    if exponent is None:
        return None
    return Decay(
        gamma=[assign("gamma", op("Float32(g_gamma[v_head])"))] if "g_gamma" in plan.gates else [],
        of_row=_at(exponent, "row"),
        of_column=_at(exponent, "col"),
        to_base_2=Name("LOG2E") if plan.natural else None,
        head_needed=bool(variables(exponent) & {"h", "g_gamma"}),
    )


def _at(exponent: Node, index: str) -> Code:
    names: dict[str, Code] = {
        "h": Name("v_head"),
        "H": Name("H"),
        "HV": row("mul", "H", "GROUP"),
        "g_gamma": Name("gamma"),
        "i": Name(index),
        "g": op("sg[{0}, stage]", index),
    }
    return real(exponent, names)
