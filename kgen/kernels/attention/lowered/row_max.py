"""The largest score of each row: a result that calls of specs with `row_max` can ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.model import Param
from kgen.targets.code import Assign, Code, assign, maximum, op, times

TOP = "m_top"
"""The largest logit of a row so far, where it may differ from the running maximum `m_i`."""
MAX = Param("max_ptr", "row_max")
"""The parameter of kernels for the result, in base 2."""
STORE_MAX = "STORE_MAX=row_max is not None"
"""The launch option by which kernels store the result."""


@dataclass(frozen=True)
class RowMax:
    """The base of templates that compute or return the largest score of each row."""

    optional_fields: ClassVar[tuple[str, ...]] = ("row_max",)

    row_max: bool
    """True if calls can return the largest score of each row."""

    @property
    def wrong_return_max(self) -> str:
        """The message for another value of `return_max`."""
        return "return_max must be True, False or 'head', got {return_max!r}"


def largest(sinks: bool) -> str:
    """Return the name of the largest logit of a row in portable kernels.

    The running maximum of a row with a sink may be the sink, which is not a score.
    """
    return TOP if sinks else "m_i"


def largest_started(rows: str = "BLOCK_M") -> Assign:
    """Return the statement that starts the largest logit of each row."""
    return assign(TOP, op('{tl}.full([{0}], float("-inf"), {tl}.float32)', rows))


def largest_followed(logits: str, scaled: Code | None) -> Assign:
    """Return the statement that follows the largest logit of each row in a tile."""
    of_tile: Code = op("{tl}.max({0}, 1)", logits)
    return assign(TOP, maximum(TOP, of_tile if scaled is None else times(of_tile, scaled)))
