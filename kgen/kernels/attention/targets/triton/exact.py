"""The log-sum-exp as kernels and launchers have it: float32, or float64 where kernels agree on
every bit of a score.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exact:
    """How templates spell a log-sum-exp.

    A float64 one is two numbers of float32 inside of a tile: `lse`, and `lse_low` that is left of
    it.
    """

    there: bool
    """True for float64."""

    @property
    def dtype(self) -> str:
        """The dtype of torch."""
        return "float64" if self.there else "float32"

    @property
    def type(self) -> str:
        """The type in a kernel."""
        return f"tl.{self.dtype}"

    @property
    def words(self) -> str:
        """The dtype, for the end of a phrase in a docstring."""
        return ", in float64," if self.there else ""

    @property
    def maximum(self) -> str:
        """The maximum of a row that the logarithm of its sum is added to."""
        return "m_i.to(tl.float64)" if self.there else "m_i"

    @property
    def sink(self) -> str:
        """The weight of a sink in base 2."""
        return self._narrow("sink - lse")

    @property
    def rescaling(self) -> str:
        """The exponent, in base 2, by which a sum is rescaled."""
        return self._narrow("m_i - m_ref")

    @property
    def weight(self) -> str:
        """The weight of a share in base 2."""
        return self._narrow("part_lse - m_ref")

    @property
    def low_of_rows(self) -> str | None:
        """The low part of the log-sum-exp, along the rows of a tile."""
        return "lse_low[:, None]" if self.there else None

    @property
    def low_of_columns(self) -> str | None:
        """The same along its columns."""
        return "lse_low[None, :]" if self.there else None

    @property
    def of_delta(self) -> list[str]:
        """The dtype of delta where it is another."""
        return ["dtype=torch.float32"] if self.there else []

    @property
    def of_dlse(self) -> list[str]:
        """The conversion of a gradient to float32."""
        return ["dlse = None if dlse is None else dlse.float()"] if self.there else []

    @property
    def natural(self) -> str:
        """The natural logarithm."""
        return "(lse * math.log(2)).float()" if self.there else "lse * math.log(2)"

    @property
    def options(self) -> list[str]:
        """The options of a launch.

        A fused multiplication and addition has other bits in one kernel than in another.
        """
        return ["enable_fp_fusion=False"] if self.there else []

    def _narrow(self, difference: str) -> str:
        return f"({difference}).to(tl.float32)" if self.there else difference
