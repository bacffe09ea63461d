"""Diagnostics: one clear error with file, line, column, caret and a hint.

Every error that a user can cause is a `KgenError` that carries one or more `Diagnostic`s. Only the command
line prints them. The exit codes are those of the command: 1 drift or a wrong result, 2 a bad spec or usage,
3 a toolchain or device that is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_MISSING = 3
EXIT_BUG = 70


@dataclass(frozen=True)
class Diagnostic:
    """One thing that is wrong, where it is, and what would mend it.

    `line` and `column` are 1-based. `source` is the text of that line; `length` is how many of its characters
    the caret underlines.
    """

    code: str
    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    length: int = 1
    source: str | None = None
    hint: str | None = None


class KgenError(Exception):
    """An error that the user can mend. `exit_code` is what the command exits with."""

    exit_code = EXIT_USAGE

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]) -> None:
        self.diagnostics = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        super().__init__("; ".join(d.message for d in self.diagnostics))


class MissingError(KgenError):
    """A toolchain, a package or a device that the command needs is not there."""

    exit_code = EXIT_MISSING


class DriftError(KgenError):
    """What is on disk is not what the specs make, or would be lost by writing."""

    exit_code = EXIT_WRONG
