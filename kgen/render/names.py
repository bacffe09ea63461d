"""Refuses a name of a spec that would mean something else too in an emitted file.

Kernels and launchers have names of their own, and make others of the spec's: `slopes` gives `slopes_ptr`,
`stride_slopes_0`, `d_slopes`. A list of those that clash would have to follow every template. In place of it, the
files are rendered a second time with names that nothing else can have. Where two names have become one, a function
of the first files has fewer names than the same function of the second.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kgen.diagnostics import Diagnostic
from kgen.expr.nodes import Node, Read, Var, transform

if TYPE_CHECKING:
    from kgen.spec.load import Loaded

SECTIONS = ("buffers", "params")

_SILENT = {
    "#": re.compile(r'#[^\n]*|(?:\bf)?(?:""".*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')', re.DOTALL),
    "//": re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL),
}
"""Comments and strings, by what begins a comment. A name in the braces of an f-string stands outside of it too."""
_ENDS = {"#": re.compile(r"\n(?=[@\w])"), "//": re.compile(r"^\}", re.MULTILINE)}
"""Between a definition and the next."""
_WORD = re.compile(r"(?<![\w.])[^\W\d]\w*(?!\w|=)")
"""A name, but no attribute, and no argument's in a call: `x.dtype`, `dtype=`."""
_DEFINED = re.compile(r"[^(={:;\[]*?(\w+)\s*[(={:;\[]")
_COMPREHENSION = re.compile(r"^.*\S for (\w+(?:, \w+)*) in .*$", re.MULTILINE)
"""A line with one, and its variables, which are no others', whatever they are called; a loop begins its line."""
_NUMBER = re.compile(r"__(\d+)z", re.IGNORECASE)


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
    text = _COMPREHENSION.sub(_own, _SILENT[mark].sub('""', text))
    for part in _ENDS[mark].split(text):
        yield set(_WORD.findall(part))
    defined: set[str] = set()
    for line in re.findall(r"^[^\W\d].*", text, re.MULTILINE):
        first = _DEFINED.match(line)
        defined |= {first[1]} if first else set(_WORD.findall(line))
    yield defined


def _own(comprehension: re.Match[str]) -> str:
    names = comprehension[1].replace(", ", "|")
    return re.sub(rf"(?<!\.)\b({names})\b", r"\1_own", comprehension[0])


def _joined(scope: set[str]) -> Iterator[int]:
    """The numbers of the names that make two names of a scope one; of two of the spec's, the later."""
    written = defaultdict(list)
    for word in scope:
        written[_NUMBER.sub("", word)].append(word)
    for words in written.values():
        if len(words) > 1:
            yield max(int(n) for n in _NUMBER.findall(" ".join(words)))


def _diagnostic(loaded: Loaded, name: str, file: str) -> Diagnostic:
    from kgen.spec.source import Document

    document = Document(loaded.text, loaded.path.as_posix())
    message, hint = f"`{name}` is already a name in {file}", "choose another name"
    for section in SECTIONS:
        if name in getattr(loaded.spec, section, ()):
            return document.key("name-taken", message, (section, name), hint)
    return document.value("name-taken", message, ("name",), hint)
