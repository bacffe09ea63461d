"""The rows of the function table, and helpers that build them: a function, or an operator with a
symbol.
"""

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
    """The points at which a function of finite numbers is finite: zero times infinity or NaN would
    be NaN.
    """

    EVERYWHERE = enum.auto()
    UP_TO_OVERFLOW = enum.auto()
    """Infinite for large arguments."""
    WHERE_DEFINED = enum.auto()
    """NaN outside its domain."""
    AWAY_FROM_POLES = enum.auto()
    """Infinite or NaN at some finite arguments."""


@dataclass(frozen=True)
class Function:
    """A row of the table."""

    name: str
    arity: tuple[int, int | None]
    typed: Callable[[tuple[Type, ...]], Type]
    reference: Callable[..., Any]
    """The reference on torch tensors, called as `reference(torch, *tensors)`."""
    value: Callable[..., Any]
    """The function of Python numbers. Raises `ArithmeticError` or `ValueError` if it has no
    value.
    """
    derivative: Callable[..., tuple[Any | None, ...]] | None
    """Partial derivatives. `None` if they are zero wherever the function is smooth (`floor`), or
    operands are integers.
    """
    spelled: dict[str, Spelling]
    """Spellings by language: `python` is the syntax of specs, `torch` eager PyTorch, the others are
    for kernels.
    """
    callable: bool = True
    """True if specs can call the function by name; operators are not callable."""
    fast: dict[str, Spelling] = field(default_factory=dict)
    """Faster approximations for `fast_math: true`."""
    precise: dict[str, Spelling] = field(default_factory=dict)
    """Spellings for float32 accuracy, if the usual ones are less accurate."""
    finite: Finite = Finite.EVERYWHERE

    @property
    def result(self) -> Type | None:
        """FLOAT if the result is always real; `None` if its type follows the operands."""
        return Type.FLOAT if self.typed is types.real else None

    def with_accuracies(self, fast: dict[str, Spelling], precise: dict[str, Spelling]) -> Function:
        """Return the row with other spellings for some accuracies."""
        return replace(self, fast=fast, precise=precise)

    def spelling(self, language: str, accuracy: Accuracy) -> Spelling:
        """Return the spelling of a language at an accuracy; the usual one if there is no other."""
        forms = {"fast": self.fast, "usual": self.spelled, "precise": self.precise}[accuracy]
        return forms.get(language) or self.spelled[language]

    def spellings(self, language: str) -> tuple[Spelling, ...]:
        """Return all spellings of a language."""
        forms = (self.spelled, self.fast, self.precise)
        return tuple(form[language] for form in forms if language in form)


class Operators(TypedDict, total=False):
    """Spellings of an operation in languages that differ from Python. Gluon uses Triton's."""

    torch: Spelling
    triton: Spelling
    cuda: Spelling
    cute: Spelling


class Calls(TypedDict, total=False):
    """Spellings of a call in languages with another name for the function. `{tl}` is the module of
    Triton or Gluon.

    Gluon uses `triton` unless there is a `gluon`.
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
    """Return the row of an operator.

    A language without its own spelling uses the spelling of Python.
    """
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
        name,
        (arity, arity),
        typed,
        reference,
        value,
        derivative,
        spelled,
        callable=False,
        finite=finite,
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
    """Return the row of a function.

    Without another spelling, languages and Python's `math` have it under this name.
    """
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
    """Return a shift of a Python number by the width of an integer."""

    def value(a: int, n: int) -> int:
        if not 0 <= n < 64:
            raise ValueError("more places than an integer has")
        return by(a, n)

    return value
