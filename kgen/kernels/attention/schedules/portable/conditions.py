"""The conditions of the portable kernels."""

from __future__ import annotations

from kgen.kernels.attention.spec import AttentionSpec


def takes_many_queries(spec: AttentionSpec) -> bool:
    """True if the portable forward kernel supports the spec. It reads no pages."""
    return "forward" in spec.passes and spec.paged_kv is None
