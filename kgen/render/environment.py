"""The jinja environment and the folder of templates.

Templates make no decisions: Python prepares everything that they print
(`tests/render/test_templates.py` checks this). An expression alone on its line stands for lines of
code. Each line gets the indentation of the expression; an empty list leaves no blank line. The text
of an `include` gets the indentation of the include. The environment prints values and statements in
the language of their template. A template in a field of another one is rendered at the field's
name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.render.filters import FILTERS, lines
from kgen.targets.code import TRITON, Code, Statement, printed
from kgen.targets.folding import Bracketed
from kgen.targets.template import Template, names, parts

if TYPE_CHECKING:
    from jinja2 import BytecodeCache, Environment

PACKAGE = Path(__file__).resolve().parents[1]
DIGEST_OF_CODE = "\1digest of code\1"
"""A placeholder that is replaced once the file is complete. A spec cannot contain it."""
_FAKE_OF, _END = "\1fake of ", "\1"
"""Both ends of a placeholder for the call that decorates the fake of an operator."""
_ELSE, _ENDS = "{% else %}", ("{% endif %}", "{% endfor %}")


CALLED = 8
"""The largest indentation, in columns, that calls of macros add."""


def template_root() -> Path:
    """Return the folder of templates: inside an installed wheel, else next to the package in the
    repository.
    """
    installed = PACKAGE / "_data" / "templates"
    return installed if installed.is_dir() else PACKAGE.parent / "templates"


def rendered(template: Template) -> str:
    """Render a template and all templates within it, without a header."""
    env = environment(template_root(), template.language)
    return env.get_template(template.template).render(names(template))


def with_fakes(text: str, register: str) -> str:
    """Return a rendered text with the calls that register the fakes of operators.

    `register` formats a call: `{}` stands for the operator.
    """
    first, *rest = text.split(_FAKE_OF)
    named = (part.partition(_END) for part in rest)
    return first + "".join(register.format(name) + after for name, _, after in named)


def environment(root: Path, language: str = TRITON) -> Environment:
    """Return the environment that prints values and statements in a language.

    An undefined name is an error, and block tags leave no blank line.
    """
    return _environment(root, language)


@cache
def _environment(root: Path, language: str) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from jinja2.ext import Extension

    class Lines(Extension):
        """Rewrite lines that consist of one expression or include."""

        def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
            return "\n".join(_in_place(line, macro) for line, macro in _with_macros(source))

    found = Environment(
        extensions=[Lines],
        loader=FileSystemLoader(root),
        bytecode_cache=_compiled(),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        optimized=False,  # constants are folded in Python
        newline_sequence="\n",
        finalize=lambda value: (
            value if isinstance(value, list | tuple) else _text_of(value, language)
        ),
    )
    found.filters |= {name: _of_texts(function, language) for name, function in FILTERS.items()}
    found.filters["lines"] = lambda value, *indent: lines(
        _before(value, language), language, *indent
    )
    found.filters["fake_of"] = f"{_FAKE_OF}{{}}{_END}".format
    found.globals["digest_of_code"] = DIGEST_OF_CODE
    return found


def _text_of(value: object, language: str) -> object:
    """Print a value, or each value of a list. Texts and numbers are returned unchanged."""
    if isinstance(value, Template):
        return rendered(value)
    if isinstance(value, list | tuple):
        return [_text_of(one, language) for one in value]
    return printed(value, language) if isinstance(value, Code | Statement) else value


def _before(value: object, language: str) -> object:
    """Print values except statements, which the filter `lines` prints once it knows the width."""
    if isinstance(value, list | tuple):
        return [_before(one, language) for one in value]
    return value if isinstance(value, Statement | Bracketed) else _text_of(value, language)


def _of_texts(function: Callable[..., object], language: str) -> Callable[..., object]:
    """Return a filter that prints its first operand before it is called."""
    return lambda value, *more: function(_text_of(value, language), *more)


def _compiled() -> BytecodeCache | None:
    """Return jinja's cache of compiled templates, in a temporary folder of the user.

    Compiling templates takes a quarter of the time of rendering a spec. None if other users can
    write to the folder.
    """
    from jinja2 import FileSystemBytecodeCache
    from jinja2.bccache import Bucket

    class Kept(FileSystemBytecodeCache):
        def dump_bytecode(self, bucket: Bucket) -> None:
            with suppress(OSError):  # without a writable folder, templates are compiled again
                super().dump_bytecode(bucket)

    # A cache in the project could come with a cloned repository, and its bytecode would run.
    # jinja's key is the text of a template. The result also depends on this file, so its hash is in
    # the name.
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    try:
        return Kept(pattern=f"__kgen_{own}_%s.cache")
    except (OSError, RuntimeError):
        return None


def _with_macros(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a template, each with True if it is inside a macro."""
    inside = False
    for line in source.split("\n"):
        inside = (inside or line.startswith("{% macro ")) and not line.startswith("{% endmacro ")
        yield line, inside


