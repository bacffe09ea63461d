"""What a row of the function table is, and how one is written: a function, or an operation with a symbol."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from kgen.expr import type_rules as types
from kgen.expr.nodes import Type
from kgen.expr.spelling import MODULES, Accuracy, Spelling, in_modules

if TYPE_CHECKING:
    from typing_extensions import Unpack


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

    def with_accuracies(self, fast: dict[str, Spelling], precise: dict[str, Spelling]) -> Function:
        """The same row where some languages have other forms than the usual one."""
        return replace(self, fast=fast, precise=precise)

    def spelling(self, language: str, accuracy: Accuracy) -> Spelling:
        """How a language spells it at an accuracy: as usual, where it has nothing else."""
        forms = {"fast": self.fast, "usual": self.spelled, "precise": self.precise}[accuracy]
        return forms.get(language) or self.spelled[language]

    def spellings(self, language: str) -> tuple[Spelling, ...]:
        """All of a language's."""
        forms = (self.spelled, self.fast, self.precise)
        return tuple(form[language] for form in forms if language in form)


class Operators(TypedDict, total=False):
    """How languages write an operation, where it is not as in Python. Gluon writes what Triton does."""

    torch: Spelling
    triton: Spelling
    cuda: Spelling
    cute: Spelling


class Calls(TypedDict, total=False):
    """How languages write a call, where the function has another name there. `{tl}` is the module of Triton or Gluon.

    `triton` is Gluon's too, where `gluon` is not another.
    """

    torch: str | Spelling
    triton: str | Spelling
    gluon: str | Spelling
    cuda: str | Spelling
    cute: str | Spelling


def operation(
    name: str,
    typed: Callable[[tuple[Type, ...]], Type],
    reference: Callable[..., Any],
    derivative: Callable[..., tuple[Any | None, ...]] | None,
    python: Spelling,
    *,
    value: Callable[..., Any] | None = None,
    finite: Finite = Finite.EVERYWHERE,
    **others: Unpack[Operators],
) -> Function:
    """Each language has the spelling of Python where it has no other."""
    arity = 1 if "{1}" not in python.form else 2
    spelled = {
        "python": python,
        "torch": others.get("torch", python),
        "cuda": others.get("cuda", python),
        "cute": others.get("cute", python),
        **dict.fromkeys(MODULES, others.get("triton", python)),
    }
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
    finite: Finite = Finite.EVERYWHERE,
    **others: Unpack[Calls],
) -> Function:
    """Each language has a function of that name, and Python's `math` has, where nothing else is said."""
    operands = ", ".join(f"{{{i}}}" for i in range(arity[0]))
    forms: dict[str, str | Spelling] = {
        "python": f"{name}({operands})",
        "torch": others.get("torch", f"torch.{name}({operands})"),
        "cuda": others.get("cuda", f"{name}f({operands})"),
        "cute": others.get("cute", f"cute.math.{name}({operands})"),
    }
    triton = others.get("triton", f"{{tl}}.{name}({operands})")
    forms |= dict.fromkeys(MODULES, triton) if isinstance(triton, Spelling) else in_modules(triton)
    if "gluon" in others:
        forms["gluon"] = others["gluon"]
    spelled = {k: v if isinstance(v, Spelling) else Spelling(v) for k, v in forms.items()}
    value = value or getattr(math, name)
    return Function(name, arity, typed, reference, value, derivative, spelled, finite=finite)


def shifted(by: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """Bits of a number moved, by as many places as an integer has."""

    def value(a: int, n: int) -> int:
        if not 0 <= n < 64:
            raise ValueError("more places than an integer has")
        return by(a, n)

    return value
