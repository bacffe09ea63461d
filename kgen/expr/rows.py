"""What a row of the function table is, and how one is written: a function, or an operation with a symbol."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kgen.expr import type_rules as types
from kgen.expr.nodes import Type
from kgen.expr.spelling import MODULES, Accuracy, Spelling, in_modules


class Finite(enum.Enum):
    """Where a function of finite numbers is finite: zero times what is not would be NaN."""

    EVERYWHERE = enum.auto()
    UP_TO_OVERFLOW = enum.auto()
    """Infinite for arguments that are too large."""
    WHERE_DEFINED = enum.auto()
    """NaN outside of its domain."""
    AWAY_FROM_POLES = enum.auto()
    """Infinite or NaN at some finite arguments."""


@dataclass(frozen=True)
class Function:
    """A row of the table."""

    name: str
    arity: tuple[int, int | None]
    typed: Callable[[tuple[Type, ...]], Type]
    reference: Callable[..., Any]
    """Called as `reference(torch, *tensors)`."""
    value: Callable[..., Any]
    """The same for one Python number each; raises `ArithmeticError` or `ValueError` where there is none."""
    derivative: Callable[..., tuple[Any | None, ...]] | None
    """`None` for functions that are flat wherever they are smooth (comparisons, `floor`) or take integers."""
    spelled: dict[str, Spelling]
    """By language: `python` is the spec's own syntax, `torch` eager PyTorch, the others those of kernels."""
    callable: bool = True
    """Whether a spec may call it by name; operators are not."""
    fast: dict[str, Spelling] = field(default_factory=dict)
    """Cheaper approximations that a spec opts into with `fast_math: true`."""
    precise: dict[str, Spelling] = field(default_factory=dict)
    """Where the usual one is not as good as float32 is."""
    finite: Finite = Finite.EVERYWHERE

    @property
    def result(self) -> Type | None:
        """FLOAT for a function whose result is real whatever its operands are; `None` where it follows them."""
        return Type.FLOAT if self.typed is types.real else None

    def spelling(self, language: str, accuracy: Accuracy) -> Spelling:
        """How a language spells it at an accuracy: as usual, where it has nothing else."""
        forms = {"fast": self.fast, "usual": self.spelled, "precise": self.precise}[accuracy]
        return forms.get(language) or self.spelled[language]

    def spellings(self, language: str) -> tuple[Spelling, ...]:
        """All of a language's."""
        forms = (self.spelled, self.fast, self.precise)
        return tuple(form[language] for form in forms if language in form)


def operation(
    name: str,
    typed: Callable[[tuple[Type, ...]], Type],
    reference: Callable[..., Any],
    derivative: Callable[..., tuple[Any | None, ...]] | None,
    python: Spelling,
    *,
    value: Callable[..., Any] | None = None,
    torch: Spelling | None = None,
    triton: Spelling | None = None,
    cuda: Spelling | None = None,
    cute: Spelling | None = None,
    finite: Finite = Finite.EVERYWHERE,
) -> Function:
    """Each language has the spelling of Python where it has no other."""
    arity = 1 if "{1}" not in python.form else 2
    own = {"torch": torch, "cuda": cuda, "cute": cute, **dict.fromkeys(MODULES, triton)}
    spelled = {"python": python} | {language: form or python for language, form in own.items()}
    value = value or getattr(operator, name)
    return Function(
        name, (arity, arity), typed, reference, value, derivative, spelled, callable=False, finite=finite
    )


def function(
    name: str,
    reference: Callable[..., Any],
    derivative: Callable[..., tuple[Any | None, ...]] | None,
    *,
    typed: Callable[[tuple[Type, ...]], Type] = types.real,
    arity: tuple[int, int | None] = (1, 1),
    value: Callable[..., Any] | None = None,
    torch: str | Spelling | None = None,
    triton: str | Spelling | None = None,
    gluon: str | Spelling | None = None,
    cuda: str | Spelling | None = None,
    cute: str | Spelling | None = None,
    fast: dict[str, Spelling] | None = None,
    precise: dict[str, Spelling] | None = None,
    finite: Finite = Finite.EVERYWHERE,
) -> Function:
    """Each language has a function of that name, and Python's `math` has, where nothing else is said.

    `triton` is Gluon's spelling too, with its own module for `{tl}`, where `gluon` is not another.
    """
    operands = ", ".join(f"{{{i}}}" for i in range(arity[0]))
    forms: dict[str, str | Spelling] = {
        "python": f"{name}({operands})",
        "torch": torch or f"torch.{name}({operands})",
        "cuda": cuda or f"{name}f({operands})",
        "cute": cute or f"cute.math.{name}({operands})",
    }
    if isinstance(triton, Spelling):
        forms |= dict.fromkeys(MODULES, triton)
    else:
        forms |= in_modules(triton or f"{{tl}}.{name}({operands})")
    if gluon is not None:
        forms["gluon"] = gluon
    spelled = {k: v if isinstance(v, Spelling) else Spelling(v) for k, v in forms.items()}
    value = value or getattr(math, name)
    return Function(
        *(name, arity, typed, reference, value, derivative, spelled),
        fast=fast or {},
        precise=precise or {},
        finite=finite,
    )


def shifted(by: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """Bits of a number moved, by as many places as an integer has."""

    def value(a: int, n: int) -> int:
        if not 0 <= n < 64:
            raise ValueError("more places than an integer has")
        return by(a, n)

    return value
