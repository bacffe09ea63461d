"""Self-contained file of a spec, including its kernels for Hopper."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, load


def single(spec: Loaded | Path) -> str:
    """Return the text of the file."""
    return _of_file(spec, spec.read_text()) if isinstance(spec, Path) else _of_spec(spec)


@lru_cache(128)
def _of_file(path: Path, text: str) -> str:
    """The text for a spec in a file that has this `text`: several tests run each of the stock
    specs.
    """
    return _of_spec(load(path))


def _of_spec(spec: Loaded) -> str:
    (text,) = render_spec(spec, ["triton"], single=True).values()
    return text
