"""Read YAML into plain data with the source position of each value.

The reader accepts the data model of JSON. It uses the core schema of YAML 1.2, in which `no` is
text. Anchors, aliases, tags, duplicate keys and several documents are errors.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml import events as yaml
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from kgen.diagnostics import Diagnostic, KgenError, shown
from kgen.files import position

MAX_BYTES = 100_000
MAX_DEPTH = 16

Path = tuple[str | int, ...]


@dataclass
class _Scalar:
    value: Any
    start: int
    end: int
    text: str
    style: str | None


@dataclass
class _Sequence:
    start: int
    end: int
    items: list[_Tree] = field(default_factory=list)


@dataclass
class _Mapping:
    start: int
    end: int
    items: dict[str, tuple[_Scalar, _Tree]] = field(default_factory=dict)


_Tree = _Scalar | _Sequence | _Mapping


class Document:
    """One YAML file: its `data` (dicts, lists, scalars) and the position of each part.

    A path is the sequence of keys and indices to a value: `("buffers", "slopes", "shape", 0)`.
    """

    def __init__(self, text: str, file: str) -> None:
        """Read `text`. Raises `KgenError` with one diagnostic if it is not a plain YAML mapping."""
        # Positions count "\n" only, and the hash of the text must not depend on the editor's line
        # ends.
        self.text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        self.file = file
        self.lines = self.text.split("\n")
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._root = _Reader(self).read()
        self.data: dict[str, Any] = _plain(self._root)

    def choosing(self, places: Mapping[str, int]) -> Document:
        """Return the document with one item instead of each list: `places` has its index, by
        top-level key.
        """
        chosen = copy.copy(self)
        items = dict(self._root.items)
        for key, place in places.items():
            name, tree = items[key]
            assert isinstance(tree, _Sequence)
            items[key] = (name, tree.items[place])
        chosen._root = dataclasses.replace(self._root, items=items)
        chosen.data = _plain(chosen._root)
        return chosen

    def value(self, code: str, message: str, path: Path, hint: str | None = None) -> Diagnostic:
        """Return a diagnostic at the value under `path`, or at the innermost enclosing value in the
        file.
        """
        key, tree = self._find(path)
        written = isinstance(tree, _Scalar) and tree.end > tree.start
        if written or key is None:
            end = tree.end if isinstance(tree, _Scalar) else tree.start + 1
            return self.at(code, message, tree.start, end, hint)
        # A block spans many lines; its key identifies it better.
        return self.at(code, message, key.start, key.end, hint)

    def key(self, code: str, message: str, path: Path, hint: str | None = None) -> Diagnostic:
        """Return a diagnostic at the last key of `path`."""
        key, tree = self._find(path)
        spot = key or tree
        return self.at(code, message, spot.start, spot.end, hint)

    def inside(
        self,
        code: str,
        message: str,
        path: Path,
        line: int,
        column: int,
        length: int,
        hint: str | None = None,
    ) -> Diagnostic:
        """Return a diagnostic at a 1-based `line` and `column` inside the text value under
        `path`.
        """
        _, tree = self._find(path)
        assert isinstance(tree, _Scalar)
        lines = tree.text.split("\n")
        offset = sum(len(before) + 1 for before in lines[: line - 1]) + column - 1
        places = _places(self.text, tree)
        start = places[min(offset, len(places) - 1)]
        last = places[min(offset + length - 1, len(places) - 1)]
        return self.at(code, message, start, max(last, start) + 1, hint)

    def at(
        self, code: str, message: str, start: int, end: int, hint: str | None = None
    ) -> Diagnostic:
        """Return a diagnostic at the characters `[start, end)`, counted from 0 and cut at the end
        of the line.
        """
        start = min(start, len(self.text))
        row = bisect.bisect_right(self._starts, start) - 1
        source = self.lines[row]
        column = start - self._starts[row]
        length = max(min(end - start, len(source) - column), 1)
        return Diagnostic(code, message, self.file, row + 1, column + 1, length, source, hint)

    def existing(self, path: Path) -> Path:
        """Return the longest prefix of `path` that is in the file."""
        known = 0
        data: Any = self.data
        for step in path:
            in_list = isinstance(data, list) and isinstance(step, int) and step < len(data)
            if not in_list and not (isinstance(data, dict) and step in data):
                break
            data = data[step]
            known += 1
        return path[:known]

    def _find(self, path: Path) -> tuple[_Scalar | None, _Tree]:
        key: _Scalar | None = None
        tree: _Tree = self._root
        for step in path:
            if isinstance(tree, _Mapping) and isinstance(step, str) and step in tree.items:
                key, tree = tree.items[step]
            elif isinstance(tree, _Sequence) and isinstance(step, int) and step < len(tree.items):
                tree = tree.items[step]
            else:
                break
        return key, tree


def decode(content: bytes, file: str) -> str:
    """Decode a file of at most `MAX_BYTES` bytes of UTF-8. Raises `KgenError`."""
    if len(content) > MAX_BYTES:
        line, column = position(content, MAX_BYTES)
        source = content.split(b"\n")[line - 1].decode(errors="replace")
        message, hint = (
            f"the file has more than {MAX_BYTES} bytes",
            "move tables of numbers into a buffer",
        )
        raise KgenError(Diagnostic("too-large", message, file, line, column, 1, source, hint))
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line, column = position(content, error.start)
        source = content.split(b"\n")[line - 1].decode(errors="replace")
        message = f"byte 0x{content[error.start]:02x} is not UTF-8"
        hint = "save the file with the encoding UTF-8"
        raise KgenError(
            Diagnostic("not-utf8", message, file, line, column, 1, source, hint)
        ) from None


class _Reader:
    """Build the tree from parse events, so that an alias is refused before it is expanded."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def fail(
        self, code: str, message: str, start: int, end: int, hint: str | None = None
    ) -> NoReturn:
        raise KgenError(self.document.at(code, message, start, end, hint))

    def read(self) -> _Mapping:
        text = self.document.text
        if len(text) > MAX_BYTES:
            message = f"the file has {len(text)} characters, the limit is {MAX_BYTES}"
            self.fail("too-large", message, 0, 1, "move tables of numbers into a buffer")
        try:
            return self.document_of(iter(YAML(typ="safe", pure=True).parse(text)))
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            index = mark.index if mark is not None else 0
            problem = str(error.problem)
            opened = error.context_mark.index if error.context_mark is not None else index
            message, hint, index = _friendly(problem, text, index, opened)
        except ReaderError as error:
            index = error.position
            message = f"the character U+{ord(text[index]):04X} is not allowed in YAML"
            hint = "remove it"
        except (ValueError, OverflowError):
            index = next(
                (m.start() for m in _CODE_POINT.finditer(text) if int(m[1], 16) > sys.maxunicode), 0
            )
            self.fail(
                "bad-yaml",
                "this code point does not exist",
                index,
                index + 10,
                "U+10FFFF is the last",
            )
        except YAMLError:
            message, hint, index = "this is not YAML", "see https://yaml.org/spec/1.2.2", 0
        self.fail("bad-yaml", message, index, index + 1, hint)

    def document_of(self, events: Iterator[Any]) -> _Mapping:
        root: _Tree | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    start = event.start_mark.index
                    self.fail(
                        "bad-yaml",
                        "a file must contain one spec",
                        start,
                        start + 3,
                        "put each spec into its own file",
                    )
                if event.version or event.tags:
                    self.fail(
                        "bad-yaml",
                        "YAML directives are not supported",
                        0,
                        1,
                        "remove the `%` lines",
                    )
                root = self.tree(next(events), events, 0)
        if root is None:
            hint = "begin with `kernel: attention`; `kgen schema` prints the schema of a spec"
            self.fail("empty-spec", "the file is empty", 0, 1, hint)
        if not isinstance(root, _Mapping):
            hint = "begin with `kernel: attention`"
            self.fail(
                "bad-yaml",
                "a spec must be a mapping of `key: value` lines",
                root.start,
                root.end,
                hint,
            )
        return root

    def tree(self, event: Any, events: Iterator[Any], depth: int) -> _Tree:
        start, end = event.start_mark.index, event.end_mark.index
        if depth > MAX_DEPTH:
            self.fail(
                "too-deep",
                f"the file nests more than {MAX_DEPTH} deep",
                start,
                end,
                "a spec needs four levels",
            )
        if isinstance(event, yaml.AliasEvent):
            self.fail(
                "bad-yaml",
                f"the alias {shown('*' + event.anchor)} is not allowed",
                start,
                end,
                _QUOTE,
            )
        if event.anchor is not None:
            self.fail(
                "bad-yaml",
                f"the anchor {shown('&' + event.anchor)} is not allowed",
                start,
                start + 1,
                _QUOTE,
            )
        if event.tag is not None:
            self.fail("bad-yaml", "YAML tags are not allowed", start, start + 1, _QUOTE)
        if isinstance(event, yaml.ScalarEvent):
            return _Scalar(self.resolved(event), start, end, event.value, event.style)
        if isinstance(event, yaml.SequenceStartEvent):
            sequence = _Sequence(start, start + 1)
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                sequence.items.append(self.tree(event, events, depth + 1))
            return sequence
        mapping = _Mapping(start, start + 1)
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self.tree(event, events, depth + 1)
            if not isinstance(key, _Scalar) or not isinstance(key.value, str):
                self.fail(
                    "bad-yaml", "a key must be text", key.start, key.end, "put quotes around it"
                )
            if key.value in mapping.items:
                first = self.document.at("", "", mapping.items[key.value][0].start, 0).line
                message = f"the key {shown(key.value)} appears twice"
                self.fail(
                    "duplicate-key",
                    message,
                    key.start,
                    key.end,
                    f"the first is on line {first}: keep one",
                )
            mapping.items[key.value] = (key, self.tree(next(events), events, depth + 1))
        return mapping

    def resolved(self, event: Any) -> Any:
        text: str = event.value
        if half := _SURROGATE.search(text):
            scalar = _Scalar(text, event.start_mark.index, event.end_mark.index, text, event.style)
            start = _places(self.document.text, scalar)[half.start()]
            message = f"U+{ord(half[0]):04X} is a surrogate, half of a character"
            hint = 'write the character, or its code point after `\\U`, as in "\\U0001F600"'
            self.fail("bad-character", message, start, start + 6, hint)
        if event.style is not None:
            return text
        if text in ("", "~", "null", "Null", "NULL"):
            return None
        if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
            return text.lower() == "true"
        if _INTEGER.fullmatch(text):
            if len(text) > 40:
                start = event.start_mark.index
                self.fail(
                    "literal-range",
                    "the number does not fit in 32 bits",
                    start,
                    event.end_mark.index,
                    "write an int32",
                )
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
        if found := re.fullmatch(r"([-+]?)\.(inf|Inf|INF)", text):
            return float(f"{found[1]}inf")
        return float("nan") if text in (".nan", ".NaN", ".NAN") else text


