"""Checks of the rules of "How we write" in CONTRIBUTING.md.

`violations` checks one Markdown page, Python file, template, C header or shell script. It reads
only the text.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE, TEXT, HELP = 25, 20, 12
"""Maximum words of a sentence: in Markdown pages, in docstrings and comments, and in help texts."""

OPENINGS = ("what", "whether", "of", "those", "where", "as", "one that", "that")
"""Words that do not begin a docstring."""

TERMS = {
    "told": r"told",
    "given": r"(?<!\ba )(?<!\ban )(?<!\bthe )(?<!\bany )(?<!\beach )given(?! an? \w| the \w)",
    "asked": r"asked",
    "said": r"said",
    "handed": r"(?<!-)handed",
    "home": r"home",
    "beside": r"beside",
    "ahead of": r"ahead\s+of",
    "in place of": r"in\s+place\s+of",
    "by itself": r"by\s+itself",
    "wants": r"wants",
    "mend": r"mend(?:s|ed|ing)?",
    "the box": r"the\s+box",
    "dearest": r"dearest",
    "meet": r"meets?(?! \w+ (?:condition|requirement|limit|tolerance)s?\b)",
    "what": r"what(?! to\b)(?![^.!?]*\?)",
    "no longer": r"no\s+longer",
    "any more": r"any\s?more",
    "now": r"now",
}
"""Forbidden terms as patterns of whole words.

Allowed senses: `given` before or after an article, `meet` before a condition, `what` in a question
and in "what to".
"""
HISTORY = ("no longer", "any more", "now")
"""Terms that the changelog and the log may use."""
_TERMS = re.compile(
    "|".join(rf"(?P<t{i}>\b(?:{form})\b(?!-))" for i, form in enumerate(TERMS.values()))
)

SENTENCE = re.compile(r"(?<=[.!?:;])\s+")
BLOCK = re.compile(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+")
DIRECTIVE = re.compile(
    r"!|\s*(?:noqa|type:|ruff:|mypy:|pragma|fmt:|SPDX|yaml-language-server|-{3,}|=+)|\s*\w+: "
    r"(?:off|on)$"
)


@dataclass(frozen=True)
class Violation:
    """One broken rule in one file."""

    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        text = " ".join(self.text.split())
        return f"{self.line}: {self.rule}: {text[:100]}{'...' * (len(text) > 100)}"


PLACES = (
    *("*.md", "changelog.d/*.md", "docs/**/*.md", "benchmarks/**/*.md"),
    *("kgen/**/*.py", "tests/**/*.py", "benchmarks/**/*.py"),
    *("examples/**/*.py", "scripts/*", "templates/**/*.j2", "templates/**/*.h"),
)
EMITTED = "tests/support/specs/emitted/"
"""Copies of emitted files, whose text comes from templates."""


def files(root: Path) -> Iterator[Path]:
    """Yield the files that follow the rules."""
    for place in PLACES:
        for path in sorted(root.glob(place)):
            if path.is_file() and not path.relative_to(root).as_posix().startswith(EMITTED):
                yield path


def violations(path: Path) -> list[Violation]:
    """Return the violations in a file, in the order of their lines."""
    text = path.read_text(encoding="utf-8")
    check = {".md": _page, ".py": _python, ".j2": _template, ".h": _header, "": _script}[
        path.suffix
    ]
    history = path.name == "CHANGELOG.md" or path.parent.name == "log"
    found = [one for one in check(text) if not (history and one.rule.partition(": ")[2] in HISTORY)]
    return sorted(found, key=lambda one: one.line)


def count_words(sentence: str) -> int:
    """Count the words of a sentence. A code span, a hyphenated word or a path is one word."""
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def plain(text: str) -> str:
    """Replace code spans by one word, and links by their text."""
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "X", text, flags=re.DOTALL)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def _prose(text: str, line: int, limit: int) -> Iterator[Violation]:
    """Check the sentences of a text that begins at `line`."""
    text = plain(text)
    for block in BLOCK.split(text):
        for sentence in SENTENCE.split(block):
            if (words := count_words(sentence)) > limit:
                yield Violation(line, f"{words} words, at most {limit}", sentence)
    for match in _TERMS.finditer(_lower(text)):
        name = [*TERMS][int((match.lastgroup or "")[1:])]
        yield Violation(
            line, f"forbidden: {name}", text[max(match.start() - 30, 0) : match.end() + 30]
        )


def _lower(text: str) -> str:
    """Return the text with capitalized words in lower case.

    Words in capitals, such as HOME, stay.
    """
    return re.sub(r"\b[A-Z](?![A-Z])", lambda match: match[0].lower(), text)


# --- Markdown ------------------------


def _page(text: str) -> Iterator[Violation]:
    """Check each block of prose and each cell of a table."""
    code = r"^ *```.*?^ *```|^---\n.*?^---$|<!--.*?-->|(?<=\n\n)(?: {4}[^\n]*\n)+"
    text = re.sub(code, _newlines, text, flags=re.DOTALL | re.MULTILINE)
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        if re.match(r"\s*[|#]", line):
            cells = (
                re.split(r"(?<!\\)\|", line)
                if line.lstrip().startswith("|")
                else [line.lstrip("# ")]
            )
            for cell in cells:
                yield from _prose(cell, number + 1, PAGE)
            number += 1
            continue
        start = number
        while (
            number < len(lines)
            and lines[number].strip()
            and not re.match(r"\s*(?:\||#)", lines[number])
        ):
            number += 1
        yield from _prose("\n" + "\n".join(lines[start:number]), start + 1, PAGE)
        number += number == start


def _newlines(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


# --- Python ------------------------


def _python(text: str) -> Iterator[Violation]:
    tree = ast.parse(text)
    for node in _definitions(tree):
        limit = HELP if isinstance(node, ast.FunctionDef) and _is_verb(node) else TEXT
        for statement in node.body:
            match statement:
                case ast.Expr(ast.Constant(str(doc))):
                    yield from _docstring(doc, statement.lineno, limit)
    for keyword in ast.walk(tree) if "help=" in text else ():
        if isinstance(keyword, ast.keyword) and keyword.arg == "help":
            yield from _prose(_constant(keyword.value), keyword.value.lineno, HELP)
    for line, comment in _joined(_python_comments(text)):
        yield from _prose(comment, line, TEXT)


def _definitions(
    tree: ast.Module,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all nodes that may have docstrings.

    Skip expressions, because `ast.walk` takes seconds for them.
    """
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            nodes += (one for one in getattr(node, part, ()) if not isinstance(one, ast.expr))


