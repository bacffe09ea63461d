"""Triton's interpreter, made to work with the NumPy that is installed."""

from __future__ import annotations

from typing import Any


def mend() -> None:
    """Let run-time integers bound loops in the interpreter under NumPy 2.4 and later.

    The interpreter keeps scalars as arrays of one element and calls `int` on them, which NumPy 2.4 refuses.
    Harmless where that is not so. Casts from float32 to bfloat16 round to the nearest, as those of a GPU do: the
    interpreter's own truncate. Call it before the first kernel runs.
    """
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "kgen_mended", False):
        return

    def patch(tensor: Any, *args: Any) -> None:
        original(tensor, *args)
        # Past the scope that restores attributes: it restores this one's predecessor, as it should.
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patch.kgen_mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch
    interpreter._convert_float = _rounding(interpreter._convert_float)


def _rounding(convert: Any) -> Any:
    """The interpreter's conversion of floats, with float32 to bfloat16 rounded to nearest, ties to even."""
    import numpy

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if not (source.is_fp32() and target.is_bf16()):
            return convert(data, source, target, mode)
        bits = numpy.ascontiguousarray(data, dtype=numpy.float32).view(numpy.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return numpy.where(numpy.isnan(data), (bits >> 16) | 0x40, nearest).astype(numpy.uint16)

    return rounded
