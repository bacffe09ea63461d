"""The parts of the kernels for one chip in the files of a spec."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.linear_attention.targets.triton.gradients import BackwardKernels
from kgen.targets import Source
from kgen.targets.template import Template


@dataclass(frozen=True)
class OfBackward:
    """The operator of backward."""

    operands: list[str]
    saved: list[str]
    """The results of forward among them."""
    results: list[str]
    mapped: list[str]
    """Statements that replace q and k by the results of their feature maps."""
    kernels: BackwardKernels
    """The portable kernels."""


@dataclass(frozen=True)
class Call:
    """The operator of forward."""

    operands: list[str]
    saved: list[str]
    """Its results that backward reads."""
    backward: OfBackward | None


@dataclass(frozen=True)
class InFile:
    """The parts in `triton.py`, or in a single file."""

    opening: Template
    """Statements after the imports."""
    choice: Template
    """The function that decides between the kernels."""
    function: str
    """The function that launches the kernels of forward."""
    backward: str
    """The function that launches the kernels of backward; empty if there is none."""
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
