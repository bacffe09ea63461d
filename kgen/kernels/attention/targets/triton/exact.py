"""The log-sum-exp as kernels and launchers have it: float32, or float64 where kernels agree on every bit of a score."""

from __future__ import annotations


def exact_fields(exact: bool) -> dict[str, object]:
    """The names by which templates spell a log-sum-exp.

    A float64 one is two numbers of float32 inside of a tile: `lse`, and `lse_low` that is left of it.
    """
    narrow = (lambda difference: f"({difference}).to(tl.float32)") if exact else str
    return {
        "there": exact,
        "dtype": "float64" if exact else "float32",
        "type": "tl.float64" if exact else "tl.float32",
        "words": ", in float64," * exact,
        "maximum": "m_i.to(tl.float64)" if exact else "m_i",
        "sink": narrow("sink - lse"),
        "rescaling": narrow("m_i - m_ref"),
        "weight": narrow("part_lse - m_ref"),
        "low_of_rows": "lse_low[:, None]" if exact else None,
        "low_of_columns": "lse_low[None, :]" if exact else None,
        "of_delta": ["dtype=torch.float32"] * exact,
        "of_dlse": ["dlse = None if dlse is None else dlse.float()"] * exact,
        "natural": "(lse * math.log(2)).float()" if exact else "lse * math.log(2)",
        "fusion": not exact,
        "fusion_words": (
            "A fused multiplication and addition would have other bits in one kernel than in another."
            if exact
            else "Triton 3.10 will fuse multiplications and additions only where that is asked for."
        ),
    }
