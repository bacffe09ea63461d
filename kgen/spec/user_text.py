"""Free text of a spec, which must be escaped for the place where it is printed.

Summaries, licenses, expressions with their comments, and file names appear in docstrings and
comments of emitted files. Some characters would end these. A `UserText` is not a `str`: `str()`,
f-strings, `join` and jinja refuse it, so that a template or a target cannot print it unescaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from kgen.diagnostics import escaped

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


class UserText:
    """Text that a user wrote. `written` is the raw text, for parsers and checks, not for emitted
    files.
    """

    __slots__ = ("written",)

    def __init__(self, written: str) -> None:
        self.written = written

    def lines(self) -> list[UserText]:
        """Return the lines, without leading and trailing blanks of the whole text."""
        return [UserText(line) for line in self.written.strip().split("\n")]

    def with_values(self, values: Mapping[str, float]) -> UserText:
        """A line of an expression with numbers in place of these names; its comment stays."""
        code, mark, comment = self.written.partition("#")
        for name, value in values.items():
            number = f"({value!r})" if value < 0 else repr(value)
            code = re.sub(rf"(?<![\w.]){name}(?!\w)", number, code)
        return UserText(code + mark + comment)

    def in_docstring(self) -> str:
        """Escape the text for one line of a Python docstring, whose value is then the text."""
        text = escaped(self.written).replace("\\", "\\\\")
        return re.sub(r'""+|"$', lambda quotes: '\\"' * len(quotes[0]), text)

    def in_comment(self) -> str:
        """Escape the text for a one-line comment in Python, C++ or CUDA.

        The result does not end the comment, and does not continue it on the next line. In the
        first two lines of a Python file, it does not declare an encoding (PEP 263).
        """
        text = re.sub("coding(?=[:=])", "coding ", escaped(self.written).replace("*/", "* /"))
        goes_on = text.rstrip().endswith(("\\", "??/"))
        return text + " ." if goes_on else text

    def on_terminal(self) -> str:
        """Escape the text for one line on a terminal, without control sequences."""
        return escaped(self.written)

    def __bool__(self) -> bool:
        return bool(self.written)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserText) and self.written == other.written

    def __hash__(self) -> int:
        return hash(self.written)

    def __repr__(self) -> str:
        return f"UserText({self.written!a})"

    def __str__(self) -> str:
        _refuse()

    def __format__(self, spec: str) -> str:
        _refuse()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # late: rendering from the cache runs without pydantic
        from pydantic_core import core_schema

        dumped = core_schema.plain_serializer_function_ser_schema(lambda text: text.written)
        text = core_schema.str_schema(strict=True)
        return core_schema.no_info_after_validator_function(cls, text, serialization=dumped)


def _refuse() -> NoReturn:
    raise TypeError(
        "text of a user has no str(): call `in_docstring`, `in_comment` or `on_terminal`"
    )
