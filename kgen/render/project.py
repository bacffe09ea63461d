"""Find, load and render the specs of a project.

Errors of all specs are collected into one `KgenError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kgen import family
from kgen.diagnostics import Diagnostic, KgenError, did_you_mean
from kgen.files import checked_path
from kgen.render import cache
from kgen.render.adapters import Adapter, adapted, listed, packaged
from kgen.render.builtin import builtin_specs
from kgen.render.rendering import blaming, render_variants
from kgen.render.writer import Output
from kgen.settings import settings

if TYPE_CHECKING:
    from kgen.spec.load import Loaded

S = TypeVar("S")
T = TypeVar("T")


def find_specs(given: Sequence[Path]) -> list[Path]:
    """Return the spec files for the arguments of a command.

    A directory stands for all its `*.yaml`. A name stands for the spec of the project, or the stock
    spec. Without arguments, return the specs of the project. Raises `KgenError` if there is none.
    """
    found: list[Path] = []
    for path in given or [settings().specs]:
        inside = sorted(path.glob("*.yaml")) if path.is_dir() else []
        if inside or (path.is_dir() and not given):
            found += inside
        elif path.exists() and not path.is_dir():
            found.append(path)
        elif named := _named(path):
            found.append(named)
        else:
            raise KgenError(_not_found(path, given))
    found = [checked_path(path) for path in found]
    return list({os.path.realpath(path): path for path in reversed(found)}.values())[::-1]


def _named(path: Path) -> Path | None:
    """Return the spec of this name, in the project or among the stock specs."""
    if not str(path).isidentifier():
        return None
    own = settings().specs / f"{path}.yaml"
    return own if own.is_file() else builtin_specs().get(str(path))


def _not_found(path: Path, given: Sequence[Path]) -> Diagnostic:
    if path.is_dir():
        return Diagnostic("no-specs", "the directory has no *.yaml file", file=str(path))
    hint = None
    if not given:
        hint = (
            f"name a spec, or run kgen where `{path.as_posix()}/` is; `kgen list --builtin` "
            "lists stock specs"
        )
    elif str(path).isidentifier():
        hint = did_you_mean(str(path), builtin_specs()) or "`kgen list --builtin` lists stock specs"
    return Diagnostic("no-specs", "no such file or directory", file=str(path), hint=hint)


def load_all(paths: Iterable[Path]) -> list[Loaded]:
    """Load all variants of all specs. Raises `KgenError` with the errors of all specs."""
    return [one for variants in each(paths, load) for one in variants]


@dataclass(frozen=True)
class Rendered:
    """The rendering of a spec: its folder, one for each variant, and the folders of its
    adapters.
    """

    outputs: tuple[Output, ...]
    spec_text: str | None
    """None on a cache hit."""
    started: Mapping[str, str] = field(default_factory=dict)
    """Files by path that are written only if they are missing."""
    remarks: tuple[str, ...] = ()
    """Sentences for the user, each once."""
    specs: tuple[Loaded, ...] = ()
    """The specs that were planned, once each."""
    fits: tuple[str, ...] = ()
    """Lines about the callers that can use the adapters."""


def render_all(
    paths: Iterable[Path],
    generated: Path,
    *,
    targets: Collection[str] | None = None,
    single: bool = False,
    cached: bool = False,
) -> list[Rendered]:
    """Render all specs. Raises `KgenError` with the errors of all specs.

    `single` renders one file per spec that needs no other. `cached` allows cache hits.
    """

    def render(path: Path) -> Rendered:
        if cached and targets is None and not single and (hit := cache.lookup(path, generated)):
            return Rendered(hit, None)
        variants, whole = load(path), targets is None and not single
        remarks: list[str] = []
        folders = render_variants(variants, targets, single=single, remark=remarks.append)
        said = tuple(f"{variants[0].spec.name}: {remark}" for remark in dict.fromkeys(remarks))
        outputs = [Output(path, folder, files, whole=whole) for folder, files in folders.items()]
        if single:
            return Rendered(tuple(outputs), variants[0].text, remarks=said, specs=tuple(variants))
        beside = adapted(variants, listed(variants))
        said += beside.remarks if whole else ()
        # An adapter covers all targets: with `--target`, its files stay as they are.
        outputs += [
            Output(path, folder, files if whole else {}, whole)
            for folder, files in beside.folders.items()
        ]
        started, specs = beside.started if whole else {}, beside.specs if whole else ()
        return Rendered(tuple(outputs), variants[0].text, started, said, _once(variants, specs))

    rendered = each(paths, render)
    if targets is not None:
        _check_targets(targets, rendered)
    return rendered


def adapt_all(
    paths: Iterable[Path], kinds: Collection[str], name: str | None = None
) -> list[Rendered]:
    """Render adapters of these kinds for all specs.

    With several specs or a `name`, a kind that allows it has one package with all kernels. Raises
    `KgenError` with the errors of all specs.
    """
    paths = list(paths)
    several = len(paths) > 1 or name is not None
    together = [kind for kind in kinds if several and kind in family.packaged_adapters()]
    apart = [kind for kind in kinds if kind not in together]

    def adapt(path: Path) -> Rendered:
        variants = load(path)
        return as_rendered(variants, adapted(variants, apart))

    def package(kind: str) -> Rendered:
        specs = each(paths, load)
        return as_rendered(specs[0], packaged(specs, kind, name))

    work = [partial(adapt, path) for path in paths if apart]
    work += [partial(package, kind) for kind in together]
    return each(work, lambda made: made())


def as_rendered(variants: Sequence[Loaded], made: Adapter) -> Rendered:
    """Return the rendering of an adapter whose first spec has these variants."""
    outputs = tuple(
        Output(made.paths.get(folder, variants[0].path), folder, files)
        for folder, files in made.folders.items()
    )
    specs = _once((), made.specs)
    return Rendered(
        outputs, variants[0].text, made.started, made.remarks, specs=specs, fits=made.fits
    )


def _once(variants: Iterable[Loaded], more: Iterable[Loaded]) -> tuple[Loaded, ...]:
    return tuple({id(one): one for one in (*variants, *more)}.values())


def marked(rendered: Iterable[Rendered], folders: Collection[str], proved: bool) -> list[Rendered]:
    """Return the same renderings, with `proved` recorded in the manifests of `folders`."""
    return [
        replace(
            one,
            outputs=tuple(
                replace(o, proved=proved) if o.name in folders else o for o in one.outputs
            ),
        )
        for one in rendered
    ]


def together(rendered: Iterable[Rendered]) -> tuple[list[Output], dict[str, str]]:
    """Return the folders of several specs, and the files that are written only if they are
    missing.
    """
    made = list(rendered)
    outputs = [output for one in made for output in one.outputs]
    return outputs, {name: text for one in made for name, text in one.started.items()}


def remarks(rendered: Iterable[Rendered], generated: Path, changed: Iterable[Path]) -> list[str]:
    """Return the remarks of the specs to which one of the `changed` files belongs."""
    paths = {path.as_posix() for path in changed}
    return [
        remark
        for one in rendered
        if any(
            path.as_posix() in paths
            for o in one.outputs
            for name in o.files
            for path in (generated / o.name / name, generated / name)  # the second with `--single`
        )
        for remark in one.remarks
    ]


def remember(rendered: Iterable[Rendered], generated: Path) -> None:
    """Store in the cache that these files are on disk."""
    for each in rendered:
        if each.spec_text is not None and each.outputs[0].whole:
            cache.store(each.outputs, each.spec_text, generated, each.started)


def _check_targets(targets: Collection[str], rendered: Iterable[Rendered]) -> None:
    known = family.known_targets()
    hint = f"targets are: {', '.join(known)}"
    unknown = [
        Diagnostic("unknown-target", f"there is no target `{target}`", hint=hint)
        for target in targets
        if target not in known
    ]
    if unknown:
        raise KgenError(unknown)
    if not any(output.files for each in rendered for output in each.outputs):
        raise KgenError(
            Diagnostic("no-target", f"no spec has the target {', '.join(sorted(targets))}")
        )


def load(path: Path) -> list[Loaded]:
    from kgen.spec.load import load_variants

    with blaming(str(path)):
        return load_variants(path)


def each(items: Iterable[S], work: Callable[[S], T]) -> list[T]:
    """Call `work` on all items and return the results.

    Raises one `KgenError` with the errors of all items.
    """
    results: list[T] = []
    errors: list[KgenError] = []
    for item in items:
        try:
            results.append(work(item))
        except KgenError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise KgenError(diagnostic for error in errors for diagnostic in error.diagnostics)
    return results
