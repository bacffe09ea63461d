"""The parts of the kernels for one chip in the files of a spec."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.targets import Source
from kgen.targets.template import Template


@dataclass(frozen=True)
class Call:
    """The operator of forward."""

    operands: list[str]
    saved: list[str]
    """Its results that backward reads."""


@dataclass(frozen=True)
class InFile:
    """The parts in `triton.py`, or in a single file."""

    opening: Template
    """Statements after the imports."""
    choice: Template
    """The function that decides between the kernels."""
    function: str
    """The function that launches the kernels."""
    modules: tuple[str, ...]
    """The modules of the standard library that the parts import."""
    parts: tuple[Template, ...] = ()
    """The kernels and their launcher, in a single file."""


@dataclass(frozen=True)
class Made:
    """The parts of one schedule."""

    together: InFile
    alone: InFile
    beside: Source