_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_CODE_POINT = re.compile(r"\\U([0-9a-fA-F]{8})")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_QUOTE = "write the value itself, and put quotes around text that begins with `&`, `*` or `!`"


def _friendly(problem: str, text: str, index: int, opened: int) -> tuple[str, str, int]:
    """Return message, hint and position for an error of ruamel at `index`, in a construct that
    began at `opened`.
    """
    character = text[index : index + 1]
    line = text.rfind("\n", 0, index) + 1
    if problem.startswith("found character") and character == "\t":
        return "a tab cannot indent YAML", "indent with spaces", index
    if problem.startswith("found character"):
        return f"a value cannot begin with `{character}`", "put quotes around it", index
    if problem.startswith("mapping values are not allowed"):
        if ":" in text[line:index]:
            hint = "put quotes around text that contains `: `, or break the line"
            return "this line has a second `:`", hint, index
        hint = "begin the keys of one level in the same column"
        first = index - len(text[line:index].lstrip(" "))
        return "this line is indented deeper than the line above allows", hint, first
    if problem == "could not find expected ':'":
        hint = "add the `:`, or indent the line under the key that it belongs to"
        return "this line is not `key: value`", hint, opened
    if problem == "found unexpected end of stream":
        return "the quote is never closed", "add the closing quote", opened
    if problem.startswith("expected ',' or"):
        if opened < line or index >= len(text):
            return f"`{text[opened : opened + 1]}` is never closed", "close the bracket", opened
        return f"{problem.split(', but')[0]} before this", "separate the items with commas", index
    if problem.startswith("expected <block end>"):
        hint = "begin the keys of one level in the same column"
        return "this line does not fit the indentation around it", hint, index
    return problem, "see https://yaml.org/spec/1.2.2", index


