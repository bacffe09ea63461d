"""From a loaded spec to the text of its files, in memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.diagnostics import KgenError
from kgen.render import environment
from kgen.render.header import digest, stamp
from kgen.render.names import apart, clashes
from kgen.spec.user_text import UserText

if TYPE_CHECKING:
    from jinja2 import Environment

    from kgen.spec.load import Loaded
    from kgen.targets import Source

FILENAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.[a-z]+")


class InternalError(Exception):
    """Something broke in kgen itself while it worked on a spec. The cause is chained."""


@contextmanager
def blaming(spec: str) -> Iterator[None]:
    """An exception that is not the user's to mend becomes an `InternalError` that names the spec."""
    try:
        yield
    except (KgenError, InternalError):
        raise
    except Exception as error:
        raise InternalError(f"while rendering {spec}: {type(error).__name__}: {error}") from error


def render_spec(loaded: Loaded, targets: Collection[str] | None = None) -> dict[str, str]:
    """Filename -> text for every file that the spec asks for, or those of `targets` alone."""
    with blaming(f"spec `{loaded.spec.name}` ({Path(loaded.path).name})"):
        env = environment.environment(environment.template_root())
        sources = _sources(loaded, targets)
        bodies = {name: _body(env, source) for name, source in sources.items()}
        others = {name: _body(env, source) for name, source in _sources(apart(loaded), targets).items()}
        marks = {name: source.comment for name, source in sources.items()}
        if wrong := clashes(loaded, bodies, others, marks):
            raise KgenError(wrong)
        return {name: _file(env, loaded, source, bodies[name]) for name, source in sources.items()}


def _sources(loaded: Loaded, targets: Collection[str] | None) -> dict[str, Source]:
    """What each file is made of."""
    from kgen.targets import asked_targets, sources
    from kgen.targets.package import package

    files: dict[str, Source] = {}
    asked = [target for target in asked_targets(loaded) if targets is None or target in targets]
    found = [source for target in asked for source in sources(loaded, target)]
    if targets is None and (whole := package(loaded, found)):
        found.append(whole)
    for source in found:
        if not FILENAME.fullmatch(source.filename) or source.filename in files:
            raise ValueError(f"{loaded.spec.name} emits a file called {source.filename!r}")
        files[source.filename] = source
    return files


def _body(env: Environment, source: Source) -> str:
    """One file without its header, and without trailing blanks: templates need not mind where a fragment is empty."""
    rendered = env.get_template(source.template).render(source.context)
    return "\n".join(line.rstrip() for line in rendered.split("\n")).strip("\n") + "\n"


def _file(env: Environment, loaded: Loaded, source: Source, body: str) -> str:
    return stamp(
        body,
        source.comment,
        spec=loaded.spec.name,
        spec_file=UserText(Path(loaded.path).name),
        inputs=_inputs_hash(env, loaded, source),
        spdx=loaded.spec.license,
    )


def _inputs_hash(env: Environment, loaded: Loaded, source: Source) -> str:
    """Stands for the spec as understood (comments and layout of its YAML do not count) and its templates.

    The model keeps its order: that of buffers is the order of the launcher's arguments.
    """
    texts = environment.template_texts(env, source.template)
    parts = [loaded.spec.model_dump_json(), *(f"{name}\0{text}" for name, text in texts.items())]
    return digest("\0".join(parts))
