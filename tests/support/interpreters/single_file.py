"""The one file of a spec that does without others: its kernels for Hopper among the rest."""

from __future__ import annotations

from pathlib import Path

from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, load


def single(spec: Loaded | Path) -> str:
    """Its text."""
    (text,) = render_spec(load(spec) if isinstance(spec, Path) else spec, ["triton"], single=True).values()
    return text
