"""The files that `--check` and `--diff` compare: every file of kgen in a folder, wherever its spec
is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kgen.diagnostics import KgenError
from kgen.family import family, packaged_adapters
from kgen.render import manifest, project
from kgen.render.adapters import adapted
from kgen.render.builtin import builtin_specs
from kgen.render.header import spec_name
from kgen.render.project import Rendered
from kgen.render.writer import Output, folders, os_errors
from kgen.settings import settings


def render_checked(
    given: Sequence[Path], output: Path, *, targets: Collection[str] | None, single: bool
) -> list[Rendered]:
    """Render the specs of the command line.

    If it names no spec, also render the specs of the files in `output`.
    """
    there = _singles_in(output) if single else _specs_in(output)
    meant, others = _meant(given, there)
    rendered = project.render_all(meant, output, targets=targets, single=single)
    more = project.render_all(others, output, targets=targets, single=single) if others else []
    return [
        *rendered,
        *(one for one in more if single or _is_in(one, output)),
    ]


def adapt_checked(
    given: Sequence[Path], kinds: Collection[str], output: Path, name: str | None = None
) -> list[Rendered]:
    """Return the adapters of these kinds for the specs of the command line, and all adapters in
    `output`.

    A spec that cannot have an adapter is skipped, unless the command line names it. Then this
    raises `KgenError`.
    """
    there = _specs_in(output)
    meant, others = _meant(given, there)
    named = any(not path.is_dir() for path in given)
    if given:
        found = project.adapt_all(meant, kinds, name)
    else:
        found = [
            one
            for path in meant
            for kind in kinds
            for one in _adapted(path, kind)
            if len(meant) == 1 or kind not in packaged_adapters() or _is_in(one, output)
        ]
        found += _packages_in(output)
    for path in () if named else [*meant, *others]:
        left = [kind for kind in _kinds(path) if path not in meant or kind not in kinds]
        found += [_only_there(one, output) for kind in left for one in _adapted(path, kind)]
    return found


def _meant(given: Sequence[Path], there: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Return the specs of the command line, and others of `there`: none if the user named specs
    rather than folders.
    """
    named = any(not path.is_dir() for path in given)
    others = [] if named else list(there)
    missing = not given and not settings().specs.exists()
    meant = [] if missing and others else project.find_specs(given)
    known = {os.path.realpath(path) for path in meant}
    return meant, [path for path in others if os.path.realpath(path) not in known]


def _specs_in(output: Path) -> list[Path]:
    """Return the specs that the manifests in a folder name, if their files exist."""
    with os_errors():
        there = [(folder, manifest.read(folder)) for folder in folders(output)]
    paths = (recorded.spec_path(folder) for folder, recorded in there if recorded)
    return list(dict.fromkeys(_shown(path) for path in paths if path.is_file()))


def _singles_in(output: Path) -> list[Path]:
    """Return the specs of the single files in a folder.

    Their headers have no path, so they are found by name.
    """
    stock = builtin_specs()
    with os_errors():
        files = sorted(output.glob("*.py")) if output.is_dir() else []
        texts = (
            path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file()
        )
        names = [spec_name(text) for text in texts]
    own = [settings().specs / f"{name}.yaml" for name in names if name and name.isidentifier()]
    return [
        path if path.is_file() else stock[path.stem]
        for path in own
        if path.is_file() or path.stem in stock
    ]


def _shown(path: Path) -> Path:
    """Return a path relative to the working directory, if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _is_there(output: Output, folder: Path) -> bool:
    return (folder / output.name / manifest.MANIFEST).exists()


def _kinds(path: Path) -> tuple[str, ...]:
    return tuple(family(project.load(path)[0].spec.kernel).adapters)


def _adapted(path: Path, kind: str) -> Iterator[Rendered]:
    """Yield the adapter of a spec, if the spec can have it."""
    variants = project.load(path)
    try:
        made = adapted(variants, [kind])
    except KgenError:
        return
    yield _silent(project.as_rendered(variants, made))


def _packages_in(output: Path) -> Iterator[Rendered]:
    """Yield the packages in a folder that have the kernels of several specs."""
    with os_errors():
        there = {folder: manifest.read(folder) for folder in folders(output)}
    for folder in there:
        kind = next((k for k in packaged_adapters() if folder.name.endswith(f"_{k}")), None)
        if kind is None or folder.parent != output:
            continue
        recorded = (x.spec_path(at) for at, x in there.items() if x and folder in (at, *at.parents))
        specs = list(dict.fromkeys(_shown(path) for path in recorded if path.is_file()))
        if len(specs) > 1:
            made = project.adapt_all(specs, [kind], folder.name.removesuffix(f"_{kind}"))
            yield from map(_silent, made)


def _silent(one: Rendered) -> Rendered:
    """Return an adapter without lines about its callers and without files of the user."""
    return replace(one, started={}, specs=(), fits=())


def _is_in(one: Rendered, output: Path) -> bool:
    """True if a folder of an adapter exists."""
    return any(_is_there(o, output) for o in one.outputs)


def _only_there(one: Rendered, output: Path) -> Rendered:
    """Return an adapter without its outputs, unless one of its folders exists."""
    return one if _is_in(one, output) else replace(one, outputs=())
