"""The largest score of each row: a result that calls of specs with `row_max` can ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.model import Param
from kgen.kernels.attention.spec import AttentionSpec
from kgen.targets.code import Assign, Code, assign, maximum, op, times

TOP = "m_top"
"""The largest logit of a row so far, where it may differ from the running maximum `m_i`."""


@dataclass(frozen=True)
class RowResult:
    """A result with one number per row, in addition to the log-sum-exp.

    Templates loop over results, and print their names where the log-sum-exp has its own.
    """

    name: str
    """The name of its pointer and of its parts in kernels."""
    letter: str
    """The letter of its strides in kernels."""
    tensor: str
    """The tensor, or None, in launchers and in C."""
    argument: str
    """The argument by which a call asks for it."""
    option: str
    """The compile-time option by which kernels store it."""
    place: str
    """The place of its parts in the workspace of serving."""
    words: str
    """The value that kernels store, in words."""
    apart: bool
    """True if the running maximum `m_i` may differ from it: `m_i` lags behind, is fixed, or
    includes a sink.
    """

    @property
    def value(self) -> str:
        """The value of each row after the loop of a kernel, in base 2."""
        return TOP if self.apart else "m_i"

    @property
    def stored(self) -> str:
        """The option of a launch."""
        return f"{self.option}={self.tensor} is not None"

    @property
    def param(self) -> Param:
        """The parameter of kernels."""
        return Param(f"{self.name}_ptr", self.tensor)

    @property
    def part(self) -> str:
        """The tensor for the parts of a split tile."""
        return f"part_{self.name}"

    @property
    def wrong_argument(self) -> str:
        """The message for another value of the argument."""
        return f"{self.argument} must be True, False or 'head', got {{{self.argument}!r}}"


def row_results_of(spec: AttentionSpec, apart: bool = False) -> tuple[RowResult, ...]:
    """Return the results of a spec. `apart`: the running maximum of the kernel may differ."""
    largest = RowResult(
        name="max",
        letter="m",
        tensor="row_max",
        argument="return_max",
        option="STORE_MAX",
        place="maxima_at",
        words="largest base-2 score",
        apart=apart,
    )
    return (largest,) if spec.row_max else ()


@dataclass(frozen=True)
class RowResults:
    """The base of templates that compute or return results of rows."""

    optional_fields: ClassVar[tuple[str, ...]] = (
        *("row_results", "row_tensors", "row_options", "row_stores"),
        *("followed", "top", "top_options", "written_words"),
    )

    row_results: tuple[RowResult, ...]

    @property
    def row_tensors(self) -> list[str]:
        """The tensors of these results in the launcher, as arguments and parameters."""
        return [row.tensor for row in self.row_results]

    @property
    def row_options(self) -> list[str]:
        """The compile-time options by which kernels store them."""
        return [row.option for row in self.row_results]

    @property
    def row_stores(self) -> list[str]:
        """The same options, as arguments of a launch."""
        return [row.stored for row in self.row_results]

    @property
    def followed(self) -> list[RowResult]:
        """The results that the loop over tiles follows, in addition to `m_i`."""
        return [row for row in self.row_results if row.apart]

    @property
    def top(self) -> list[str]:
        """The values of the loop for these results."""
        return [row.value for row in self.followed]

    @property
    def top_options(self) -> list[str]:
        """The options by which the loop computes these values."""
        return [row.option for row in self.followed]

    @property
    def written_words(self) -> str:
        """The results of a kernel, in words."""
        return in_words("out", self.row_results)


def in_words(out: str, row_results: tuple[RowResult, ...]) -> str:
    """Return the results of a kernel in words, from `out` to the results of rows."""
    *others, last = [out, "base-2 log-sum-exp", *(row.words for row in row_results)]
    return f"{', '.join(others)} and {last}"


def largest_started() -> Assign:
    """Return the statement that starts the largest logit of each row."""
    return assign(TOP, op('{tl}.full([BLOCK_M], float("-inf"), {tl}.float32)'))


def largest_followed(logits: str, scaled: Code | None) -> Assign:
    """Return the statement that follows the largest logit of each row in a tile."""
    of_tile: Code = op("{tl}.max({0}, 1)", logits)
    return assign(TOP, maximum(TOP, of_tile if scaled is None else times(of_tile, scaled)))
