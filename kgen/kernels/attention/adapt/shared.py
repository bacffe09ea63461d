"""Dataclasses for the templates of several adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.spec import AttentionSpec
from kgen.targets.template import Template


@dataclass(frozen=True)
class Verbatim(Template):
    """A file with fixed text."""

    template: ClassVar[str] = "attention/adapters/spec.j2"

    text: str


@dataclass(frozen=True)
class Head:
    """The numbers of columns of a head."""

    qk: int
    v: int


def head_of(spec: AttentionSpec) -> Head:
    """Return the numbers of columns of a spec's heads."""
    return Head(spec.head_dim.qk, spec.head_dim.v)
