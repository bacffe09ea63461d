"""Adapters of specs: what others call kernels by, in folders of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import family
from kgen.render.project import each, load
from kgen.render.writer import Output


@dataclass(frozen=True)
class Adapter:
    """What an adapter of a spec is made of: files by folder, which kgen keeps, and by path those that are written where
    they are missing and the user's from then on."""

    folders: Mapping[str, Mapping[str, str]]
    started: Mapping[str, str] = field(default_factory=dict)


def adapters(paths: Iterable[Path], kinds: Iterable[str]) -> tuple[list[Output], dict[str, str]]:
    """The folders of all specs, and the files that they start with. Raises `KgenError` with all its diagnostics."""
    kinds = list(kinds)

    def adapted(path: Path) -> list[tuple[Path, Adapter]]:
        variants = load(path)
        own = family(variants[0].spec.kernel).adapters
        for kind in (kind for kind in kinds if kind not in own):
            message = f"a spec of `{variants[0].spec.kernel}` has no adapter for {kind}"
            hint = f"it has: {', '.join(own)}" if own else "leave it out"
            raise KgenError(Diagnostic("no-adapter", message, path.as_posix(), 1, 1, hint=hint))
        return [(path, own[kind](variants)) for kind in kinds]

    made = [one for found in each(paths, adapted) for one in found]
    outputs = [Output(path, folder, files) for path, one in made for folder, files in one.folders.items()]
    return outputs, {name: text for _, one in made for name, text in one.started.items()}
