"""Refuses a name of a spec that would mean something else too in an emitted file.

Kernels and launchers have names of their own, and make others of the spec's: `slopes` gives `slopes_ptr`,
`stride_slopes_0`, `d_slopes`. A list of those that clash would have to follow every template. In place of it, the
files are rendered a second time with names that nothing else can have. Where two names have become one, a function
of the first files has fewer names than the same function of the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kgen.diagnostics import Diagnostic
from kgen.expr.nodes import Node, Read, Var, transform

if TYPE_CHECKING:
    from kgen.spec.load import Loaded

SECTIONS = ("buffers", "params")

_BLANKS = str.maketrans(dict.fromkeys("()[]{}<>,:;+-*/%&|^~!?@\\\t\n", " ") | {".": " .", "=": "= "})
"""What stands between words. An attribute keeps its point, and an argument's name in a call its sign: `x.dtype`,
`dtype=`."""


def apart(loaded: Loaded) -> Loaded:
    """The spec with names that nobody has: those of specs and templates have single underscores. Each has a number of
    its own, or `dx` would be what is made of `x` here, too."""
    spec = loaded.spec
    other = {name: f"{name}__{number}z" for number, name in enumerate(_names(loaded))}

    def rename(node: Node) -> Node:
        if isinstance(node, Var):
            return replace(node, name=other.get(node.name, node.name))
        return (
            replace(node, buffer=other[node.buffer])
            if isinstance(node, Read) and node.buffer in other
            else node
        )

    fields: dict[str, object] = {"name": other[spec.name]}
    for section in SECTIONS:
        if hasattr(spec, section):
            fields[section] = {other[name]: value for name, value in getattr(spec, section).items()}
    trees = {field: transform(tree, rename) for field, tree in loaded.trees.items()}
    return replace(loaded, spec=spec.model_copy(update=fields), trees=trees)


def clashes(
    loaded: Loaded, files: Mapping[str, str], others: Mapping[str, str], marks: Mapping[str, str]
) -> list[Diagnostic]:
    """What to say of the names of a spec that are other names too in its `files`; `others` are those of `apart`, and
    `marks` say what begins a comment in each."""
    found: dict[int, str] = {}
    for file in files:
        scopes = zip(*(_scopes(marks[file], texts[file]) for texts in (files, others)), strict=True)
        for number in (n for scope, other in scopes if len(scope) < len(other) for n in _joined(other)):
            found.setdefault(number, file)
    names = _names(loaded)
    return [_diagnostic(loaded, names[number], file) for number, file in sorted(found.items())]


def _names(loaded: Loaded) -> list[str]:
    return [loaded.spec.name, *(n for section in SECTIONS for n in getattr(loaded.spec, section, ()))]


def _scopes(mark: str, text: str) -> Iterator[set[str]]:
    """The names of each definition of a file, and those that the file defines."""
    scope, defined = set[str](), set[str]()
    for line in _silent(mark, text):
        top = line[:1].isalpha() or line[:1] == "_"
        if mark == "#" and (top or line[:1] == "@"):
            yield scope
            scope = set()
        words = _words(line)
        scope |= words
        if top:
            defined |= {_defined(line)} - {""} or words
        if mark == "//" and line[:1] == "}":
            yield scope
            scope = set()
    yield scope
    yield defined


def _silent(mark: str, text: str) -> Iterator[str]:
    """Lines without comments and strings; a name in the braces of an f-string stands outside of it too."""
    if mark == "#":
        text = '""'.join(text.split('"""')[::2])
    else:
        first, *rest = text.split("/*")
        text = first + "".join(part.partition("*/")[2] for part in rest)
    for line in text.split("\n"):
        spoken = '""'.join(line.replace('\\"', "").split('"')[::2])
        yield spoken.partition(mark)[0]


def _words(line: str) -> set[str]:
    """The names in a line. Variables of a comprehension are no others', whatever they are called."""
    words = {word for word in line.translate(_BLANKS).split() if word.isidentifier()}
    before, _, rest = line.rpartition(" for ")
    if not before.strip() or " in " not in rest:
        return words
    own = {name.strip() for name in rest.partition(" in ")[0].split(",")}
    return {f"{word}_own" if word in own else word for word in words}


def _defined(line: str) -> str:
    """What a line at the left edge gives a meaning to: the last word ahead of the first bracket or sign."""
    at = next((at for at, c in enumerate(line) if c in "(={:;["), 0)
    return (line[:at].translate(_BLANKS).split() or [""])[-1]


def _joined(scope: set[str]) -> Iterator[int]:
    """The numbers of the names that make two names of a scope one; of two of the spec's, the later."""
    written = defaultdict(list)
    for word in scope:
        name, numbers = _numbered(word)
        written[name].append(numbers)
    for several in written.values():
        if len(several) > 1:
            yield max(n for numbers in several for n in numbers)


def _numbered(word: str) -> tuple[str, list[int]]:
    """A name as the spec's author would have it, and the numbers of `apart` in it."""
    name, *parts = word.split("__")
    numbers = list[int]()
    for part in parts:
        behind = part.lstrip("0123456789")
        digits = part.removesuffix(behind)
        if digits and behind[:1] in ("z", "Z"):
            numbers.append(int(digits))
            name += behind[1:]
        else:
            name += f"__{part}"
    return name, numbers


def _diagnostic(loaded: Loaded, name: str, file: str) -> Diagnostic:
    from kgen.spec.source import Document

    document = Document(loaded.text, loaded.path.as_posix())
    message, hint = f"`{name}` is already a name in {file}", "choose another name"
    for section in SECTIONS:
        if name in getattr(loaded.spec, section, ()):
            return document.key("name-taken", message, (section, name), hint)
    return document.value("name-taken", message, ("name",), hint)
