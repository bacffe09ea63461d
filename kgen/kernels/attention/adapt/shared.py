"""The dataclasses that templates of several adapters print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.spec import AttentionSpec
from kgen.targets.template import Template


@dataclass(frozen=True)
class Verbatim(Template):
    """A file whose text is there already."""

    template: ClassVar[str] = "attention/adapters/spec.j2"

    text: str


@dataclass(frozen=True)
class Head:
    """The columns of a head."""

    qk: int
    v: int


def head_of(spec: AttentionSpec) -> Head:
    """The columns of a spec's heads."""
    return Head(spec.head_dim.qk, spec.head_dim.v)
