"""The layout of emitted files: no line is longer than `COLUMNS` if it can be broken. In Python,
short operands join their brackets.

Templates print names and messages of any length, so the layout is made from the text. A bracket is
opened at the end of a line, and operands fill the lines between it and its end. Beyond `_INDENTED`
columns, brackets do not indent these lines further. The program stays the same. A longer line
consists of one word: a name, a literal, or a formula without blanks in a docstring.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kgen.targets.folding import COLUMNS, DEEPEST, filled

_TEXT = r""" "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' """
_BRACKETS = r" (?P<open>[(\[{]) | (?P<close>[)\]}]) | \n"
_PYTHON_TEXT = rf"""[fFrRbB]{{0,2}}(?: \"\"\".*?\"\"\" | {_TEXT})"""
_PYTHON = rf" (?P<string>{_PYTHON_TEXT}) | (?P<comment>\#[^\n]*) | {_BRACKETS}"
_C = rf" (?P<string>{_TEXT}) | (?P<comment>//[^\n]* | /\*.*?\*/) | {_BRACKETS}"
_MESSAGE = re.compile(
    r'(?P<head> *(?:"\w+": |else )?)(?P<prefix>f?)"(?P<text>[^"\\]+)"(?P<tail>,?)'
)
_BETWEEN_WORDS = re.compile(r"(?:\{[^}]*\}|[^ {])+ +")
_TARGET = r"[\w.\[\]*, ]+(?:: [\w.]+)? [-+*/|&@]?= "
_LAMBDA = re.compile(r"\blambda [^:]*:")
_COMMA, _FOR = ", ?", " for | if "
_C_COMMENT = re.compile(
    r"^(?P<indent> *)(?P<code>[^\n/ ][^\n/]*?)? ?/\* (?P<text>(?:[^*]|\*(?!/))*?) ?\*/$",
    re.MULTILINE,
)
BLANK = " " * 4
_INDENTED = DEEPEST * len(BLANK)
"""Columns of indentation up to which a bracket indents the lines inside it.

Without it, the blanks in nested brackets would grow with the square of their number.
"""


