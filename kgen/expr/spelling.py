"""How a language writes a call: a format over printed operands, how tightly it binds, and what it calls."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

# Binding strength of a printed form, Python's order; a form is bracketed where its context binds tighter.
TERNARY, OR, AND, NOT, COMPARE, BITOR, BITAND, SHIFT, ADD, MUL, UNARY, POWER, ATOM = range(13)

Accuracy = Literal["fast", "usual", "precise"]
"""Of functions: an approximation that a spec opts into, what values in 16 bits need, what values in 32 bits need."""

MODULES = {"triton": ("tl", ""), "gluon": ("gl", "_hopper")}
"""Languages that have the same functions: the module of each, and how its own versions of a file's helpers end."""


@dataclass(frozen=True)
class Spelling:
    """How a target writes a call: a format over its operands, and how tightly the written form binds.

    `operand` is the binding strength that operands must have so as not to be bracketed. `helper` is the text of a
    function that the form calls, which the emitted file has to define.
    """

    form: str
    binds: int = ATOM
    operand: int = TERNARY
    helper: str | None = None


def in_modules(form: str) -> dict[str, str]:
    """A form in each of these languages: `{tl}` is its module, `{end}` the end of a helper's name."""
    return {
        language: form.replace("{tl}", module).replace("{end}", end)
        for language, (module, end) in MODULES.items()
    }


def infix(symbol: str, binds: int, operand: int | None = None) -> Spelling:
    """An operator between its two operands."""
    return Spelling(f"{{0}} {symbol} {{1}}", binds, binds if operand is None else operand)


def helped_in_modules(form: str, helper: str) -> dict[str, Spelling]:
    """A call of a function that the file defines, in each of these languages: `{tl}`, `{jit}` and `{end}` stand in
    both texts."""
    marks = {"triton": "@triton.jit", "gluon": "@gluon.jit"}
    texts = zip(in_modules(form).items(), in_modules(helper).values(), strict=True)
    return {name: helped(own, text.replace("{jit}", marks[name])) for (name, own), text in texts}


def helped(form: str, helper: str) -> Spelling:
    """A call of a function that the file defines; its text may be indented."""
    return Spelling(form, helper=dedent(helper).strip())
