"""The jinja environment, and where templates are found.

Templates make no decisions: what they print is prepared in Python (`tests/render/test_templates.py` holds that).
An expression with a line to itself stands for lines of code: each is set in as the expression is, and of none nothing
is left, not even a blank line. What an `include` brings is set in as the include is. Values and statements are printed
here, in the language of their template; a template among the fields of another is rendered where that one names it.
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
"""Stands in a rendered file until it is whole. No spec can write it."""
LAUNCH_NAMES = "\1launch names\1"
"""The same for the names of `_launch.py` that the file uses."""


CALLED = 8
"""Columns by which calls of a macro set its lines in, at most."""


def template_root() -> Path:
    """The folder of templates: inside an installed wheel, else beside the package in the repository."""
    installed = PACKAGE / "_data" / "templates"
    return installed if installed.is_dir() else PACKAGE.parent / "templates"


def rendered(template: Template) -> str:
    """The text of a template with all templates within it, without a header."""
    env = environment(template_root(), template.language)
    return env.get_template(template.template).render(names(template))


def environment(root: Path, language: str = TRITON) -> Environment:
    """The environment that prints values and statements in a language.

    A name that nobody prepared is an error, and block tags leave no blank line.
    """
    return _environment(root, language)


@cache
def _environment(root: Path, language: str) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from jinja2.ext import Extension

    class Lines(Extension):
        """What a line that is one expression means."""

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
        finalize=lambda value: value if isinstance(value, list | tuple) else _text_of(value, language),
    )
    found.filters |= {name: _of_texts(function, language) for name, function in FILTERS.items()}
    found.filters["lines"] = lambda value, *indent: lines(_before(value, language), language, *indent)
    found.globals["digest_of_code"] = DIGEST_OF_CODE
    found.globals["launch_names"] = LAUNCH_NAMES
    return found


def _text_of(value: object, language: str) -> object:
    """The text of a value, or of each in a list. Texts and numbers stay as they are."""
    if isinstance(value, Template):
        return rendered(value)
    if isinstance(value, list | tuple):
        return [_text_of(one, language) for one in value]
    return printed(value, language) if isinstance(value, Code | Statement) else value


def _before(value: object, language: str) -> object:
    """Statements as they are, to be printed where the width is known, and the text of other values."""
    if isinstance(value, list | tuple):
        return [_before(one, language) for one in value]
    return value if isinstance(value, Statement | Bracketed) else _text_of(value, language)


def _of_texts(function: Callable[..., object], language: str) -> Callable[..., object]:
    """A filter whose first operand is printed before."""
    return lambda value, *more: function(_text_of(value, language), *more)


def _compiled() -> BytecodeCache | None:
    """Templates as jinja compiled them, in the folder that jinja makes for a user among temporary files. To compile
    them takes a quarter of the time of rendering a spec. None where that folder is not the user's alone."""
    from jinja2 import FileSystemBytecodeCache
    from jinja2.bccache import Bucket

    class Kept(FileSystemBytecodeCache):
        def dump_bytecode(self, bucket: Bucket) -> None:
            with suppress(OSError):  # where nothing can be kept, it is compiled again
                super().dump_bytecode(bucket)

    # A cache in the project could come with a cloned repository, and its bytecode would run.
    # jinja knows them by their text. What this file makes of a text belongs to it.
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    try:
        return Kept(pattern=f"__kgen_{own}_%s.cache")
    except (OSError, RuntimeError):
        return None


def _with_macros(source: str) -> Iterator[tuple[str, bool]]:
    """The lines of a template, and if each is part of a macro."""
    inside = False
    for line in source.split("\n"):
        inside = (inside or line.startswith("{% macro ")) and not line.startswith("{% endmacro ")
        yield line, inside


def _in_place(line: str, macro: bool = False) -> str:
    """A line of a template, with its indentation told to jinja. A macro's lines are set in once more by its calls."""
    inner = line.strip()
    indent = len(line) - len(line.lstrip())
    if inner.startswith("{{") and inner.find("}}") == len(inner) - 2:
        # The comment has jinja leave out the end of the line.
        return f"{inner[:-2]}| lines({indent}, {CALLED * macro}) }}}}{{##}}"
    if inner.startswith("{% include ") and indent:
        return f"{{% filter indent({indent}, true) %}}{inner}{{% endfilter %}}"
    return line


def texts_of(template: Template) -> dict[str, str]:
    """The texts of a template, of all templates within it, and of what these name in their tags, by name."""
    env = environment(template_root())
    found = (template_texts(env, part.template) for part in parts(template))
    return dict(sorted({name: text for texts in found for name, text in texts.items()}.items()))


@cache
def template_texts(env: Environment, name: str) -> dict[str, str]:
    """The text of a template and of everything that it imports, includes or extends, by name.

    jinja would parse all of them, also what a spec has no use for. The tags stand on lines of their own.
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
    """The templates that a text names in its tags."""
    lines = (line.strip() for line in text.splitlines())
    tags = ("{% include ", "{% from ", "{% import ", "{% extends ")
    return [line.replace("'", '"').split('"')[1] for line in lines if line.startswith(tags)]