@dataclass(frozen=True)
class _Language:
    """The layout of a language."""

    tokens: re.Pattern[str]
    """Strings, comments, brackets and ends of lines."""
    expression: re.Pattern[str]
    """A statement with a value that may be put into brackets."""
    operators: tuple[str, ...]
    """Separators of an expression, the loosest first."""
    comma: str
    """The end of the last operand in brackets."""

    def whole(self, line: str) -> bool:
        """True if a line closes all brackets that it opens, and has no comment."""
        depth = 0
        for token in self.tokens.finditer(line):
            depth += bool(token["open"]) - bool(token["close"])
            if depth < 0 or token["comment"]:
                return False
        return depth == 0

    def pairs(self, line: str) -> Iterator[tuple[int, int]]:
        """Yield the indices of the outermost brackets of a line that are not empty."""
        starts: list[int] = []
        for token in self.tokens.finditer(line):
            if token["open"]:
                starts.append(token.start())
            elif token["close"] and starts:
                start = starts.pop()
                if not starts and token.start() > start + 1:
                    yield start, token.start()

    def split(self, text: str, separators: str) -> list[str]:
        """Split a text outside of brackets and strings. An operator begins the part after it."""
        taken = [token.span() for token in self.tokens.finditer(text) if token["string"]]
        taken += [*self.pairs(text), *(names.span() for names in _LAMBDA.finditer(text))]
        found, start = [], 0
        for separator in re.finditer(separators, text):
            if not any(first <= separator.start() < last for first, last in taken):
                found.append(text[start : separator.start()])
                start = separator.end() if separators == _COMMA else separator.start() + 1
        return [*found, text[start:]]

    def operands(self, inner: str) -> list[str]:
        """Split the text in a bracket: at commas, else at operators."""
        if len(parts := self.split(inner, _FOR)) > 1 and self is PYTHON:
            return parts
        if len(parts := self.split(inner.removesuffix(","), _COMMA)) > 1:
            return [*(f"{part}," for part in parts[:-1]), parts[-1] + self.comma]
        return next(
            (parts for form in self.operators if len(parts := self.split(inner, form)) > 1), [inner]
        )

    def broken(self, line: str, inside: bool = False) -> list[str]:
        """Break a line that is too long, `inside` brackets or not.

        A line without brackets, operators and strings stays as it is.
        """
        if len(line) <= COLUMNS:
            return [line]
        indent = line[: len(line) - len(line.lstrip())]
        for comment in (token for token in self.tokens.finditer(line) if token["comment"]):
            before = line[: comment.start()].rstrip()
            mark = comment[0].partition(" ")[0]
            return [
                *_words(f"{indent}{comment[0]}", f"{mark} "),
                *(self.broken(before) if before else []),
            ]
        if message := _MESSAGE.fullmatch(line):
            return _message(message, indent)
        if inside and self.whole(line) and len(parts := self.operands(line.strip())) > 1:
            parts = [*parts[:-1], parts[-1].removesuffix(",") + "," * line.endswith(",")]
            return self._filled(parts, indent)
        if (
            self is C
            and line.endswith(";")
            and self.whole(line)
            and len(parts := self.split(line.strip(), _COMMA)) > 1
        ):
            first, *others = filled(
                [*(f"{part}," for part in parts[:-1]), parts[-1]], COLUMNS - len(indent + BLANK)
            )
            rest = [f"{indent}{BLANK}{other}" for other in others]
            return [f"{indent}{first}", *(piece for other in rest for piece in self.broken(other))]
        if found := self._expression(
            line, indent, self.operators[:2] if self is PYTHON else self.operators
        ):
            return found
        if pairs := [(start, end) for start, end in self.pairs(line) if start < COLUMNS]:
            start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
            return self._around(
                line[: start + 1],
                self.operands(line[start + 1 : end].strip()),
                line[end:].lstrip(),
                indent,
            )
        if found := self._expression(line, indent, self.operators):
            return found
        return self._tuple(line, indent) if self is PYTHON else [line]

    def _tuple(self, line: str, indent: str) -> list[str]:
        """Put the targets of an assignment, or the values of a return, into brackets."""
        targets, equals, source = line.strip().partition(" = ")
        if equals and "," in targets:
            return self._around(f"{indent}(", self.operands(targets), f") = {source}", indent)
        _, returned, values = line.partition(f"{indent}return ")
        if returned and len(parts := self.operands(values)) > 1:
            return self._around(f"{indent}return (", parts, ")", indent)
        return [line]

    def _expression(self, line: str, indent: str, operators: Iterable[str]) -> list[str]:
        """Put the value of a statement into brackets, and break it at the loosest of some
        operators.
        """
        if (value := self.expression.fullmatch(line)) and self.whole(value["value"]):
            for form in operators:
                parts = self.split(value["value"], form)
                if len(parts) > 1 and len(self.split(value["value"], _COMMA)) == 1:
                    return self._around(f"{value['head']}(", parts, f"){value['tail']}", indent)
        return []

    def _around(self, head: str, parts: Iterable[str], tail: str, indent: str) -> list[str]:
        inner = indent + BLANK if len(indent) < _INDENTED else indent
        return [head, *self._filled(parts, inner), f"{indent}{tail}"]

    def _filled(self, parts: Iterable[str], indent: str) -> list[str]:
        lines = filled(parts, COLUMNS - len(indent))
        return [piece for line in lines for piece in self.broken(f"{indent}{line}", inside=True)]

    def in_one(self, head: str, inner: str, tail: str) -> str | None:
        """Join a line that opens a bracket, the line inside it, and the line that closes it; None
        if too long.
        """
        closes = tail.lstrip()[:1] in (")", "]", "}")
        if not head.endswith(("(", "[", "{")) or not closes or not self.whole(inner):
            return None
        inner = inner.strip()
        call = head.endswith("(") and (head[-2:-1].isalnum() or head[-2:-1] == "_")
        if inner.endswith(",") and (call or len(self.split(inner[:-1], _COMMA)) > 1):
            inner = inner[:-1]
        whole = f"{head}{inner}{tail.lstrip()}"
        return whole if len(whole) <= COLUMNS else None


PYTHON = _Language(
    re.compile(_PYTHON, re.DOTALL | re.VERBOSE),
    re.compile(
        rf'(?P<head> *(?:if |elif |while |return |"\w+": |{_TARGET}))(?P<value>.*?)(?P<tail>[:,]?)'
    ),
    (" if | else ", " or | and ", r" \+ | - ", r" \* | / "),
    comma=",",
)
C = _Language(
    re.compile(_C, re.DOTALL | re.VERBOSE),
    re.compile(r"(?P<head> *(?:return |[^=\n]+ [-+*/]?= ))(?P<value>.*)(?P<tail>;)"),
    (r" \? | : ", r" \|\| | && ", r" \+ | - ", r" \* | / "),
    comma="",
)


