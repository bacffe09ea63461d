"""Records of a kernel that ran on lanes: accesses, claims, and the digits of program numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import z3

from kgen.prove.digits import ONE, Monomial
from kgen.prove.lanes import Tensor


def inside(indices: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Return the condition that all indices are inside of their dimensions."""
    pairs = zip(indices, sizes, strict=True)
    return z3.And(*(z3.And(i >= 0, i < size) for i, size in pairs))


@dataclass(frozen=True)
class Access:
    """A load or a store of a tensor: one index for each dimension, and its guard."""

    text: str
    line: int
    tensor: Tensor
    stores: bool
    when: Any
    sizes: tuple[Any, ...]
    indices: tuple[Any, ...]
    value: Any = None

    @property
    def inside(self) -> Any:
        """The condition that all indices are inside of the tensor."""
        return inside(self.indices, self.sizes)


@dataclass(frozen=True)
class Claim:
    """A claim about an expression of a kernel, if the expression runs."""

    text: str
    when: Any
    claim: Any


@dataclass
class Digits:
    """A number and the pairs of quotient and remainder into which a kernel splits it."""

    term: Any
    limit: Monomial
    root: str
    divisor: Monomial = ONE
    splits: list[tuple[Any, Any]] = field(default_factory=list)
