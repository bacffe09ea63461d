"""The jinja environment, and where templates are found.

Templates make no decisions: what they print is prepared in Python (`tests/render/test_templates.py` holds that).
Prepared fragments of several lines are set into place with jinja's own `indent` filter.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.render.filters import FILTERS

if TYPE_CHECKING:
    from jinja2 import Environment

PACKAGE = Path(__file__).resolve().parents[1]


def template_root() -> Path:
    """The folder of templates: inside an installed wheel, else beside the package in the repository."""
    installed = PACKAGE / "_data" / "templates"
    return installed if installed.is_dir() else PACKAGE.parent / "templates"


@cache
def environment(root: Path) -> Environment:
    """An environment in which a name that nobody prepared is an error, and block tags leave no blank line."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(root),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        newline_sequence="\n",
    )
    found.filters |= FILTERS
    return found


@cache
def template_texts(env: Environment, name: str) -> dict[str, str]:
    """The text of a template and of everything that it imports, includes or extends, by name."""
    from jinja2.meta import find_referenced_templates

    if env.loader is None:
        raise ValueError("the environment has no loader")
    texts: dict[str, str] = {}
    pending = [name]
    while pending:
        current = pending.pop()
        if current in texts:
            continue
        texts[current] = env.loader.get_source(env, current)[0]
        for other in find_referenced_templates(env.parse(texts[current])):
            if other is None:
                raise ValueError(f"{current}: the name of an imported template must be a literal")
            pending.append(other)
    return dict(sorted(texts.items()))
