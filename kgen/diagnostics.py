"""Diagnostics: one clear error with file, line, column, caret and a hint.

Every error that a user can cause is a `KgenError` with one or more `Diagnostic`s. Its text is the
output of the command. Exit codes:

- 1: files differ, or a result is wrong
- 2: a wrong spec or command line
- 3: a toolchain or a device is missing
- 70: a bug in kgen
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_MISSING = 3
EXIT_BUG = 70


@dataclass(frozen=True)
class Diagnostic:
    """One mistake, its place, and a hint how to correct it.

    `line` and `column` begin at 1. `source` is the text of the line. The carets underline `length`
    characters.
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
    """An error that the user can correct. The command exits with `exit_code`."""

    exit_code = EXIT_USAGE

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]) -> None:
        self.diagnostics = (
            (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        )
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return "\n".join(map(show, self.diagnostics))


class MissingError(KgenError):
    """A toolchain, package or device that the command needs is missing."""

    exit_code = EXIT_MISSING


class RefutedError(KgenError):
    """A proof shows that kernels do not compute their spec. This is a bug in kgen."""

    exit_code = EXIT_BUG


class DriftError(KgenError):
    """Files on disk differ from the rendered specs, or writing would lose an edit."""

    exit_code = EXIT_WRONG


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `word`, or None if none is similar."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """Return a hint that names the closest choice, or None if none is similar."""
    near = closest(word, choices)
    return None if near is None else f"did you mean `{near}`?"


def shown(value: Any) -> str:
    """Return a value from a file for a message: quoted, and shortened to 40 characters."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{shortened(str(value))}`"


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: `1 file`, `2 files`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(text: str) -> str:
    """Return the text, cut at 40 characters."""
    return text if len(text) <= 40 else text[:37] + "..."


def show(diagnostic: Diagnostic, *, color: bool = False) -> str:
    """Return the diagnostic as lines of text, with the source line and carets if `source` is set.

    Escape all text that comes from a file.
    """
    red, blue, bold, plain = (
        ("\x1b[1;31m", "\x1b[1;34m", "\x1b[1m", "\x1b[0m") if color else ("", "", "", "")
    )
    head = (
        f"{red}error[{escaped(diagnostic.code)}]{plain}{bold}: {escaped(diagnostic.message)}{plain}"
    )
    lines = [head]
    margin = " " * len(str(diagnostic.line or 0))
    if diagnostic.file is not None:
        position = (str(n) for n in (diagnostic.line, diagnostic.column) if n is not None)
        place = [escaped(diagnostic.file), *position]
        lines.append(f"{margin}{blue}-->{plain} {':'.join(place)}")
    if diagnostic.source is not None and diagnostic.line is not None:
        before, marked, after = _window(diagnostic)
        bar = f"{blue}{margin} |{plain}"
        lines.append(bar)
        lines.append(f"{blue}{diagnostic.line} |{plain} {before}{marked}{after}".rstrip())
        lines.append(f"{bar} {' ' * len(before)}{red}{'^' * max(len(marked), 1)}{plain}")
    if diagnostic.hint is not None:
        lines.append(f"{margin} {blue}={plain} hint: {escaped(diagnostic.hint)}")
    return "\n".join(lines)


def as_json(diagnostic: Diagnostic) -> dict[str, Any]:
    """Return the fields of the diagnostic by name. Unknown fields are None."""
    return dataclasses.asdict(diagnostic)


_WIDTH = 120


def _window(diagnostic: Diagnostic) -> tuple[str, str, str]:
    """Return the source line as (before, underlined, after), escaped and shortened to about 120
    columns.
    """
    source = diagnostic.source or ""
    start = max((diagnostic.column or 1) - 1, 0)
    end = min(start + max(diagnostic.length, 1), len(source))
    before, marked, after = source[:start], source[start:end], source[end:]
    if len(source) > _WIDTH:
        before = before if len(before) <= _WIDTH // 2 else "..." + before[-_WIDTH // 2 :]
        marked = marked if len(marked) <= _WIDTH // 2 else marked[: _WIDTH // 2] + "..."
        after = after if len(after) <= _WIDTH // 4 else after[: _WIDTH // 4] + "..."
    return escaped(before), escaped(marked), escaped(after)


def escaped(text: str) -> str:
    """Return the text on one line. Write each unprintable character as a Python escape."""
    # A tab becomes one space, so that the carets stand under the right columns.
    return "".join(c if c.isprintable() else " " if c == "\t" else ascii(c)[1:-1] for c in text)
