"""Triton's interpreter, made to work with the NumPy that is installed."""

from __future__ import annotations

from typing import Any


def mend() -> None:
    """Let run-time integers bound loops in the interpreter under NumPy 2.4 and later.

    The interpreter keeps scalars as arrays of one element and calls `int` on them, which NumPy 2.4 refuses.
    Harmless where that is not so. Call it before the first kernel runs.
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
