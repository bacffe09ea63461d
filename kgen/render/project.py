"""The specs of a project: finding them, loading them, rendering them; every error of every spec at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kgen import family
from kgen.diagnostics import Diagnostic, KgenError, did_you_mean
from kgen.files import checked_path
from kgen.render import cache
from kgen.render.adapters import adapted, listed
from kgen.render.builtin import builtin_specs
from kgen.render.rendering import blaming, render_variants
from kgen.render.writer import Output
from kgen.settings import settings

if TYPE_CHECKING:
    from kgen.spec.load import Loaded

T = TypeVar("T")


def find_specs(given: Sequence[Path]) -> list[Path]:
    """The spec files that are meant: a directory means all its `*.yaml`, a name the project's spec or the stock spec of
    that name, nothing means those of the project."""
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
    """The spec that a bare name means."""
    if not str(path).isidentifier():
        return None
    own = settings().specs / f"{path}.yaml"
    return own if own.is_file() else builtin_specs().get(str(path))


def _not_found(path: Path, given: Sequence[Path]) -> Diagnostic:
    if path.is_dir():
        return Diagnostic("no-specs", "the directory has no *.yaml", file=str(path))
    hint = None
    if not given:
        hint = (
            f"name a spec, or run kgen where `{path.as_posix()}/` is; `kgen list --builtin` names stock specs"
        )
    elif str(path).isidentifier():
        hint = did_you_mean(str(path), builtin_specs()) or "`kgen list --builtin` names stock specs"
    return Diagnostic("no-specs", "no such file or directory", file=str(path), hint=hint)


def load_all(paths: Iterable[Path]) -> list[Loaded]:
    """Every spec, each variant of it, or every error of every spec."""
    return [one for variants in each(paths, load) for one in variants]


@dataclass(frozen=True)
class Rendered:
    """What a spec makes: a folder, one for each of its variants, and those of its adapters. `spec_text` is None where
    the cache vouched for the files on disk. `started` are files by path that are written where they are missing. `fits`
    are lines about the callers that adapters fit."""

    outputs: tuple[Output, ...]
    spec_text: str | None
    started: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    """Sentences for the person who renders it, each once."""
    specs: tuple[Loaded, ...] = ()
    """The specs that were planned, once each."""
    fits: tuple[str, ...] = ()


def render_all(
    paths: Iterable[Path],
    generated: Path,
    *,
    targets: Collection[str] | None = None,
    single: bool = False,
    cached: bool = False,
) -> list[Rendered]:
    """What every spec makes, or every error of every spec. `single`: the one file that does without others. `cached`:
    ask the cache first."""

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
        # An adapter is of all targets at once: where some are asked for, it stays as it is.
        outputs += [
            Output(path, folder, files if whole else {}, whole) for folder, files in beside.folders.items()
        ]
        started, specs = beside.started if whole else {}, beside.specs if whole else ()
        return Rendered(tuple(outputs), variants[0].text, started, said, _once(variants, specs))

    rendered = each(paths, render)
    if targets is not None:
        _check_targets(targets, rendered)
    return rendered


def adapt_all(paths: Iterable[Path], kinds: Collection[str]) -> list[Rendered]:
    """The adapters of every spec, or every error of every spec."""

    def adapt(path: Path) -> Rendered:
        variants = load(path)
        made = adapted(variants, kinds)
        outputs = tuple(Output(path, folder, files) for folder, files in made.folders.items())
        return Rendered(outputs, variants[0].text, made.started, specs=_once((), made.specs), fits=made.fits)

    return each(paths, adapt)


def _once(variants: Iterable[Loaded], more: Iterable[Loaded]) -> tuple[Loaded, ...]:
    return tuple({id(one): one for one in (*variants, *more)}.values())


def marked(rendered: Iterable[Rendered], folders: Collection[str], proved: bool) -> list[Rendered]:
    """The same, with manifests of some folders that say whether anything was proved before they were written."""
    return [
        replace(
            one,
            outputs=tuple(replace(o, proved=proved) if o.name in folders else o for o in one.outputs),
        )
        for one in rendered
    ]


def together(rendered: Iterable[Rendered]) -> tuple[list[Output], dict[str, str]]:
    """What several specs make: their folders, and the files that they start with."""
    made = list(rendered)
    outputs = [output for one in made for output in one.outputs]
    return outputs, {name: text for one in made for name, text in one.started.items()}


def remarks(rendered: Iterable[Rendered], generated: Path, changed: Iterable[Path]) -> list[str]:
    """The remarks of the specs that have one of the `changed` files."""
    paths = {path.as_posix() for path in changed}
    return [
        remark
        for one in rendered
        if any(
            path.as_posix() in paths
            for o in one.outputs
            for name in o.files
            for path in (generated / o.name / name, generated / name)  # the second of `--single`
        )
        for remark in one.remarks
    ]


def remember(rendered: Iterable[Rendered], generated: Path) -> None:
    """Tell the cache what is on disk now."""
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
        raise KgenError(Diagnostic("no-target", f"no spec asks for the target {', '.join(sorted(targets))}"))


def load(path: Path) -> list[Loaded]:
    from kgen.spec.load import load_variants

    with blaming(str(path)):
        return load_variants(path)


def each(paths: Iterable[Path], work: Callable[[Path], T]) -> list[T]:
    """The results for all paths; errors are collected so that one run shows them all."""
    results: list[T] = []
    errors: list[KgenError] = []
    for path in paths:
        try:
            results.append(work(path))
        except KgenError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise KgenError(diagnostic for error in errors for diagnostic in error.diagnostics)
    return results