def laid_out(text: str) -> str:
    """Return a Python program with lines of at most `COLUMNS` columns, where they can be broken."""
    return "\n".join(line for statement in _statements(text) for line in _laid_out(statement))


def laid_out_in_c(text: str) -> str:
    """Return a C or C++ program with lines of at most `COLUMNS` columns, where they can be broken.

    Directives and lines with several statements stay as they are.
    """
    found: list[str] = []
    for line in _C_COMMENT.sub(_c_comment, text).split("\n"):
        kept = line.startswith("#") or line.endswith("\\") or line.rstrip("; })").count(";") > 0
        found += [line] if kept and not line.lstrip().startswith("//") else C.broken(line)
    return "\n".join(found)


def _c_comment(comment: re.Match[str]) -> str:
    """Wrap the paragraphs of a comment that have a line that is too long.

    One behind a statement goes before it.
    """
    indent, code, text = comment["indent"], comment["code"], comment["text"]
    if all(len(line) <= COLUMNS for line in comment[0].split("\n")):
        return comment[0]
    paragraphs = re.split(r"\n *\*?\n", text)
    marks = ["/* ", *[" * "] * (len(paragraphs) - 1)]
    found = []
    for mark, paragraph in zip(marks, paragraphs, strict=True):
        words = " ".join(line.strip().removeprefix("* ") for line in paragraph.split("\n"))
        found += _wrapped(words, indent + mark, f"{indent} * ", COLUMNS - len(" */"))
        found.append(f"{indent} *")
    found[-1:] = [f"{indent}{code}"] if code else []
    found[-1 - bool(code)] += " */"
    return "\n".join(found)


def _statements(text: str) -> Iterator[str]:
    """Split a text where a line ends outside of brackets and strings."""
    start = depth = 0
    for token in PYTHON.tokens.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        if token[0] == "\n" and not depth:
            yield text[start : token.start()]
            start = token.end()
    yield text[start:]


def _laid_out(statement: str) -> Iterator[str]:
    if statement.lstrip().startswith('"""') and statement.endswith('"""'):
        yield from _docstring(statement)
        return
    found: list[str] = []
    kept = any("\n" in token[0] for token in PYTHON.tokens.finditer(statement) if token["string"])
    for line in statement.split("\n"):
        found.append(line)
        while len(found) > 2 and not kept and (whole := PYTHON.in_one(*found[-3:])) is not None:
            found[-3:] = [whole]
    depth = 0
    for line in found:
        yield from [line] if kept else PYTHON.broken(line, depth > 0)
        depth += sum(
            bool(token["open"]) - bool(token["close"]) for token in PYTHON.tokens.finditer(line)
        )


def _docstring(text: str) -> Iterator[str]:
    """Break a docstring between words. The first sentence of a line becomes its summary."""
    if "\n" not in text and len(text) > COLUMNS:
        indent = text[: len(text) - len(text.lstrip())]
        first, stop, more = text.removesuffix('"""').partition(". ")
        text = f"{first}.\n\n{indent}{more}" if stop else first
        text += f'\n{indent}"""'
    for line in text.split("\n"):
        yield from _words(line, "")


def _words(line: str, mark: str) -> list[str]:
    """Break a line of a docstring or a comment between words."""
    if len(line) <= COLUMNS:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + mark
    return _wrapped(line.removeprefix(indent).strip(), indent, indent)


def _wrapped(words: str, first: str, indent: str, width: int = COLUMNS) -> list[str]:
    """Fill lines with words. `first` begins the first line, `indent` the others."""
    return textwrap.wrap(
        words,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _message(message: re.Match[str], indent: str) -> list[str]:
    """Break a literal between words, after a comma if possible, into literals that follow each
    other.
    """
    head, prefix = message["head"], message["prefix"]
    inner = indent + BLANK * (head != indent)
    width = COLUMNS - len(f'{inner}{prefix}"",')
    texts, rest = [], message["text"]
    while len(rest) > width:
        ends = [end for end in map(re.Match.end, _BETWEEN_WORDS.finditer(rest)) if end <= width]
        clauses = [
            end
            for end in ends
            if rest[end - 2] == "," and rest[end].isalpha() and len(rest) - end <= width
        ]
        if not ends:
            break
        texts.append(rest[: max(clauses or ends)])
        rest = rest[len(texts[-1]) :]
    texts.append(rest)
    lines = [f'{inner}{prefix * ("{" in text)}"{text}"' for text in texts]
    if head == indent:
        return [*lines[:-1], lines[-1] + message["tail"]]
    return [f"{head}(", *lines, f"{indent}){message['tail']}"]
