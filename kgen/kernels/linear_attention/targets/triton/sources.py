"""Placeholder of the Triton target until its kernels exist."""

from __future__ import annotations

from typing import NoReturn

from kgen.diagnostics import Diagnostic, KgenError
from kgen.spec.load import Loaded


def sources(loaded: Loaded) -> NoReturn:
    """Raise `KgenError`: the kernels do not exist yet."""
    message = "`kernel: linear_attention` has no Triton kernels yet"
    raise KgenError(Diagnostic("unsupported-target", message, file=str(loaded.path)))
