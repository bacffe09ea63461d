"""Python source that is read and never run: text, syntax tree, and errors with places."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from kgen import files
from kgen.diagnostics import Diagnostic, KgenError

MAX_BYTES = 1_000_000


@dataclass(frozen=True, eq=False)
class Source:
    """A text with its name in diagnostics: a path or a command-line option."""

    name: str
    text: str

    @cached_property
    def lines(self) -> list[str]:
        # Python's parser counts only these line endings.
        return self.text.replace("\r\n", "\n").replace("\r", "\n").split("\n")

    def module(self) -> ast.Module:
        """Parse the statements of a file."""
        parsed = self._parse("exec")
        assert isinstance(parsed, ast.Module)
        return parsed

    def expression(self) -> ast.expr:
        """Parse the single expression of an option."""
        parsed = self._parse("eval")
        assert isinstance(parsed, ast.Expression)
        return parsed.body

    def _parse(self, mode: str) -> ast.AST:
        if "\0" in self.text:
            raise self.wrong("bad-character", "the text has a null character", 1, 1, "remove it")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self.text, mode=mode)
        except SyntaxError as error:
            # Python's messages differ between versions, kgen's must not.
            place = (min(error.lineno or 1, len(self.lines)), max(error.offset or 1, 1))
            hint = "fix the syntax error"
            raise self.wrong("syntax-error", "this is not valid Python", *place, hint) from None
        except (RecursionError, MemoryError, ValueError):
            hint = "split it into smaller parts"
            raise self.wrong(
                "too-deep", "the source nests too deep to be read", 1, 1, hint
            ) from None

    def wrong(
        self, code: str, message: str, line: int, column: int, hint: str, length: int = 1
    ) -> KgenError:
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else None
        return KgenError(Diagnostic(code, message, self.name, line, column, length, text, hint))


@dataclass(frozen=True, eq=False)
class Place:
    """A node of a syntax tree with its source."""

    source: Source
    node: ast.AST

    @property
    def line(self) -> int:
        return int(getattr(self.node, "lineno", 1))

    def refuse(self, code: str, message: str, hint: str) -> NoReturn:
        """Raise an error at this place."""
        raise self.wrong(code, message, hint)

    def wrong(self, code: str, message: str, hint: str) -> KgenError:
        """Return an error at this place."""
        line = self.source.lines[self.line - 1] if self.line <= len(self.source.lines) else ""
        # The parser counts columns in bytes.
        start = self._column(line, getattr(self.node, "col_offset", 0))
        end = len(line.rstrip())
        if getattr(self.node, "end_lineno", None) == self.line:
            end = self._column(line, getattr(self.node, "end_col_offset", None) or 0)
        return self.source.wrong(code, message, self.line, start + 1, hint, max(end - start, 1))

    @staticmethod
    def _column(line: str, offset: int) -> int:
        return len(line.encode()[:offset].decode(errors="replace"))


def read(path: Path) -> Source:
    """Return the text of a file. Raise `KgenError` if it cannot be read."""

    def wrong(code: str, message: str, hint: str) -> KgenError:
        return KgenError(Diagnostic(code, message, path.as_posix(), 1, 1, hint=hint))

    try:
        content = files.read(files.checked_path(path), MAX_BYTES)
    except OSError as error:
        raise wrong(
            "cannot-read", f"cannot read the file: {error.strerror or error}", "check its path"
        ) from None
    if len(content) > MAX_BYTES:
        hint = "move the functions into a file of their own"
        raise wrong("too-large", f"the file has more than {MAX_BYTES} bytes", hint)
    try:
        return Source(path.as_posix(), content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise wrong("bad-character", "the file is not UTF-8", "save it as UTF-8") from None
