"""The dtype of the log-sum-exp: float32, or float64 if kernels must agree on all bits of scores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exact:
    """The template expressions of a log-sum-exp.

    In a tile, float64 is the sum of two float32 numbers, `lse` and `lse_low`.
    """

    there: bool
    """True if the log-sum-exp is float64."""

    @property
    def dtype(self) -> str:
        """The PyTorch dtype."""
        return "float64" if self.there else "float32"

    @property
    def type(self) -> str:
        """The Triton type."""
        return f"tl.{self.dtype}"

    @property
    def words(self) -> str:
        """The dtype, for the end of a phrase in a docstring."""
        return ", in float64," if self.there else ""

    @property
    def maximum(self) -> str:
        """The row maximum, to which the logarithm of the row sum is added."""
        return "m_i.to(tl.float64)" if self.there else "m_i"

    @property
    def sink(self) -> str:
        """The base-2 exponent of a sink's probability."""
        return self._narrow("sink - lse")

    @property
    def rescaling(self) -> str:
        """The base-2 exponent that rescales a sum."""
        return self._narrow("m_i - m_ref")

    @property
    def weight(self) -> str:
        """The base-2 exponent of the weight of a split."""
        return self._narrow("part_lse - m_ref")

    @property
    def low_of_rows(self) -> str | None:
        """The low part of the log-sum-exp, along the rows of a tile."""
        return "lse_low[:, None]" if self.there else None

    @property
    def low_of_columns(self) -> str | None:
        """The low part of the log-sum-exp, along the columns of a tile."""
        return "lse_low[None, :]" if self.there else None

    @property
    def of_delta(self) -> list[str]:
        """The dtype argument of delta, if it is not the default."""
        return ["dtype=torch.float32"] if self.there else []

    @property
    def of_dlse(self) -> list[str]:
        """The conversion of a gradient to float32."""
        return ["dlse = None if dlse is None else dlse.float()"] if self.there else []

    @property
    def natural(self) -> str:
        """The natural-logarithm function."""
        return "(lse * math.log(2)).float()" if self.there else "lse * math.log(2)"

    @property
    def options(self) -> list[str]:
        """Launch options.

        They disable FMA contraction, which may produce different bits in different kernels.
        """
        return ["enable_fp_fusion=False"] if self.there else []

    def _narrow(self, difference: str) -> str:
        return f"({difference}).to(tl.float32)" if self.there else difference
