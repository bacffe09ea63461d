"""Diagnostics: one clear error with file, line, column, caret and a hint.

Every error that a user can cause is a `KgenError` that carries one or more `Diagnostic`s. As text it is what the
command line prints of it. The exit codes are those of the command: 1 drift or a wrong result, 2 a bad spec or usage,
3 a toolchain or device that is missing.
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
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return "\n".join(map(show, self.diagnostics))


class MissingError(KgenError):
    """A toolchain, a package or a device that the command needs is not there."""

    exit_code = EXIT_MISSING


class RefutedError(KgenError):
    """Kernels that are not what their spec says. It is kgen that has to be mended."""

    exit_code = EXIT_BUG


class DriftError(KgenError):
    """What is on disk is not what the specs make, or would be lost by writing."""

    exit_code = EXIT_WRONG


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is most likely a slip of, if any is near."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """A hint that names the closest choice, or `None` when none is near."""
    near = closest(word, choices)
    return None if near is None else f"did you mean `{near}`?"


def shown(value: Any) -> str:
    """A value from a file as a message quotes it, shortened when it is long."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{shortened(str(value))}`"


def shortened(text: str) -> str:
    """The text, cut at 40 characters."""
    return text if len(text) <= 40 else text[:37] + "..."


def show(diagnostic: Diagnostic, *, color: bool = False) -> str:
    """The diagnostic as lines of text, with the source line and carets where there is one.

    Nothing that came from a file reaches the terminal unescaped.
    """
    red, blue, bold, plain = ("\x1b[1;31m", "\x1b[1;34m", "\x1b[1m", "\x1b[0m") if color else ("", "", "", "")
    head = f"{red}error[{escaped(diagnostic.code)}]{plain}{bold}: {escaped(diagnostic.message)}{plain}"
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
    """The diagnostic as plain data: every field under its own name, `None` where it is not known."""
    return dataclasses.asdict(diagnostic)


_WIDTH = 120


def _window(diagnostic: Diagnostic) -> tuple[str, str, str]:
    """The source line, escaped, cut around what the carets underline and shortened when it is very long."""
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
    """The text on one line in which nothing hides: what cannot be printed is written as Python writes it."""
    # A tab is one character wide here, so that the carets stand under what they mean.
    return "".join(c if c.isprintable() else " " if c == "\t" else ascii(c)[1:-1] for c in text)
