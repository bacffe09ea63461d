"""Adapters of specs: folders through which other programs call kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import family

if TYPE_CHECKING:
    from kgen.spec.load import Loaded


# Adapters are folders next to the kernels, not inside: each folder is a package with all that it
# needs, and can be copied. `adapters:` does not change the kernels, so their hashes and ledger
# records do not depend on it.
@dataclass(frozen=True)
class Adapter:
    """The files of an adapter of a spec, by folder."""

    folders: Mapping[str, Mapping[str, str]]
    started: Mapping[str, str] = field(default_factory=dict)
    """Files by path that kgen writes only if they are missing, and that belong to the user."""
    specs: tuple[Loaded, ...] = ()
    """The specs whose kernels are in the folders."""
    fits: tuple[str, ...] = ()
    """The callers that can use the kernels: a line for each adapter that names some."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """The specs of folders, if the adapter has several specs."""
    remarks: tuple[str, ...] = ()
    """Sentences for the user: the files of the spec that an adapter leaves out."""


def listed(variants: Sequence[Loaded]) -> tuple[str, ...]:
    """Return the adapters that a spec lists."""
    return tuple(getattr(variants[0].spec, "adapters", ()))


def adapted(variants: Sequence[Loaded], kinds: Iterable[str]) -> Adapter:
    """Return the adapters of these kinds as one.

    Raises `KgenError` for all kinds that the spec cannot have.
    """
    folders: dict[str, Mapping[str, str]] = {}
    started: dict[str, str] = {}
    specs: list[Loaded] = []
    fits: list[str] = []
    remarks: list[str] = []
    wrong: list[Diagnostic] = []
    for kind in kinds:
        try:
            made = _made(variants, kind)
        except KgenError as error:
            wrong += _where_it_is_listed(variants, kind, error.diagnostics)
            continue
        folders |= made.folders
        started |= made.started
        specs += made.specs
        fits += made.fits
        remarks += made.remarks
    if wrong:
        raise KgenError(wrong)
    return Adapter(folders, started, tuple(specs), tuple(fits), remarks=tuple(remarks))


def packaged(specs: Sequence[Sequence[Loaded]], kind: str, name: str | None = None) -> Adapter:
    """Return one adapter of this kind with the kernels of several specs.

    Its name is the name of the family by default. Raises `KgenError` if the specs belong to several
    families, or if the family has no such adapter.
    """
    kernel = specs[0][0].spec.kernel
    own = family(kernel).packages
    for variants in specs:
        if variants[0].spec.kernel != kernel or kind not in own:
            message = f"one package for {kind} cannot have kernels of `{variants[0].spec.name}`"
            hint = f"choose from {', '.join(own)}" if own else "leave it out"
            hint = "name specs of one kernel" if kind in own else hint
            path = variants[0].path.as_posix()
            raise KgenError(Diagnostic("no-adapter", message, path, 1, 1, hint=hint))
    made: Adapter = own[kind](specs, name or kernel)
    return made


def _made(variants: Sequence[Loaded], kind: str) -> Adapter:
    kernel = variants[0].spec.kernel
    own = family(kernel).adapters
    if kind not in own:
        message = f"`kernel: {kernel}` has no adapter for {kind}"
        hint = f"choose from {', '.join(own)}" if own else "leave it out"
        raise KgenError(
            Diagnostic("no-adapter", message, variants[0].path.as_posix(), 1, 1, hint=hint)
        )
    made: Adapter = own[kind](variants)
    return made


def _where_it_is_listed(
    variants: Sequence[Loaded], kind: str, said: Iterable[Diagnostic]
) -> Iterable[Diagnostic]:
    """Return the diagnostics of an adapter, moved to the item of `adapters` in the spec, if there
    is one.

    Some diagnostics are about specs that kgen derives, which have no file.
    """
    if kind not in (asked := listed(variants)):
        return said
    from kgen.spec.source import Document

    document = Document(variants[0].text, variants[0].path.as_posix())
    place = ("adapters", asked.index(kind))
    return [document.value(d.code, d.message, place, d.hint) for d in said]