def _is_verb(node: ast.FunctionDef) -> bool:
    """True if a decorator registers the function as a command, whose docstring is its help."""
    calls = (d.func for d in node.decorator_list if isinstance(d, ast.Call))
    return any(
        ast.unparse(call).rpartition(".")[2] in ("verb", "command", "callback") for call in calls
    )


def _constant(node: ast.expr) -> str:
    """Return the text of a string or f-string, with one word per placeholder; empty for other
    expressions.
    """
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(_constant(v) if isinstance(v, ast.Constant) else "X" for v in values)
    return ""


def _docstring(doc: str, line: int, limit: int) -> Iterator[Violation]:
    text = _without_code(inspect.cleandoc(doc))
    first = _lower(plain(text)).split()[:2]
    for opening in OPENINGS:
        if first[: len(opening.split())] == opening.split():
            yield Violation(line, f"begins with {opening!r}", text)
            break
    yield from _prose(text, line, limit)


def _without_code(text: str) -> str:
    """Remove indented blocks that follow an empty line, and put each cell of a table into its own
    paragraph.
    """
    text = re.sub(r"^\|.*$", lambda row: row[0].replace("|", "\n\n"), text, flags=re.MULTILINE)
    return re.sub(r"(?:(?<=\n\n)|(?<=:\n))(?: {4,}.*(?:\n|$))+", "\n", text)


def _python_comments(text: str) -> Iterator[tuple[int, int, bool, str]]:
    """Yield line, column, True if it fills its line, and text of each comment."""
    if "#" not in text:
        return
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            (line, column), alone = (
                token.start,
                not lines[token.start[0] - 1][: token.start[1]].strip(),
            )
            yield line, column, alone, token.string[1:]


def _line_comments(text: str, mark: str) -> Iterator[tuple[int, int, bool, str]]:
    """Yield the comments that begin with `mark` and fill their lines."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith(mark) and not line.lstrip().startswith("#!"):
            yield number, len(line) - len(line.lstrip()), True, line.lstrip()[len(mark) :]


def _joined(comments: Iterator[tuple[int, int, bool, str]]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment. Consecutive lines at one column are one comment."""
    start, last, column, texts = 0, 0, -1, list[str]()
    for line, at, alone, text in comments:
        if DIRECTIVE.match(text):
            continue
        if texts and alone and (line, at) == (last + 1, column):
            texts.append(text.strip())
        else:
            if texts:
                yield start, "\n".join(texts)
            start, texts = line, [text.strip()]
        last, column = line, at if alone else -1
    if texts:
        yield start, "\n".join(texts)


# --- other languages ------------------------


def _script(text: str) -> Iterator[Violation]:
    """Check the comments of a shell script."""
    for line, comment in _joined(_line_comments(text, "#")):
        yield from _prose(comment, line, TEXT)


def _header(text: str) -> Iterator[Violation]:
    """Check the comments of a C header."""
    for match in re.finditer(r"/\*(.*?)\*/", text, re.DOTALL):
        yield from _prose(match[1], text.count("\n", 0, match.start()) + 1, TEXT)
    for line, comment in _joined(_line_comments(text, "//")):
        yield from _prose(comment, line, TEXT)


def _template(text: str) -> Iterator[Violation]:
    """Check the comments of Jinja, Python and C++, and docstrings, with placeholders as words."""
    for match in re.finditer(r"\{#-?(.*?)-?#\}", text, re.DOTALL):
        yield from _prose(match[1], text.count("\n", 0, match.start()) + 1, TEXT)
    text = re.sub(r"\{#.*?#\}", _newlines, text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*\{%.*?%\}[ \t]*$", _newlines, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\{[{%].*?[%}]\}", lambda m: "X" + _newlines(m), text, flags=re.DOTALL)
    for match in re.finditer(r'^[ \t]*"""(.*?)"""', text, re.DOTALL | re.MULTILINE):
        yield from _docstring(match[1], text.count("\n", 0, match.start()) + 1, TEXT)
    for mark in ("# ", "// "):
        for line, comment in _joined(_line_comments(text, mark)):
            yield from _prose(comment, line, TEXT)
