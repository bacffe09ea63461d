"""Self-contained file of a spec, including its kernels for Hopper."""

from __future__ import annotations

from pathlib import Path

from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, load


def single(spec: Loaded | Path) -> str:
    """Return the text of the file."""
    (text,) = render_spec(load(spec) if isinstance(spec, Path) else spec, ["triton"], single=True).values()
    return text
