"""The dtype of the log-sum-exp: float32, or float64 if kernels must agree on all bits of scores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exact:
    """The template expressions of a log-sum-exp.

    In a tile, float64 is the sum of two float32 numbers, `lse` and `lse_low`.
    """

    exact: bool
    """True if the log-sum-exp is float64."""

    @property
    def lse_dtype(self) -> str:
        """The PyTorch dtype."""
        return "float64" if self.exact else "float32"

    @property
    def lse_type(self) -> str:
        """The Triton type."""
        return f"tl.{self.lse_dtype}"

    @property
    def lse_words(self) -> str:
        """The dtype, for the end of a phrase in a docstring."""
        return ", in float64," if self.exact else ""

    @property
    def row_maximum(self) -> str:
        """The row maximum, to which the logarithm of the row sum is added."""
        return "m_i.to(tl.float64)" if self.exact else "m_i"

    @property
    def sink_exponent(self) -> str:
        """The base-2 exponent of a sink's probability."""
        return self._narrow("sink - lse")

    @property
    def rescaling_exponent(self) -> str:
        """The base-2 exponent that rescales a sum."""
        return self._narrow("m_i - m_ref")

    @property
    def weight_exponent(self) -> str:
        """The base-2 exponent of the weight of a split."""
        return self._narrow("part_lse - m_ref")

    @property
    def lse_low_of_rows(self) -> str | None:
        """The low part of the log-sum-exp, along the rows of a tile."""
        return "lse_low[:, None]" if self.exact else None

    @property
    def lse_low_of_columns(self) -> str | None:
        """The low part of the log-sum-exp, along the columns of a tile."""
        return "lse_low[None, :]" if self.exact else None

    @property
    def delta_dtype(self) -> list[str]:
        """The dtype argument of delta, if it is not the default."""
        return ["dtype=torch.float32"] if self.exact else []

    @property
    def dlse_in_float32(self) -> list[str]:
        """The conversion of a gradient to float32."""
        return ["dlse = None if dlse is None else dlse.float()"] if self.exact else []

    @property
    def natural_lse(self) -> str:
        """The natural-logarithm function."""
        return "(lse * math.log(2)).float()" if self.exact else "lse * math.log(2)"

    @property
    def exact_options(self) -> list[str]:
        """Launch options.

        They disable FMA contraction, which may produce different bits in different kernels.
        """
        return ["enable_fp_fusion=False"] if self.exact else []

    def _narrow(self, difference: str) -> str:
        return f"({difference}).to(tl.float32)" if self.exact else difference