def _in_place(line: str, macro: bool = False) -> str:
    """Return a line of a template with its indentation as an argument of a filter.

    Calls of a macro indent its lines again.
    """
    inner = line.strip()
    indent = len(line) - len(line.lstrip())
    if inner.startswith("{{") and inner.find("}}") == len(inner) - 2:
        # The empty comment makes jinja drop the end of the line.
        return f"{inner[:-2]}| lines({indent}, {CALLED * macro}) }}}}{{##}}"
    if inner.startswith("{% include ") and indent:
        return f"{{% filter indent({indent}, true) %}}{inner}{{% endfilter %}}"
    return line


def texts_of(template: Template) -> dict[str, str]:
    """Return the texts of a template, of templates within it, and of templates that their tags
    name, by name.

    Leave out the optional fields that no template of the tree has. So a field that is added does
    not change the hash of files without it.
    """
    env = environment(template_root())
    found: dict[str, str] = {}
    for part in parts(template):
        values = {name: getattr(part, name) for name in part.optional_fields}
        missing = frozenset(name for name, value in values.items() if not value)
        words = frozenset((n, value) for n, value in values.items() if isinstance(value, str))
        for name, text in template_texts(env, part.template).items():
            own = without_missing(text, missing, words)
            found[name] = max(own, found.get(name, ""), key=len)
    return dict(sorted(found.items()))


@cache
def without_missing(
    text: str, missing: frozenset[str], words: frozenset[tuple[str, str]] = frozenset()
) -> str:
    """Return a template without `missing` names, and with the values of `words`.

    The blocks `{% if NAME %}`, the loops and the expressions of a missing name disappear. A block
    `{% else %}` of a missing name stays, without its tags. A line that has only an expression of a
    missing name disappears.
    """
    for name, value in words:
        text = text.replace(f"{{{{ {name} }}}}", value)
    if not missing:
        return text
    kept: list[str] = []
    # For each open block: None if it stays, else true while its lines stay.
    inside: list[bool | None] = []
    for line in text.split("\n"):
        tag = line.strip()
        opened = _opened(tag)
        own = bool(inside) and inside[-1] is not None and tag in (_ELSE, *_ENDS)
        if opened is not None:
            inside.append(False if opened in missing else None)
            own = inside[-1] is not None
        elif own and tag == _ELSE:
            inside[-1] = True
        elif tag in _ENDS:
            inside.pop()
        printed = _without_expressions(line, missing)
        if not own and False not in inside and (printed.strip() or printed == line):
            kept.append(printed)
    return "\n".join(kept)


def _opened(tag: str) -> str | None:
    """Return the value of a tag that opens a block, alone on its line, or None."""
    words = tag.split()
    alone = words.count("%}") == 1 and (words[0], words[-1]) == ("{%", "%}")
    if not alone or len(words) < 4:
        return None
    if words[1] == "if":
        return " ".join(words[2:-1])
    return " ".join(words[words.index("in") + 1 : -1]) if words[1] == "for" else None


def _without_expressions(line: str, missing: frozenset[str]) -> str:
    """Return a line without the expressions of missing names."""
    first, *others = line.split("{{ ")
    for other in others:
        inner, closed, rest = other.partition(" }}")
        name = inner.partition(" |")[0]
        first += rest if closed and name in missing else "{{ " + other
    return first


@cache
def template_texts(env: Environment, name: str) -> dict[str, str]:
    """Return the text of a template and of all templates that it imports, includes or extends, by
    name.

    jinja would parse them all, including those that a spec does not use. Each tag is on its own
    line.
    """
    assert env.loader is not None
    texts: dict[str, str] = {}
    pending = [name]
    while pending:
        current = pending.pop()
        if current not in texts:
            texts[current] = env.loader.get_source(env, current)[0]
            pending += referenced(texts[current])
    return dict(sorted(texts.items()))


def referenced(text: str) -> list[str]:
    """Return the templates that the tags of a text name."""
    lines = (line.strip() for line in text.splitlines())
    tags = ("{% include ", "{% from ", "{% import ", "{% extends ")
    return [line.replace("'", '"').split('"')[1] for line in lines if line.startswith(tags)]