def _plain(tree: _Tree) -> Any:
    if isinstance(tree, _Mapping):
        return {key: _plain(value) for key, (_, value) in tree.items.items()}
    if isinstance(tree, _Sequence):
        return [_plain(item) for item in tree.items]
    return tree.value


def _places(text: str, scalar: _Scalar) -> list[int]:
    """Return the position in the file of each character of the value, and of its end.

    The value is the raw text without quotes, indentation, folded line ends and escapes. Visible
    characters have the same order in both, so one loop walks both texts.
    """
    at = scalar.start
    if scalar.style in ("|", ">"):
        at = text.index("\n", at) + 1 if "\n" in text[at:] else len(text)
    elif scalar.style is not None:
        at += 1
    places = []
    for character in scalar.text:
        if not character.isspace():
            while at < len(text) and (text[at].isspace() or text.startswith("\\\n", at)):
                at += 1
        width = _width(text, at, scalar.style)
        places.append(at)
        if not character.isspace() or width > 1 or text[at : at + 1] == character:
            at += width
    return [*places, at]


def _width(text: str, at: int, style: str | None) -> int:
    """Return the number of characters in the file that encode the character at `at`."""
    if style == "'" and text.startswith("''", at):
        return 2
    if style == '"' and text[at : at + 1] == "\\":
        return {"x": 4, "u": 6, "U": 10}.get(text[at + 1 : at + 2], 2)
    return 1
