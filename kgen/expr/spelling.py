"""Spellings of calls in a language: a format over printed operands, a precedence, and helper
functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

# Precedence of a printed form, in Python's order. A form gets brackets where its context binds
# tighter.
TERNARY, OR, AND, NOT, COMPARE, BITOR, BITAND, SHIFT, ADD, MUL, UNARY, POWER, ATOM = range(13)

Accuracy = Literal["fast", "usual", "precise"]
"""The accuracy of functions: a `fast_math` approximation, for 16-bit values, or for 32-bit
values.
"""

MODULES = {"triton": ("tl", ""), "gluon": ("gl", "_gluon")}
"""Languages with the same functions: the module of each, and the suffix of its versions of
helpers.
"""


@dataclass(frozen=True)
class Spelling:
    """A call in a target: a format over its operands, and its precedence.

    `operand` is the precedence that an operand needs to stand without brackets. `helper` is the
    text of a function that the form calls, which the emitted file must define.
    """

    form: str
    binds: int = ATOM
    operand: int = TERNARY
    helper: str | None = None


def in_modules(form: str) -> dict[str, str]:
    """Return a form in each of these languages: `{tl}` is the module, `{end}` the suffix of
    helpers.
    """
    return {
        language: form.replace("{tl}", module).replace("{end}", end)
        for language, (module, end) in MODULES.items()
    }


def infix(symbol: str, binds: int, operand: int | None = None) -> Spelling:
    """Return an operator between its two operands."""
    return Spelling(f"{{0}} {symbol} {{1}}", binds, binds if operand is None else operand)


def helped_in_modules(form: str, helper: str) -> dict[str, Spelling]:
    """Return a call of a helper in each of these languages.

    `{tl}`, `{jit}` and `{end}` are replaced in both texts.
    """
    marks = {"triton": "@triton.jit", "gluon": "@gluon.jit"}
    texts = zip(in_modules(form).items(), in_modules(helper).values(), strict=True)
    return {name: helped(own, text.replace("{jit}", marks[name])) for (name, own), text in texts}


def helped(form: str, helper: str) -> Spelling:
    """Return a call of a helper, whose text may be indented."""
    return Spelling(form, helper=dedent(helper).strip())
